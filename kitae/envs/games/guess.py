"""The interface of a game, and the simplest one: guess the number; each answer says whether it was too low or high."""

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import Field

from kitae.envs.config import read_params
from kitae.section import Section


@dataclass(frozen=True, slots=True)
class Move:
    """The result of a move: `Move("Too low.")`, `Move("Right!", reward=1.0, done=True)`.

    state: the name of the state after it, where what the game says is not the state.
    """

    text: str
    reward: float = 0.0
    done: bool = False
    state: str = ""


class Game(Protocol):
    """One game, played once. `start` returns the first text for the player, `move` the result of a move."""

    def start(self) -> str: ...
    def move(self, said: str) -> Move: ...


GameMaker = Callable[[int, Mapping[str, Any]], Game]
"""Makes a game from a seed and options."""


_NUMBER = re.compile(r"\d{1,20}")


class GuessParams(Section):
    """Options of the game."""

    high: int = Field(16, ge=2, le=10**9, description="The number is from 1 to this.")
    guesses: int = Field(4, ge=1, le=100, description="Guesses that the player has.")


class Guess:
    """A `Game`. It ends with a right guess, worth 1, or with the last guess, worth 0 if it is wrong.

    The state is the numbers that are left, and how many guesses.
    """

    def __init__(self, seed: int, options: Mapping[str, Any]) -> None:
        params = read_params(GuessParams, options, "games", "env.params.options")
        self._high, self._left = params.high, params.guesses
        self._number = random.Random(f"guess/{seed}").randint(1, params.high)
        self._from, self._to = 1, params.high  # numbers that it may still be

    def start(self) -> str:
        return f"Guess my number, from 1 to {self._high}. You have {self._left} guesses."

    def move(self, said: str) -> Move:
        """The guess is the last number in the text."""
        self._left -= 1
        found = _NUMBER.findall(said)
        if found and int(found[-1]) == self._number:
            return Move("Right!", reward=1.0, done=True)
        if not self._left:
            return Move(f"The number was {self._number}.", done=True)
        if not found:
            return Move("That is no number.", state=self._state)
        guess = int(found[-1])
        if guess < self._number:
            self._from = max(self._from, guess + 1)
            return Move("Too low.", state=self._state)
        self._to = min(self._to, guess - 1)
        return Move("Too high.", state=self._state)

    @property
    def _state(self) -> str:
        return f"{self._from} to {self._to}, {self._left} left"
