"""The environment seam: what the model talks to during one episode."""

from dataclasses import dataclass
from typing import Protocol

from kitae.types import Message


@dataclass(frozen=True, slots=True)
class Observation:
    """The environment's answer to a model turn: `Observation((Message("tool", "4"),))`, or `Observation(done=True)`."""

    messages: tuple[Message, ...] = ()
    done: bool = False


class Environment(Protocol):
    """A single-use episode: `start` once, `step` after each model turn until `done`, `close` always."""

    async def start(self) -> tuple[Message, ...]: ...
    async def step(self, response: str) -> Observation: ...
    async def close(self) -> None: ...
