"""Tensors in a safetensors file, written one after the other, and a checksum of each beside it.

    8 bytes: length of the header │ {"model.norm.weight": {"dtype": "F32", "shape": [64], "data_offsets": …}} │ data

Who reads the file with vLLM's or SGLang's own means reads plain safetensors; who can take checksums finds them in
`SUMS`. This module also runs inside vLLM: it needs torch and numpy alone.
"""

import json
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kitae.weights.layout import Checksum, raw

WEIGHTS = "model.safetensors"
SUMS = "kitae_checksums.json"

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_LENGTH = 8  # bytes
_ALIGN = 8


def write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Over what is there, whole or not at all; somebody who has mapped the file before keeps what it was."""
    header, end = _layout(tensors)
    sums: dict[str, int] = {}
    partial = folder / f".{WEIGHTS}.partial"
    with open(partial, "wb") as file:
        file.write(header)
        for name, tensor in tensors.items():
            source = raw(tensor.detach().to("cpu").contiguous())
            sums[name] = _sum(source)
            source.numpy().tofile(file)
    assert partial.stat().st_size == len(header) + end
    os.replace(partial, folder / WEIGHTS)
    (folder / SUMS).write_text(json.dumps(sums))


def _layout(tensors: Mapping[str, Tensor]) -> tuple[bytes, int]:
    entries, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _ALIGN)
    return len(text).to_bytes(_LENGTH, "little") + text, end


class Written:
    """The tensors of a folder, as views of its file: `with Written(folder) as written: … written.tensors()`."""

    def __init__(self, folder: Path) -> None:
        self._sums: dict[str, int] = json.loads((folder / SUMS).read_text())
        with open(folder / WEIGHTS, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE)
        size = int.from_bytes(self._map[:_LENGTH], "little")
        self._entries: dict[str, dict[str, Any]] = json.loads(self._map[_LENGTH : _LENGTH + size])
        self._start = _LENGTH + size

    def damaged(self) -> list[str]:
        """The names of those whose values are not those that were written, or that are missing."""
        return [name for name, expected in self._sums.items() if self._found(name) != expected]

    def _found(self, name: str) -> int | None:
        try:
            return _sum(raw(self._tensor(name)))
        except (KeyError, ValueError, RuntimeError):  # missing, or the file is too short for it
            return None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._sums:
            yield name, self._tensor(name)

    def _tensor(self, name: str) -> Tensor:
        entry = self._entries[name]
        start, end = entry["data_offsets"]
        dtype = _DTYPES[entry["dtype"]]
        if start == end:
            return torch.empty(entry["shape"], dtype=dtype)
        count = (end - start) // dtype.itemsize
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=self._start + start).view(entry["shape"])


def _sum(values: Tensor) -> int:
    found = Checksum()
    found.add(values)
    return found.value
