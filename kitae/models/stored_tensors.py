"""Tensors in safetensors files, of which any block can be read without the rest.

A block of rows lies in one piece, and is read straight into its place. Files are read and not mapped: a page of a
mapped file counts as memory of whoever touched it, as long as the file is open.
"""

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from kitae.errors import ModelError
from kitae.models.whole import Place

_INDEX, _FILE = "model.safetensors.index.json", "model.safetensors"
_AT_ONCE = 2**26  # bytes of whole rows of which columns are kept
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`StoredTensor(Path("model.safetensors"), torch.bfloat16, (49152, 576), start=2048)`: start: its first byte."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    def read(self, place: Place | None = None) -> Tensor:
        """A block, or all of it."""
        if place is None or not self.shape:
            place = tuple(slice(0, size) for size in self.shape)
        found = torch.empty([each.stop - each.start for each in place], dtype=self.dtype)
        with self.file.open("rb", buffering=0) as file:
            if not found.numel():
                return found
            if not self.shape or found.shape[1:] == self.shape[1:]:
                self._fill(file, found, place[0].start if place else 0)
                return found
            step = max(1, _AT_ONCE // max(1, self._row))
            for first in range(place[0].start, place[0].stop, step):
                rows = torch.empty((min(step, place[0].stop - first), *self.shape[1:]), dtype=self.dtype)
                self._fill(file, rows, first)
                start = first - place[0].start
                found[start : start + len(rows)] = rows[(slice(None), *place[1:])]
        return found

    @property
    def _row(self) -> int:
        """Bytes."""
        return prod(self.shape[1:]) * self.dtype.itemsize

    def _fill(self, file: BinaryIO, rows: Tensor, first: int) -> None:
        file.seek(self.start + first * self._row)
        view = memoryview(rows.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        while view:
            count = file.readinto(view)  # type: ignore[attr-defined]
            if not count:
                raise ModelError(f"{self.file} must hold all of its tensors, but ends {len(view)} bytes too early")
            view = view[count:]


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """What the files of a model folder hold, by name."""
    found: dict[str, StoredTensor] = {}
    for file in _files(folder):
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(size))
        for name, told in header.items():
            if name != "__metadata__":
                start = 8 + size + told["data_offsets"][0]
                found[name] = StoredTensor(file, _DTYPES[told["dtype"]], tuple(told["shape"]), start)
    return found


def _files(folder: Path) -> list[Path]:
    if (folder / _INDEX).is_file():
        return [folder / name for name in sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))]
    if (folder / _FILE).is_file():
        return [folder / _FILE]
    raise ModelError(f"a model that is loaded in shards must be in safetensors files, got none in {folder}")
