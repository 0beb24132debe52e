"""Sampled answers in files of the run folder. Engines write them there, and the process that drives the run handles
only their places.

    RUN/columns/engine-0-5f3c9a1e    the file of one writing process: answers, one after the other, never changed
        tokens int32 [N] │ log-probs float32 [N] │ text, UTF-8

A writer returns the place of an answer only when the answer is on the disk, so every answer that the journal refers to
exists. Data that nothing refers to (a write that was cut off, an answer that was sampled again) stays in the file and
is never read. All processes must see the same folder, so a run on several machines needs a disk that they share.
"""

import asyncio
import os
import secrets
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, Literal, Self, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt

from kitae.errors import CorruptError, DiskFullError, StoreError
from kitae.store.disk import flush, is_full
from kitae.types import LazyText, Runs

T = TypeVar("T", int, float)

FOLDER = "columns"
_REMEMBERED = 64  # answers that were read last


@dataclass(frozen=True, slots=True)
class Filed:
    """The place of an answer in a file.

    `Filed("engine-0-5f3c9a1e", offset=6148, tokens=512, letters=1804, checksum=0x1d2c3b4a)`.

    letters: the number of bytes of its text; -1: it has no text, because it is only a part of an answer.
    """

    file: str
    offset: int
    tokens: int
    letters: int
    checksum: int

    @property
    def size(self) -> int:
        return 8 * self.tokens + max(0, self.letters)

    @property
    def record(self) -> tuple[str, int, int, int, int]:
        """The fields as JSON; `Filed(*record)` is the inverse."""
        return self.file, self.offset, self.tokens, self.letters, self.checksum


@dataclass(frozen=True, slots=True)
class Contents:
    """The columns of one answer: `Contents(tokens=[42, 2], logprobs=[-.1, -.3], text="56")`."""

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    text: str


class ColumnFiles:
    """Reads answers: `ColumnFiles(run / "columns")`. It keeps no file open, and the folder need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.read: Callable[[Filed], Contents] = lru_cache(_REMEMBERED)(self._read)

    def lazy(self, stretches: "tuple[Stretch, ...]") -> "tuple[LazyColumn[int], LazyColumn[float]]":
        """The lazy columns of tokens and of log-probs."""
        return LazyColumn(self, "tokens", stretches), LazyColumn(self, "logprobs", stretches)

    def _read(self, filed: Filed) -> Contents:
        path = self.folder / filed.file
        what = f"{path}: the answer at byte {filed.offset} ({filed.tokens} tokens)"
        try:
            with path.open("rb") as file:
                file.seek(filed.offset)
                data = file.read(filed.size)
        except OSError as error:
            raise StoreError(f"{what} cannot be read: {error}") from error
        if len(data) < filed.size:
            raise CorruptError(f"{what} must have {filed.size} bytes, got {len(data)}")
        if (found := zlib.crc32(data)) != filed.checksum:
            raise CorruptError(f"{what} must have the checksum {filed.checksum:08x}, got {found:08x}")
        cut = 4 * filed.tokens
        tokens, logprobs = np.frombuffer(data[:cut], "<i4"), np.frombuffer(data[cut : 2 * cut], "<f4")
        return Contents(tokens, logprobs, data[2 * cut :].decode())


@lru_cache
def column_files(folder: Path) -> ColumnFiles:
    """The one reader of a folder in this process."""
    return ColumnFiles(folder)


class ColumnWriter:
    """Writes a file of its own: `ColumnWriter(run / "columns", "engine-0")`; `file` is its name.

    Answers that are added during a write are written together after it, with one flush to the disk.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.file = f"{name}-{secrets.token_hex(4)}"
        self._waiting: list[tuple[bytes, int, int, asyncio.Future[Filed]]] = []
        self._writing: asyncio.Task[None] | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(folder / self.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
            flush(folder)
        except OSError as error:
            raise _explained(folder / self.file, error) from error

    async def add(self, tokens: Sequence[int], logprobs: Sequence[float], text: str | None = None) -> Filed:
        """Return when the answer is on the disk. Raises `StoreError` if it cannot be written."""
        letters = b"" if text is None else text.encode("utf-8", "replace")
        data = np.asarray(tokens, "<i4").tobytes() + np.asarray(logprobs, "<f4").tobytes() + letters
        future: asyncio.Future[Filed] = asyncio.get_running_loop().create_future()
        self._waiting.append((data, len(tokens), -1 if text is None else len(letters), future))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())
        return await future

    async def _write(self) -> None:
        while self._waiting:
            taken, self._waiting = self._waiting, []
            try:
                offset = await asyncio.to_thread(self._append, b"".join(data for data, *_ in taken))
            except OSError as error:
                for *_, future in taken:
                    _settle(future, error=_explained(self.folder / self.file, error))
                continue
            for data, tokens, letters, future in taken:
                _settle(future, Filed(self.file, offset, tokens, letters, zlib.crc32(data)))
                offset += len(data)
        self._writing = None

    def _append(self, data: bytes) -> int:
        """The offset at which the data begins, which is behind the remains of a write that failed."""
        offset, written = os.lseek(self._descriptor, 0, os.SEEK_END), 0
        while written < len(data):
            written += os.write(self._descriptor, memoryview(data)[written:])
        os.fsync(self._descriptor)
        return offset


Stretch = tuple[Filed, int, int]
"""The tokens of an answer from one position up to another."""


class LazyColumn(Sequence[T], Generic[T]):
    """A column that lies in files: its length is known, and using its numbers reads the files.

    It consists of stretches of answers, so slices and concatenations of lazy columns are lazy as well.
    """

    __slots__ = ("_length", "column", "files", "stretches")

    def __init__(
        self, files: ColumnFiles, column: Literal["tokens", "logprobs"], stretches: tuple[Stretch, ...]
    ) -> None:
        self.files = files
        self.column: Literal["tokens", "logprobs"] = column
        self.stretches = stretches
        self._length = sum(stop - start for _, start, stop in stretches)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, key: int) -> T: ...
    @overload
    def __getitem__(self, key: slice) -> Self: ...
    def __getitem__(self, key: int | slice) -> T | Self:
        if not isinstance(key, slice):
            found: T = self.__array__()[key].item()
            return found
        start, stop, step = key.indices(self._length)
        assert step == 1, "a column is cut, not thinned out"
        return type(self)(self.files, self.column, _cut(self.stretches, start, stop))

    def __iter__(self) -> Iterator[T]:
        return iter(self.__array__().tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        parts = [getattr(self.files.read(filed), self.column)[a:b] for filed, a, b in self.stretches]
        found: npt.NDArray[Any] = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        return found if dtype is None else found.astype(dtype)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LazyColumn) and (self.column, self.stretches) == (other.column, other.stretches):
            return True
        if not isinstance(other, LazyColumn | tuple) or len(self) != len(other):
            return False
        return tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"<{self._length} {self.column} in {', '.join(sorted({filed.file for filed, *_ in self.stretches}))}>"

    @property
    def text(self) -> "StoredText | None":
        """The text of the answer; None where the column is not exactly one whole answer with a text."""
        if len(self.stretches) != 1:
            return None
        (filed, start, stop) = self.stretches[0]
        return StoredText(self.files, filed) if stop - start == filed.tokens and filed.letters >= 0 else None


@dataclass(frozen=True, slots=True)
class StoredText(LazyText):
    """The text of an answer that lies in files."""

    files: ColumnFiles
    filed: Filed

    def __str__(self) -> str:
        return self.files.read(self.filed).text


def joined(first: Sequence[T], second: Sequence[T]) -> Sequence[T]:
    """One sequence after the other; a lazy column where both are lazy."""
    if not first or not second:
        return first or second
    found: Any = (first, second)
    match found:
        case (LazyColumn(), LazyColumn()):
            found = LazyColumn(found[0].files, found[0].column, _merged((*found[0].stretches, *found[1].stretches)))
        case (Runs(), Runs()):
            found = Runs((*found[0].runs, *found[1].runs))
        case _:
            found = (*first, *second)
    return cast("Sequence[T]", found)


def record_of(stretches: Sequence[Stretch]) -> list[list[Any]]:
    """Stretches as JSON: file, offset, tokens, letters and checksum of each answer, then start and stop."""
    return [[*filed.record, start, stop] for filed, start, stop in stretches]


def stretches_of(record: Sequence[Sequence[Any]]) -> tuple[Stretch, ...]:
    return tuple((Filed(*entry[:5]), entry[5], entry[6]) for entry in record)


def _cut(stretches: Sequence[Stretch], start: int, stop: int) -> tuple[Stretch, ...]:
    found, at = list[Stretch](), 0
    for filed, a, b in stretches:
        first, last = max(start, at), min(stop, at + b - a)
        if first < last:
            found.append((filed, a + first - at, a + last - at))
        at += b - a
    return tuple(found)


def _merged(stretches: Sequence[Stretch]) -> tuple[Stretch, ...]:
    """The same stretches, with those of one answer that touch joined."""
    found = list[Stretch]()
    for filed, start, stop in stretches:
        meets = found and (found[-1][0], found[-1][2]) == (filed, start)
        found.append((filed, found.pop()[1] if meets else start, stop))
    return tuple(found)


def _settle(future: "asyncio.Future[Filed]", filed: Filed | None = None, error: Exception | None = None) -> None:
    """Settle the future, unless its caller was cancelled."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    elif filed is not None:
        future.set_result(filed)


def _explained(path: Path, error: OSError) -> StoreError:
    if is_full(error):
        return DiskFullError(f"no space left to write {path} ({error}); what was written before is safe")
    return StoreError(f"{path} cannot be written: {error}")
