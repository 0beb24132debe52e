"""What a game is to an episode."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Move:
    """What became of a move: `Move("Too low.")`, `Move("Right!", reward=1.0, done=True)`."""

    text: str
    reward: float = 0.0
    done: bool = False


class Game(Protocol):
    """One game, played once: `start` says what the player reads first, `move` what a move did."""

    def start(self) -> str: ...
    def move(self, said: str) -> Move: ...


GameMaker = Callable[[int, Mapping[str, Any]], Game]
"""From a seed and the options of a game to the game."""
