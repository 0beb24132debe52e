"""The wire format of protocol buffers, as far as messages of this server need it.

A message is a sequence of fields, each a number, a kind and a value. Who reads one looks the numbers up in the schema
of its sender (`kitae.tinker.messages`); unknown fields are skipped by not being asked for.
"""

import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from kitae.errors import RequestError

Value = int | float | bytes
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5


def read(message: bytes) -> Mapping[int, Sequence[Value]]:
    """The values of each field in order. Integers are unsigned; raises `RequestError` for what is cut or malformed."""
    found: dict[int, list[Value]] = defaultdict(list)
    for number, value in _fields(message):
        found[number].append(value)
    return found


def _fields(message: bytes) -> Iterator[tuple[int, Value]]:
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _varint(message, at)
        elif kind in (_EIGHT, _FOUR):
            size = 8 if kind == _EIGHT else 4
        else:
            raise RequestError(f"a protobuf message must have fields of known kinds, got {kind}")
        part, at = message[at : at + size], at + size
        if at > len(message):
            raise RequestError(f"a protobuf message must be whole, got one that ends within field {number}")
        yield number, part if kind == _BYTES else struct.unpack("<d" if size == 8 else "<f", part)[0]


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        if at >= len(message) or shift > 63:
            raise RequestError("a protobuf message must be whole, got one that ends within a number")
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def text(values: Sequence[Value]) -> str:
    """The last value as text; "" where there is none."""
    last = values[-1] if values else b""
    try:
        return last.decode() if isinstance(last, bytes) else str(last)
    except UnicodeDecodeError:
        raise RequestError("a text in a protobuf message must be UTF-8") from None


def whole(values: Sequence[Value]) -> int:
    """The last value as a whole number, 0 where there is none."""
    last = values[-1] if values else 0
    if not isinstance(last, int):
        raise RequestError(f"a field of a protobuf message must be a whole number, got {type(last).__name__}")
    return last


def blob(values: Sequence[Value]) -> bytes:
    """The last value as bytes, empty where there is none."""
    last = values[-1] if values else b""
    if not isinstance(last, bytes):
        raise RequestError(f"a field of a protobuf message must be bytes, got {type(last).__name__}")
    return last


def blobs(values: Sequence[Value]) -> list[bytes]:
    return [blob([value]) for value in values]


def packed(values: Sequence[Value]) -> list[int]:
    """Repeated whole numbers, one by one or packed into bytes."""
    found = []
    for value in values:
        if isinstance(value, bytes):
            at = 0
            while at < len(value):
                number, at = _varint(value, at)
                found.append(number)
        else:
            found.append(whole([value]))
    return found


def write(fields: Sequence[tuple[int, Value | str]]) -> bytes:
    """A message of these fields, in order."""
    parts = bytearray()
    for number, given in fields:
        value = given.encode() if isinstance(given, str) else given
        if isinstance(value, bytes):
            parts += _as_varint(number << 3 | _BYTES) + _as_varint(len(value)) + value
        elif isinstance(value, float):
            parts += _as_varint(number << 3 | _EIGHT) + struct.pack("<d", value)
        else:
            parts += _as_varint(number << 3 | _VARINT) + _as_varint(value)
    return bytes(parts)


def _as_varint(value: int) -> bytes:
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)
