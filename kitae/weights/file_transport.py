"""Weights through a folder that trainer and engines share: a file for each bucket.

A file has the checksum of its bucket in its name and appears there when it is complete. What did not change is not
written again. Files of the version before the newest stay for those who are still at it; older ones are removed.
"""

import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from kitae.errors import EngineError
from kitae.weights.base import Address, Manifest, Mode
from kitae.weights.layout import LIMIT, Chunk, delta_chunks, image_chunks
from kitae.weights.publisher import BucketPublisher
from kitae.weights.receiver import PullReceiver
from kitae.weights.stores import FolderStore, NamedBuckets

_PATIENCE = 2.0  # seconds until a file must be seen: file systems of networks may show it late
_LOOK_AGAIN = 0.1


class FilePublisher(BucketPublisher):
    """A `BucketPublisher` over a folder, which it has to itself: what an earlier one has left there is removed.

    folder: None: a temporary one, for engines on this machine. `close` removes what was published.
    """

    def __init__(
        self,
        mode: Mode = "full",
        *,
        folder: Path | str | None = None,
        dense: float = 0.5,
        limit: int = LIMIT,
        patience: float = _PATIENCE,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kitae-weights-") if folder is None else folder)
        self._temporary = folder is None
        self.folder.mkdir(parents=True, exist_ok=True)
        self._patience = patience
        store = FolderStore(self.folder)
        store.keep(())
        store.sweep()
        super().__init__(NamedBuckets(store, former=1), mode, dense=dense, limit=limit)

    @property
    def address(self) -> Address:
        return Address("file", {"folder": str(self.folder.resolve()), "patience": self._patience})

    def close(self) -> None:
        super().close()
        if self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)


class FileReceiver(PullReceiver):
    """From the folder of a `FilePublisher`."""

    @classmethod
    def at(cls, address: Address, parameters: Mapping[str, Tensor]) -> "FileReceiver":
        return cls(Path(address.settings["folder"]), parameters, patience=address.settings["patience"])

    def __init__(self, folder: Path, parameters: Mapping[str, Tensor], *, patience: float = _PATIENCE) -> None:
        if not folder.is_dir():
            raise EngineError(f"the folder of the weights must be one that this machine has too, got {folder}")
        super().__init__(_FileReader(folder, patience), parameters)


class _FileReader:
    def __init__(self, folder: Path, patience: float) -> None:
        self._folder = folder
        self._patience = patience

    def image(self, manifest: Manifest, wanted: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        chunks = image_chunks(manifest)
        return self._read(chunks[number] for number in wanted)

    def delta(self, manifest: Manifest) -> Iterator[tuple[int, Tensor]]:
        return self._read(delta_chunks(manifest))

    def close(self) -> None:
        pass

    def _read(self, chunks: Iterable[Chunk]) -> Iterator[tuple[int, Tensor]]:
        """Those that are there, and then, for a while, those that come."""
        store, left = FolderStore(self._folder), list(chunks)
        deadline = time.monotonic() + self._patience
        while left:
            missing = []
            for chunk in left:
                data = store.get(chunk.name)
                if data is None:
                    missing.append(chunk)
                else:
                    yield chunk.number, data
            left = missing
            if left:
                if time.monotonic() > deadline:
                    return
                time.sleep(_LOOK_AGAIN)
