"""The lossless delta: the values of a tensor that are not those of the version before.

At the learning rates of RL most bf16 values do not change in a step. Values are compared as bits and sent as they are,
so a delta on its base gives exactly the new version.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kitae.weights.base import DeltaPart, Encoding
from kitae.weights.layout import LIMIT, Bits, aligned, bits, copy, integers

_POSITION = np.dtype(np.uint32)
_BYTE = np.dtype(np.uint8)


class Encoder:
    """Gathers the parts of a delta, in buckets of about `limit` bytes: a part is never cut.

    bytes: of positions, bitmaps and values, without what lies between them.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.parts: list[DeltaPart] = []
        self.buckets: list[Tensor] = []  # bytes; all but the last one
        self.bytes = 0
        self._limit = limit
        self._chunks: list[tuple[int, Bits]] = []  # of the last one
        self._end = 0

    def add(self, name: str, positions: npt.NDArray[np.int64], new: Bits) -> None:
        """The values of `new` at these positions; none: nothing is added."""
        if not len(positions):
            return
        values = len(positions) * new.itemsize
        sizes: dict[Encoding, int] = {"bitmap": -(-len(new) // 8) + values, "whole": new.nbytes}
        if len(new) <= 2**32:
            sizes["positions"] = len(positions) * _POSITION.itemsize + values
        kind = min(sizes, key=lambda k: sizes[k])
        if self._end and self._end + sizes[kind] > self._limit:
            self.close()
        self.parts.append(DeltaPart(name, kind, len(self.buckets), self._end, len(positions)))
        if kind == "positions":
            self._append(positions.astype(_POSITION))
        elif kind == "bitmap":
            bitmap = np.zeros(len(new), dtype=bool)
            bitmap[positions] = True
            self._append(np.packbits(bitmap))
        self._append(new if kind == "whole" else new[positions])

    def close(self) -> None:
        """End the last bucket."""
        if not self._chunks:
            return
        whole = np.zeros(self._end, _BYTE)
        for offset, values in self._chunks:
            whole[offset : offset + values.nbytes] = values.view(_BYTE)
        self.buckets.append(torch.from_numpy(whole))
        self._chunks, self._end = [], 0

    def _append(self, values: Bits) -> None:
        self._chunks.append((self._end, values))
        self._end = aligned(self._end + values.nbytes)
        self.bytes += values.nbytes


def apply(part: DeltaPart, tensor: Tensor, bucket: Tensor) -> None:
    """Change a tensor, by the bytes of the part's bucket.

    Damaged ones may raise ValueError, IndexError or RuntimeError, or write nonsense.
    """
    found = bits(tensor)
    width, count = integers(tensor.element_size()), found.numel()
    raw = bucket.numpy()
    if part.kind == "whole":
        copy(torch.from_numpy(np.frombuffer(raw, width, count, part.offset)), found)
        return
    if part.kind == "positions":
        where: Bits = np.frombuffer(raw, _POSITION, part.changed, part.offset)
        before = where.nbytes
    else:
        packed = np.frombuffer(raw, _BYTE, -(-count // 8), part.offset)
        where = np.flatnonzero(np.unpackbits(packed, count=count).view(bool))
        before = packed.nbytes
    values = np.frombuffer(raw, width, part.changed, aligned(part.offset + before))
    if found.device.type == "cpu":
        found.numpy()[where] = values
    else:
        positions = torch.from_numpy(where.astype(np.int64))
        found[positions.to(found.device)] = torch.from_numpy(values).to(found.device)


def changed_positions(new: Bits, old: Bits) -> npt.NDArray[np.int64]:
    """Where two arrays of integers differ, in order. Compares eight bytes at a time and then looks closer."""
    per_word = 8 // new.itemsize
    whole = len(new) // per_word * per_word
    words = np.flatnonzero(new[:whole].view(np.uint64) != old[:whole].view(np.uint64))
    if per_word == 1:
        return words
    if len(words) * per_word > len(new) // 4:
        return np.flatnonzero(new != old)
    differs = new[:whole].reshape(-1, per_word)[words] != old[:whole].reshape(-1, per_word)[words]
    hits = np.flatnonzero(differs)
    tail = np.flatnonzero(new[whole:] != old[whole:]) + whole
    return np.concatenate([words[hits // per_word] * per_word + hits % per_word, tail])
