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
_LEFT = ".sha256"  # the end of the names of seals that are left beside files


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


def leave_seal(path: Path) -> None:
    """Beside a file that somebody else will take over, who then need not read it."""
    _beside(path).write_text(file_seal(path))


def take_seals(folder: Path) -> dict[Path, str]:
    """Of all files below a folder. Those that were left are removed; the others are computed."""
    left = {path: path.read_text() for path in folder.rglob(f"*{_LEFT}")}
    for path in left:
        path.unlink()
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path: left.get(_beside(path)) or file_seal(path) for path in files}


def _beside(path: Path) -> Path:
    return path.with_name(path.name + _LEFT)


def _content(value: Value) -> tuple[bytes, bytes]:
    if isinstance(value, str):
        return b"s", value.encode("utf-8", "replace")
    if isinstance(value, bytes):
        return b"b", value
    if value is None:
        return b"n", b""
    whole = not isinstance(value, float) or value.is_integer()
    return b"v", str(int(value)).encode() if whole else float(value).hex().encode()
