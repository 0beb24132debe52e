"""Weights from the trainer's process to an engine's process on the same machine, through shared memory.

    trainer's process                                         engine's process
    publish(version, tensors) ── image, or delta ──► memory
                              ── Published ───────► socket ──► fetch(published): load, sum up what was loaded
    compare the checksums     ◄─────────────────── socket ─── checksum

The *image* is a copy of all published tensors, always of the newest version: a receiver that starts late, or has lost
its place, loads all of it. The *delta* holds the values that differ from the version before, bit for bit, in the dtype
that is served: at the learning rates of RL most bf16 values do not change in a step. The checksum is taken of the
trainer's tensors on one side and of the loaded parameters on the other, so it covers the image, the delta and whatever
was there before.

The memory has no name in any file system: it is gone when the last process that holds it is. What is not covered: a
receiver must not fetch while the next version is being published. `ProcessEngine` sees to that.
"""

import mmap
import os
import tempfile
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kitae.errors import EngineError

Mode = Literal["full", "delta"]
Kind = Literal["positions", "bitmap", "whole"]
Bits = npt.NDArray[Any]  # values as the integers that have the same bits

_ALIGN = 64  # bytes
_BLOCK = 512  # words of 8 bytes that are added up before the CRC
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_POSITION = np.dtype(np.uint32)


@dataclass(frozen=True, slots=True)
class Part:
    """The changes of one tensor: `Part("model.norm.weight", "positions", offset=0, changed=17)`.

    At `offset` of the delta: the positions (uint32) and then the values, or one bit for each value of the tensor and
    then the values that changed, or all values; whichever is smallest.
    """

    name: str
    kind: Kind
    offset: int
    changed: int


@dataclass(frozen=True, slots=True)
class Published:
    """What a receiver must know to fetch: `Published(version=4, base=3, names=(…), checksum=…, parts=(…))`.

    base: the version that the delta changes; None: load the image.
    """

    version: int
    base: int | None
    names: tuple[str, ...]
    checksum: int
    parts: tuple[Part, ...] = ()
    bytes: int = 0
    seconds: float = 0.0
    unchanged: float | None = None

    @property
    def mode(self) -> Mode:
        return "full" if self.base is None else "delta"

    def record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Published":
        parts = tuple(Part(**part) for part in record["parts"])
        return cls(**{**record, "names": tuple(record["names"]), "parts": parts})


@dataclass(frozen=True, slots=True)
class Sync:
    """One weight update as it went: `Sync(4, "delta", bytes=2_100_000, seconds=.4, unchanged=.993, resent=0)`.

    unchanged: share of values with the same bits as in the version before; None where nothing was compared. resent: how
    often it had to be sent again because the receiver's checksum was another one.
    """

    version: int
    mode: Mode
    bytes: int
    seconds: float
    unchanged: float | None
    resent: int = 0

    def metrics(self) -> dict[str, float]:
        """The numbers under the names of the log: `{"sync_bytes": …, "sync_seconds": …, "sync_delta": 1.0, …}`."""
        found = {
            "sync_bytes": float(self.bytes),
            "sync_seconds": self.seconds,
            "sync_delta": float(self.mode == "delta"),
            "sync_resent": float(self.resent),
        }
        return found if self.unchanged is None else {**found, "sync_unchanged": self.unchanged}


class WeightTransport:
    """The publishing side. `close` it when done.

    mode: "full" always sends everything; "delta" sends what changed where the receiver has the version before and no
    more than the share `dense` of all values changed. On one machine "full" is faster: copying everything costs less
    than looking for what changed. A delta is for memory or a wire that must carry fewer bytes.
    """

    def __init__(self, mode: Mode = "full", dense: float = 0.5) -> None:
        self.mode = mode
        self.dense = dense
        self.version: int | None = None  # of the image
        self._image, self._delta = _Memory("image"), _Memory("delta")
        self._slots: dict[str, tuple[torch.dtype, tuple[int, ...], int]] = {}

    @property
    def descriptors(self) -> tuple[int, int]:
        """Of the image and the delta: what a `WeightReceiver` in another process needs, and must inherit."""
        return self._image.descriptor, self._delta.descriptor

    def publish(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        *,
        base: int | None = None,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> Published:
        """Write a version. base: the one that the receiver has; dtypes: as served, where not as given.

        Every version must have the same tensors: a receiver that starts later gets the newest image alone.
        """
        began = time.perf_counter()
        served = {name: tensor.dtype if dtypes is None else dtypes[name] for name, tensor in tensors.items()}
        self._lay_out(tensors, served)
        compare = self.mode == "delta" and self.version is not None and self.version == base
        self.version = None  # until the image is whole again
        total = sum(tensor.numel() for tensor in tensors.values())
        changed = 0
        encoder, crc = _Encoder(), _Checksum()
        for name, tensor in tensors.items():
            source = tensor.detach().to("cpu", served[name]).contiguous()
            crc.add(source)
            new, old = _bits(source).numpy(), self._view(name)
            if compare and changed <= self.dense * total:
                positions = changed_positions(new, old)
                changed += len(positions)
                encoder.add(name, positions, new)
                old[positions] = new[positions]
            else:
                np.copyto(old, new)
        self.version = version
        published = Published(version, None, tuple(tensors), crc.value, bytes=self._size(tensors))
        if compare and changed <= self.dense * total:
            self._delta.write(encoder.chunks)
            unchanged = 1 - changed / max(1, total)
            published = replace(
                published, base=base, parts=tuple(encoder.parts), bytes=encoder.bytes, unchanged=unchanged
            )
        return replace(published, seconds=time.perf_counter() - began)

    def in_full(self, published: Published) -> Published:
        """The same version for a receiver that does not have the base."""
        return replace(published, base=None, parts=(), bytes=self._size(published.names))

    def close(self) -> None:
        self._image.close()
        self._delta.close()

    def _lay_out(self, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> None:
        slots, size = _layout({name: (dtypes[name], tuple(t.shape)) for name, t in tensors.items()})
        if not self._slots:
            self._image.reserve(size)
            self._slots = slots
        elif slots != self._slots:
            differ = sorted(name for name in slots.keys() ^ self._slots.keys()) or [
                name for name in slots if slots[name] != self._slots[name]
            ]
            raise EngineError(f"every weight update must have the same tensors as the first; {differ[0]!r} differs")

    def _size(self, names: Iterable[str]) -> int:
        return sum(self._view(name).nbytes for name in names)

    def _view(self, name: str) -> Bits:
        dtype, shape, offset = self._slots[name]
        return self._image.array(_numpy_bits(dtype), int(np.prod(shape)), offset)


class WeightReceiver:
    """The receiving side: loads into `parameters`, which nobody may use meanwhile."""

    def __init__(self, image: int, delta: int, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = parameters
        self.version: int | None = None  # of the published weights that are loaded and were summed up
        self._image, self._delta = _Memory("image", image), _Memory("delta", delta)
        for tensor in parameters.values():
            if not tensor.is_contiguous():
                tensor.data = tensor.data.contiguous()

    def fetch(self, published: Published) -> int:
        """Load a version and return the checksum of what the parameters hold afterwards; 0 where it cannot be loaded.

        The caller compares: if it is not `published.checksum`, the parameters are broken until a version is fetched
        in full.
        """
        self.version = None
        try:
            if published.base is None:
                self._load_image(published.names)
            else:
                self._apply(published.parts)
        except (ValueError, IndexError, RuntimeError):  # positions or sizes that cannot be: it is damaged
            return 0
        found = checksum(self.parameters[name] for name in published.names)
        if found == published.checksum:
            self.version = published.version
        return found

    def _load_image(self, names: Iterable[str]) -> None:
        slots, size = _layout({name: (p.dtype, tuple(p.shape)) for name, p in self._named(names)})
        self._image.map(size)
        for name, (dtype, shape, offset) in slots.items():
            values = self._image.array(_numpy_bits(dtype), int(np.prod(shape)), offset)
            _copy(values, _bits(self.parameters[name]))

    def _apply(self, parts: Iterable[Part]) -> None:
        for part in parts:
            bits = _bits(self.parameters[part.name])
            width = _numpy_bits(self.parameters[part.name].dtype)
            count = bits.numel()
            if part.kind == "whole":
                _copy(self._delta.array(width, count, part.offset), bits)
                continue
            if part.kind == "positions":
                where = self._delta.array(_POSITION, part.changed, part.offset)
            else:
                packed = self._delta.array(np.dtype(np.uint8), -(-count // 8), part.offset)
                where = np.flatnonzero(np.unpackbits(packed, count=count).view(bool))
            values = self._delta.array(width, part.changed, _aligned(part.offset + _before_values(part, count)))
            if bits.device.type == "cpu":
                bits.numpy()[where] = values
            else:
                positions = torch.from_numpy(where.astype(np.int64))
                bits[positions.to(bits.device)] = torch.from_numpy(values).to(bits.device)

    def _named(self, names: Iterable[str]) -> Iterable[tuple[str, Tensor]]:
        return ((name, self.parameters[name]) for name in names)


def checksum(tensors: Iterable[Tensor]) -> int:
    """64 bits of the bytes of tensors, in order, at the speed of memory, on the device where they are."""
    found = _Checksum()
    for tensor in tensors:
        found.add(tensor)
    return found.value


class _Checksum:
    """The CRC of the sums of blocks, and their sum. A change of one value always shows; the order of blocks counts."""

    def __init__(self) -> None:
        self._crc = self._total = 0

    def add(self, tensor: Tensor) -> None:
        raw = _bits(tensor.detach().contiguous()).view(torch.uint8)
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


class _Encoder:
    """Gathers the parts of a delta."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.chunks: list[tuple[int, Bits]] = []  # where, what
        self.bytes = 0
        self._end = 0

    def add(self, name: str, positions: npt.NDArray[np.int64], new: Bits) -> None:
        if not len(positions):
            return
        values = len(positions) * new.itemsize
        sizes: dict[Kind, int] = {"bitmap": -(-len(new) // 8) + values, "whole": new.nbytes}
        if len(new) <= 2**32:
            sizes["positions"] = len(positions) * _POSITION.itemsize + values
        kind = min(sizes, key=lambda k: sizes[k])
        self.parts.append(Part(name, kind, self._end, len(positions)))
        if kind == "positions":
            self._append(positions.astype(_POSITION))
        elif kind == "bitmap":
            bitmap = np.zeros(len(new), dtype=bool)
            bitmap[positions] = True
            self._append(np.packbits(bitmap))
        self._append(new if kind == "whole" else new[positions])

    def _append(self, values: Bits) -> None:
        self.chunks.append((self._end, values))
        self._end = _aligned(self._end + values.nbytes)
        self.bytes += values.nbytes


class _Memory:
    """Memory that processes share by its descriptor, without a name."""

    def __init__(self, label: str, descriptor: int | None = None) -> None:
        self._map: mmap.mmap | None = None
        if descriptor is not None:
            self.descriptor = descriptor
        elif hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create(f"kitae-{label}")
        else:
            with tempfile.TemporaryFile(prefix=f"kitae-{label}-") as file:
                self.descriptor = os.dup(file.fileno())

    def reserve(self, size: int) -> None:
        """Have at least so much; `EngineError` where there is not enough, now and not at some later access."""
        if size > os.fstat(self.descriptor).st_size:
            self._map = None
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(self.descriptor, 0, size)
                else:
                    os.ftruncate(self.descriptor, size)
            except OSError as error:
                raise EngineError(f"no shared memory for {size} bytes of weights: {error}") from error
        if size:
            self.map(size)

    def map(self, size: int) -> None:
        if self._map is None or len(self._map) < size:
            self._map = mmap.mmap(self.descriptor, 0)

    def array(self, dtype: np.dtype[Any], count: int, offset: int) -> Bits:
        """A view; it changes with the memory."""
        end = offset + count * dtype.itemsize
        if count == 0:
            return np.empty(0, dtype)
        self.map(end)
        assert self._map is not None
        return np.frombuffer(self._map, dtype, count, offset)

    def write(self, chunks: list[tuple[int, Bits]]) -> None:
        if chunks:
            offset, last = chunks[-1]
            self.reserve(offset + last.nbytes)
        for offset, values in chunks:
            self.array(values.dtype, values.size, offset)[:] = values

    def close(self) -> None:
        self._map = None
        os.close(self.descriptor)


def _bits(tensor: Tensor) -> Tensor:
    """The values of a contiguous tensor as integers, flat: the same memory."""
    return tensor.data.view(-1).view(_BITS[tensor.element_size()])


def _copy(values: Bits, bits: Tensor) -> None:
    if bits.device.type == "cpu":
        np.copyto(bits.numpy(), values)
    else:
        bits.copy_(torch.from_numpy(values))


def _numpy_bits(dtype: torch.dtype) -> np.dtype[Any]:
    return np.dtype(f"i{dtype.itemsize}")


def _layout(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
) -> tuple[dict[str, tuple[torch.dtype, tuple[int, ...], int]], int]:
    """Dtype, shape and offset of each tensor in the image, and the size of the image."""
    slots, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        slots[name] = (dtype, shape, offset)
        offset = _aligned(offset + int(np.prod(shape)) * dtype.itemsize)
    return slots, offset


def _before_values(part: Part, count: int) -> int:
    """Bytes that say where the values of a part go."""
    return part.changed * _POSITION.itemsize if part.kind == "positions" else -(-count // 8)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN
