"""Weights from many publishers: each rank publishes the blocks that it holds, and a receiver reads from all of them.

    rank 0 ── its blocks, laid out, summed up and served by it ──►┐
    rank 1 ── …                                                   ├─► an engine: a receiver for each rank, over the
    rank 2 ── …                                                   ┘   blocks of its own parameters

Nothing is gathered. Any transport carries the blocks: to it they are tensors like others. What several ranks hold
alike is published by the first of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from torch import Tensor

from kitae.errors import EngineError
from kitae.models.whole import Place, place_of
from kitae.weights.base import Address, Manifest, Receiver

KIND = "shards"
MakeReceiver = Callable[[Address, Mapping[str, Tensor]], Receiver]

_AT_ONCE = 8  # publishers from which an engine reads


class Exchange(Protocol):
    """Of ranks: what each of them gives, for all."""

    rank: int

    def everyone(self, own: Any) -> list[Any]: ...


def own_blocks(tensors: Mapping[str, Tensor], ranks: Exchange) -> dict[str, Place]:
    """The blocks that this rank publishes, by the names of their tensors. All ranks must call it."""
    places = {name: place_of(tensor) for name, tensor in tensors.items()}
    held = {name: place for name, place in places.items() if all(each.stop > each.start for each in place)}
    everyone = ranks.everyone(held)
    first = {
        (name, str(place)): rank for rank, each in reversed([*enumerate(everyone)]) for name, place in each.items()
    }
    return {name: place for name, place in held.items() if first[name, str(place)] == ranks.rank}


def told(blocks: Mapping[str, Place], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """For JSON: the shape of each tensor, and the first and the last index of the block along each dimension."""
    return {n: [[*tensors[n].shape], [[each.start, each.stop] for each in place]] for n, place in blocks.items()}


def address_of(origins: Sequence[Mapping[str, Any]]) -> Address:
    """origins: of each rank, the `address` of its publisher and its `blocks` as `told` has them."""
    return Address(KIND, {"origins": [{"address": each["address"], "blocks": each["blocks"]} for each in origins]})


def merged(shards: Sequence[Manifest]) -> Manifest:
    """What an engine must know of a version that lies with several publishers."""
    bases, sizes = {shard.base for shard in shards}, [sum(e.nbytes for e in shard.entries) for shard in shards]
    compared = [
        (shard.unchanged, size) for shard, size in zip(shards, sizes, strict=True) if shard.unchanged is not None
    ]
    weight = sum(size for _, size in compared)
    return Manifest(
        version=shards[0].version,
        base=shards[0].base if len(bases) == 1 else None,
        entries=(),
        buckets=tuple(bucket for shard in shards for bucket in shard.buckets),
        bytes=sum(shard.bytes for shard in shards),
        seconds=max(shard.seconds for shard in shards),
        unchanged=sum(share * size for share, size in compared) / weight if weight else None,
        shards=tuple(shards),
    )


class _Blocks(Mapping[str, Tensor]):
    """The blocks of parameters that one publisher has. They share the memory of the parameters; a block that does not
    lie in one piece has memory of its own, from which `settle` copies it."""

    def __init__(self, whole: Mapping[str, Tensor], places: Mapping[str, Place]) -> None:
        self._whole, self._places = whole, places
        self._apart = {name: block.clone() for name in places if not (block := self._block(name)).is_contiguous()}

    def _block(self, name: str) -> Tensor:
        return self._whole[name].data[self._places[name]]  # looked up anew: memory of parameters may be moved

    def __getitem__(self, name: str) -> Tensor:
        return self._apart[name] if name in self._apart else self._block(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def settle(self) -> None:
        for name, block in self._apart.items():
            self._block(name).copy_(block)


class ShardReceiver:
    """Implements `kitae.weights.base.Receiver` over those for each publisher."""

    def __init__(self, parts: Sequence[tuple[Receiver, _Blocks]]) -> None:
        self._parts = parts
        self.repaired = 0

    @classmethod
    def at(cls, address: Address, parameters: Mapping[str, Tensor], make: MakeReceiver) -> "ShardReceiver":
        """make: a receiver for one publisher."""
        for tensor in parameters.values():
            if not tensor.is_contiguous():
                tensor.data = tensor.data.contiguous()
        parts: list[tuple[Receiver, _Blocks]] = []
        for origin in address.settings["origins"]:
            blocks = _Blocks(parameters, _places(origin["blocks"], parameters))
            parts.append((make(Address(**origin["address"]), blocks), blocks))
        return cls(parts)

    def fetch(self, manifest: Manifest) -> tuple[int, ...]:
        if len(manifest.shards) != len(self._parts):
            raise EngineError(
                f"weight update {manifest.version} must come from {len(self._parts)} publishers, got "
                f"{len(manifest.shards)}"
            )
        for shard, (_, blocks) in zip(manifest.shards, self._parts, strict=True):
            shard.check(blocks)  # all of them, before anything is changed
        with ThreadPoolExecutor(min(_AT_ONCE, len(self._parts)), "shard") as threads:
            found = [
                *threads.map(lambda each: each[1][0].fetch(each[0]), zip(manifest.shards, self._parts, strict=True))
            ]
        self.repaired = sum(receiver.repaired for receiver, _ in self._parts)
        damaged, first = [], 0
        for shard, numbers, (_, blocks) in zip(manifest.shards, found, self._parts, strict=True):
            damaged += [first + number for number in numbers]
            first += len(shard.buckets)
            blocks.settle()
        return tuple(damaged)

    def close(self) -> None:
        for receiver, _ in self._parts:
            receiver.close()


def _places(blocks: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Place]:
    found: dict[str, Place] = {}
    for name, (shape, place) in blocks.items():
        if name not in parameters:
            raise EngineError(f"the trainer publishes an unknown parameter {name!r}")
        if list(parameters[name].shape) != shape:
            ours = tuple(parameters[name].shape)
            raise EngineError(f"the trainer's {name!r} must have shape {ours}, got {tuple(shape)}")
        found[name] = tuple(slice(start, stop) for start, stop in place)
    return found
