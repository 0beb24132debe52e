"""Frames between processes: a JSON header, then arrays of numbers as they lie in memory.

    12 bytes: lengths of header and body │ {"done": 7, "finish": "stop", "arrays": [["tokens", "<i8", [12]], …]} │ body

Nothing in a frame is code, so neither side can be made to run what the other sent.
"""

import asyncio
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_LENGTHS = struct.Struct("<IQ")
_NUMBERS = "biuf"  # kinds of arrays: truth values, integers, floats


@dataclass(frozen=True, slots=True)
class Frame:
    """`Frame({"done": 7, "finish": "stop"}, {"tokens": array([4, 2]), …})`."""

    header: dict[str, Any]
    arrays: Mapping[str, Array] = field(default_factory=dict)


def pack_frame(header: Mapping[str, Any], arrays: Mapping[str, Array] | None = None) -> bytes:
    numbers = {name: np.ascontiguousarray(values) for name, values in (arrays or {}).items()}
    listed = [[name, values.dtype.str, list(values.shape)] for name, values in numbers.items()]
    head = json.dumps({**header, "arrays": listed}).encode()
    body = b"".join(values.tobytes() for values in numbers.values())
    return _LENGTHS.pack(len(head), len(body)) + head + body


async def read_frame(reader: asyncio.StreamReader) -> Frame | None:
    """The next frame; None when the other side has closed the connection, or died in the middle of one."""
    try:
        head, body = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
        header = json.loads(await reader.readexactly(head))
        data = bytearray(await reader.readexactly(body))  # arrays that may be written to
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return _frame(header, data)


def unpack_frame(data: bytes) -> Frame:
    """The inverse of `pack_frame`; its arrays cannot be written to."""
    head, body = _LENGTHS.unpack_from(data)
    start = _LENGTHS.size + head
    return _frame(json.loads(data[_LENGTHS.size : start]), data[start : start + body])


def _frame(header: dict[str, Any], data: bytes | bytearray) -> Frame:
    arrays, offset = {}, 0
    for name, kind, shape in header.pop("arrays"):
        dtype = np.dtype(kind)
        assert dtype.kind in _NUMBERS, f"a frame holds numbers, got an array of {kind}"
        arrays[name] = np.frombuffer(data, dtype, prod(shape), offset).reshape(shape)
        offset += arrays[name].nbytes
    return Frame(header, arrays)
