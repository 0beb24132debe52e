"""From a kind of transport to its two ends: the one place that knows them all."""

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from kitae.errors import EngineError
from kitae.weights.base import Address, Manifest, Mode, Publisher, Receiver
from kitae.weights.board import Board
from kitae.weights.memory import MemoryPublisher, MemoryReceiver


class OwnPublisher(Publisher, Board, Protocol):
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


PUBLISHERS: dict[str, Callable[[Mode], OwnPublisher]] = {"memory": MemoryPublisher}
RECEIVERS: dict[str, Callable[[Address, Mapping[str, Tensor]], Receiver]] = {
    "none": NoReceiver,
    "memory": MemoryReceiver.at,
}


def make_publisher(kind: str, mode: Mode) -> OwnPublisher:
    if kind not in PUBLISHERS:
        raise EngineError(f"weights must go by one of {', '.join(PUBLISHERS)}, got {kind!r}")
    return PUBLISHERS[kind](mode)


def make_receiver(address: Address, parameters: Mapping[str, Tensor]) -> Receiver:
    if address.kind not in RECEIVERS:
        raise EngineError(f"weights must come by one of {', '.join(RECEIVERS)}, got {address.kind!r}")
    return RECEIVERS[address.kind](address, parameters)
