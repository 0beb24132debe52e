"""The weights seam: a version is published once by the trainer, and any number of engines fetch it.

    trainer's side                                        engine's side
    publish(version, tensors) ── image and delta ──► memory, wire or disk
                              ── Manifest ─────────► fetch(manifest): load, sum up what was loaded
                              ◄────────────────────  the buckets that are damaged; none: it is whole

The *image* holds all published tensors of the newest version, in *buckets* of limited size. The *delta* holds the
values that differ from the version before, bit for bit. Each bucket has a checksum, taken of the trainer's tensors on
one side and of the loaded parameters on the other: it covers the image, the delta and whatever was there before.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from kitae.errors import EngineError

Mode = Literal["full", "delta"]
Encoding = Literal["positions", "bitmap", "whole"]


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor begins: `Entry("model.norm.weight", "bfloat16", (576,), bucket=3, offset=1_327_104)`.

    offset: bytes from the start of the bucket. A tensor that is larger than a bucket goes on in those that follow.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    offset: int

    @property
    def nbytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return prod(self.shape) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """`Bucket(bytes=33_554_432, checksum=0x1d2c…)`: its size, gaps included, and 64 bits of the values in it."""

    bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class DeltaPart:
    """The changes of one tensor: `DeltaPart("model.norm.weight", "positions", bucket=0, offset=0, changed=17)`.

    At `offset` of a bucket of the delta: the positions (uint32) and then the values, or one bit for each value of the
    tensor and then the values that changed, or all values; whichever is smallest.
    """

    name: str
    kind: Encoding
    bucket: int
    offset: int
    changed: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a receiver must know: `Manifest(4, base=3, entries=(…), buckets=(…), parts=(…), delta=(…), bytes=21_000)`.

    base: the version that the delta changes; a receiver that has another one loads the image. None: there is no delta.
    buckets: of the image. parts: of the delta, which has buckets of its own, with checksums of all their bytes. bytes:
    what a receiver reads, of the delta where there is one. seconds: what publishing took.
    unchanged: share of values with the same bits as in the version before; None where nothing was compared.
    shards: of a version that several publishers have, what each of them has. Then there are no entries, parts or delta
    beside them, and buckets are those of all.
    """

    version: int
    base: int | None
    entries: tuple[Entry, ...]
    buckets: tuple[Bucket, ...]
    parts: tuple[DeltaPart, ...] = ()
    delta: tuple[Bucket, ...] = ()
    bytes: int = 0
    seconds: float = 0.0
    unchanged: float | None = None
    shards: tuple["Manifest", ...] = ()

    @property
    def mode(self) -> Mode:
        return "full" if self.base is None else "delta"

    def record(self) -> dict[str, Any]:
        """For JSON; `of` reads it."""
        return asdict(self)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Manifest":
        entries = tuple(Entry(**{**entry, "shape": tuple(entry["shape"])}) for entry in record["entries"])
        buckets, delta = (tuple(Bucket(**bucket) for bucket in record[name]) for name in ("buckets", "delta"))
        parts = tuple(DeltaPart(**part) for part in record["parts"])
        shards = tuple(cls.of(shard) for shard in record["shards"])
        lists = {"entries": entries, "buckets": buckets, "parts": parts, "delta": delta, "shards": shards}
        return cls(**{**record, **lists})

    def check(self, parameters: Mapping[str, Tensor]) -> None:
        """Raise `EngineError` unless every tensor is one of the parameters, with its dtype and shape."""
        for entry in self.entries:
            if entry.name not in parameters:
                raise EngineError(f"weight update {self.version} names an unknown parameter {entry.name!r}")
            ours = parameters[entry.name]
            dtype, shape = dtype_name(ours), tuple(ours.shape)
            if entry.dtype != dtype:
                raise EngineError(
                    f"weight update {self.version}: {entry.name!r} must have dtype {dtype}, got {entry.dtype}"
                )
            if entry.shape != shape:
                raise EngineError(
                    f"weight update {self.version}: {entry.name!r} must have shape {shape}, got {entry.shape}"
                )


@dataclass(frozen=True, slots=True)
class Address:
    """Where a version can be fetched: `Address("memory", {"pid": 4711, "image": 7, "delta": 8}, descriptors=(7, 8))`.

    kind: of the transport; settings: for its receiver, as JSON. descriptors: files that a process on this machine may
    inherit for it.
    """

    kind: str
    settings: Mapping[str, Any]
    descriptors: tuple[int, ...] = ()


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class Publisher(Protocol):
    """The trainer's side. `publish` may take seconds: it is for a thread.

    `publish` reads the tensors until it returns. Every version must have the same tensors: a receiver that starts later
    gets the newest image alone. `in_full`: without a delta, the whole image written anew.
    """

    @property
    def address(self) -> Address: ...
    def publish(self, version: int, tensors: Mapping[str, Tensor], *, in_full: bool = False) -> Manifest: ...
    def close(self) -> None: ...


class Receiver(Protocol):
    """An engine's side, over parameters that nobody may use while it fetches.

    `fetch` loads the version of a manifest and returns the numbers of the buckets that are damaged: if there are any,
    the parameters are broken until a version is fetched whole. It refuses a manifest that does not fit the parameters
    with `EngineError`, and then has changed nothing. A receiver that has the base of a manifest applies the delta, and
    loads from the image what is damaged afterwards; `repaired` counts those buckets. Any other loads the image.
    """

    repaired: int

    def fetch(self, manifest: Manifest) -> tuple[int, ...]: ...
    def close(self) -> None: ...
