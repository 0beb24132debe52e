"""Buckets kept under their names: in the memory of this process, or as files in a folder."""

import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kitae.errors import EngineError
from kitae.weights.base import Bucket, Manifest
from kitae.weights.layout import chunk_name

_OURS = re.compile(r"(image|delta)-\d{5,}-[0-9a-f]{16}")
_DRAFT = re.compile(_OURS.pattern + r"\.\d+\.tmp")


class Store(Protocol):
    """Bytes by name. What was `put` is never changed, only replaced; `get` gives None for what is not there.

    `keep` removes everything but these.
    """

    def put(self, name: str, data: Tensor) -> None: ...
    def get(self, name: str) -> Tensor | None: ...
    def keep(self, names: Iterable[str]) -> None: ...


class HeapStore:
    """Implements `Store` in the memory of this process. Any thread may use it."""

    def __init__(self) -> None:
        self._found: dict[str, Tensor] = {}

    def put(self, name: str, data: Tensor) -> None:
        self._found[name] = data

    def get(self, name: str) -> Tensor | None:
        return self._found.get(name)

    def keep(self, names: Iterable[str]) -> None:
        kept = set(names)
        for name in [name for name in self._found if name not in kept]:
            del self._found[name]


class FolderStore:
    """Implements `Store` as files of one folder, where nobody else writes.

    A file appears under its name when it is complete. Files are read, never mapped: one that is cut meanwhile is
    damage and no crash.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, name: str, data: Tensor) -> None:
        """`EngineError` where there is no room for it."""
        draft = self.folder / f"{name}.{threading.get_ident()}.tmp"
        try:
            data.numpy().tofile(draft)
            draft.replace(self.folder / name)
        except OSError as error:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise EngineError(f"weights cannot be written to {self.folder}: {error}") from error

    def get(self, name: str) -> Tensor | None:
        try:
            return torch.from_numpy(np.fromfile(self.folder / name, np.uint8))
        except OSError:
            return None

    def keep(self, names: Iterable[str]) -> None:
        kept = set(names)
        self._remove(lambda name: bool(_OURS.fullmatch(name)) and name not in kept)

    def sweep(self) -> None:
        """Remove what an earlier owner has left half written."""
        self._remove(lambda name: bool(_DRAFT.fullmatch(name)))

    def _remove(self, which: Callable[[str], bool]) -> None:
        with suppress(FileNotFoundError):
            for name in filter(which, os.listdir(self.folder)):
                (self.folder / name).unlink(missing_ok=True)


class NamedBuckets:
    """Implements `kitae.weights.publisher.BucketStore` over a store: a bucket that changed gets a new name.

    former: how many versions before the newest stay readable.
    """

    device = torch.device("cpu")

    def __init__(self, store: Store, former: int = 0) -> None:
        self.store = store
        self._former = former
        self._sizes: Sequence[int] = ()
        self._names: dict[int, str] = {}  # of the image's buckets
        self._delta: tuple[str, ...] = ()
        self._drafts: dict[int, Tensor] = {}
        self._last: tuple[int, Tensor] | None = None  # that was read
        self._versions: list[set[str]] = []  # names of the newest and those before it

    def reserve(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes

    def read(self, number: int) -> Tensor:
        """Zeros in place of one that is lost: then it is changed, and put anew."""
        if self._last is None or self._last[0] != number:
            found = self.store.get(self._names[number])
            if found is None or len(found) != self._sizes[number]:
                found = torch.zeros(self._sizes[number], dtype=torch.uint8)
            self._last = number, found
        return self._last[1]

    def draft(self, number: int, *, anew: bool) -> Tensor:
        size = self._sizes[number]
        self._drafts[number] = torch.zeros(size, dtype=torch.uint8) if anew else self.read(number).clone()
        return self._drafts[number]

    def put(self, number: int, bucket: Bucket) -> None:
        self._names[number] = chunk_name("image", number, bucket)
        self.store.put(self._names[number], self._drafts.pop(number))
        self._last = None
        self._clean(self._versions[: self._former])  # now: or there would be one image too many at the end

    def put_delta(self, buckets: Sequence[Bucket], data: Sequence[Tensor]) -> None:
        self._delta = tuple(chunk_name("delta", number, bucket) for number, bucket in enumerate(buckets))
        for name, values in zip(self._delta, data, strict=True):
            self.store.put(name, values)

    def announce(self, manifest: Manifest) -> None:
        self._versions = [{*self._names.values(), *self._delta}, *self._versions][: self._former + 1]
        self._clean(self._versions)

    def close(self) -> None:
        self.store.keep(())

    def _clean(self, versions: Sequence[set[str]]) -> None:
        self.store.keep({*self._names.values(), *self._delta}.union(*versions))
