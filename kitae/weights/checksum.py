"""64 bits of tensors, at the speed of memory, on the device where they are."""

import zlib

import numpy as np
import torch
from torch import Tensor

_BLOCK = 512  # words of 8 bytes that are added up before the CRC


class Checksum:
    """The CRC of the sums of blocks, and their sum. A change of one value always shows; the order of blocks counts."""

    def __init__(self) -> None:
        self._crc = self._total = 0

    def add(self, raw: Tensor) -> None:
        """Bytes: a flat tensor of uint8."""
        if raw.storage_offset() % 8:
            raw = raw.clone()
        whole = len(raw) // (8 * _BLOCK) * 8 * _BLOCK
        words = raw[:whole].view(torch.int64).view(-1, _BLOCK)
        # On a CPU by numpy, in one thread: those of torch wait for each other where other processes want the cores.
        sums = words.numpy().sum(1) if words.device.type == "cpu" else words.sum(1).cpu().numpy()
        for part in (sums, raw[whole:].cpu().numpy()):
            self._crc = zlib.crc32(part.tobytes(), self._crc)
            self._total += int(part.sum(dtype=np.int64))

    @property
    def value(self) -> int:
        return self._crc << 32 | self._total & 0xFFFFFFFF
