"""Messages are read as they were written, and nothing that is cut or strange is read at all."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitae.errors import RequestError
from kitae.tinker import protobuf

fields = st.lists(
    st.tuples(st.integers(1, 2000), st.integers(0, 2**64 - 1) | st.floats(allow_nan=False) | st.binary(max_size=300))
)


@given(fields)
def test_what_is_written_is_read(given_fields: list[tuple[int, int | float | bytes]]) -> None:
    expected: dict[int, list[object]] = {}
    for number, value in given_fields:
        expected.setdefault(number, []).append(value)
    assert protobuf.read(protobuf.write(given_fields)) == expected


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(message: bytes) -> None:
    try:
        found = protobuf.read(message)
    except RequestError:
        return
    assert all(number >= 0 for number in found)


def test_the_bytes_are_those_of_the_format() -> None:
    """By the examples of the format's own description: field 1 = 150, field 2 = "testing"."""
    assert protobuf.write([(1, 150)]) == bytes.fromhex("089601")
    assert protobuf.write([(2, "testing")]) == bytes.fromhex("120774657374696e67")
    assert protobuf.write([(3, 1.5)]) == b"\x19" + struct.pack("<d", 1.5)
    assert protobuf.read(b"\x25" + struct.pack("<f", 0.5)) == {4: [0.5]}
    assert protobuf.packed([bytes.fromhex("039e05"), 7]) == [3, 670, 7]


@pytest.mark.parametrize("message", [b"\x08", b"\x12\x05abc", b"\x0b", b"\x09\x00", b"\x08" + b"\xff" * 12])
def test_what_is_cut_is_refused(message: bytes) -> None:
    with pytest.raises(RequestError, match="a protobuf message must"):
        protobuf.read(message)


def test_kinds_are_checked() -> None:
    with pytest.raises(RequestError, match="must be bytes"):
        protobuf.blob([1])
    with pytest.raises(RequestError, match="must be a whole number"):
        protobuf.whole([b"1"])
    with pytest.raises(RequestError, match="must be UTF-8"):
        protobuf.text([b"\xff"])
    assert protobuf.text([]) == "" and protobuf.whole([]) == 0
