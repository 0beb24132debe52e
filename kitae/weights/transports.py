"""From a kind of transport to its two ends: the one place that knows them all."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from kitae.errors import EngineError
from kitae.weights import from_shards
from kitae.weights.base import Address, Manifest, Mode, Publisher, Receiver
from kitae.weights.broadcast import BroadcastPublisher, BroadcastReceiver
from kitae.weights.file_transport import FilePublisher, FileReceiver
from kitae.weights.http_transport import HttpPublisher, HttpReceiver
from kitae.weights.ipc import IpcPublisher, IpcReceiver
from kitae.weights.published_version import WeightStore
from kitae.weights.shared_memory import MemoryPublisher, MemoryReceiver


class OwnPublisher(Publisher, WeightStore, Protocol):
    """A publisher in this process, on which can be read what it has published."""


class NoReceiver:
    """Implements `kitae.weights.base.Receiver` for weights that never change."""

    repaired = 0

    def __init__(self, address: Address, parameters: Mapping[str, Tensor]) -> None:
        pass

    def fetch(self, manifest: Manifest) -> tuple[int, ...]:
        raise EngineError(f"version {manifest.version} cannot be fetched: this engine was started without a publisher")

    def close(self) -> None:
        pass


PUBLISHERS: dict[str, Callable[..., OwnPublisher]] = {
    "memory": MemoryPublisher,
    "ipc": IpcPublisher,
    "broadcast": BroadcastPublisher,
    "file": FilePublisher,
    "http": HttpPublisher,
}
RECEIVERS: dict[str, Callable[[Address, Mapping[str, Tensor]], Receiver]] = {
    "none": NoReceiver,
    "memory": MemoryReceiver.at,
    "ipc": IpcReceiver.at,
    "broadcast": BroadcastReceiver.at,
    "file": FileReceiver.at,
    "http": HttpReceiver.at,
    from_shards.KIND: lambda address, parameters: from_shards.ShardReceiver.at(address, parameters, make_receiver),
}


def make_publisher(kind: str, mode: Mode, **settings: Any) -> OwnPublisher:
    """settings: those of the transport, such as `host` or `folder`."""
    if kind not in PUBLISHERS:
        raise EngineError(f"weights must go by one of {', '.join(PUBLISHERS)}, got {kind!r}")
    return PUBLISHERS[kind](mode, **settings)


def make_receiver(address: Address, parameters: Mapping[str, Tensor]) -> Receiver:
    if address.kind not in RECEIVERS:
        raise EngineError(f"weights must come by one of {', '.join(RECEIVERS)}, got {address.kind!r}")
    return RECEIVERS[address.kind](address, parameters)
