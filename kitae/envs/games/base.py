"""The interface of a game."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Move:
    """The result of a move: `Move("Too low.")`, `Move("Right!", reward=1.0, done=True)`."""

    text: str
    reward: float = 0.0
    done: bool = False


class Game(Protocol):
    """One game, played once. `start` returns the first text for the player, `move` the result of a move."""

    def start(self) -> str: ...
    def move(self, said: str) -> Move: ...


GameMaker = Callable[[int, Mapping[str, Any]], Game]
"""Makes a game from a seed and options."""
