"""Checksums of what a run reads back, and what it says where one does not match.

    seal("rollouts", 17, 3, tokens, …)     of a row of the journal, kept in the row
    seal("metrics", line)                  of a line of a file, kept in the line
    seal("reference", keys, logprobs, …)   of a file, kept in its header

The first value says what it is about, so that one thing in the place of another is noticed as well. A seal protects
from accidents; whoever wants to deceive can compute it too.
"""

import hashlib
from pathlib import Path

Value = str | bytes | int | float | None

_SIZE = 8  # bytes


def seal(*values: Value) -> bytes:
    """Of the values in their order. A whole number is the same as an integer and as a float, as it is for SQLite."""
    digest = hashlib.blake2b(digest_size=_SIZE)
    for value in values:
        kind, content = _content(value)
        digest.update(b"%c%d:" % (kind, len(content)))
        digest.update(content)
    return digest.digest()


def file_seal(path: Path) -> str:
    """Of all bytes of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _content(value: Value) -> tuple[bytes, bytes]:
    if isinstance(value, str):
        return b"s", value.encode("utf-8", "replace")
    if isinstance(value, bytes):
        return b"b", value
    if value is None:
        return b"n", b""
    whole = not isinstance(value, float) or value.is_integer()
    return b"v", str(int(value)).encode() if whole else float(value).hex().encode()
