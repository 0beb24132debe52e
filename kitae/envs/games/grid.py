"""Worlds of squares: a frozen lake to cross, and a door that a key opens.

S start    G goal    H hole: the game is lost    # wall    K key    D door: a wall without the key    . floor
"""

import re
from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from kitae.envs.config import read_params
from kitae.envs.games.guess import Move
from kitae.section import Section

_STEPS = {"l": (0, -1), "r": (0, 1), "u": (-1, 0), "d": (1, 0)}
_MOVE = re.compile(r"\b(?:(l)(?:eft)?|(r)(?:ight)?|(u)(?:p)?|(d)(?:own)?)\b", re.IGNORECASE)
_SQUARES = "SGHKD#."


class GridParams(Section):
    """Options of the games."""

    map: tuple[str, ...] = Field(min_length=1, description="Rows of squares, with one S and a G.")
    moves: int = Field(16, ge=1, le=1000, description="Moves that the player has.")
    key: float = Field(0.0, description="What finding the key is worth; the goal is worth 1.")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        squares = "".join(self.map)
        wrong = next((s for s in squares if s not in _SQUARES), "")
        if wrong or len({len(row) for row in self.map}) != 1 or squares.count("S") != 1 or "G" not in squares:
            raise ValueError(f"a map has rows of one length with one S, a G and squares of {_SQUARES}")
        return self


class Grid:
    """A `Game`: `Grid(7, {"map": ["S.G"]})`. The move is the last direction in what the player says: left, right, up,
    down, or its first letter. The state is the square, and whether the key was found; other words change nothing.
    """

    map: tuple[str, ...] = ("S...", ".H.H", "...H", "H..G")

    def __init__(self, seed: int, options: Mapping[str, Any]) -> None:
        params = read_params(GridParams, {"map": self.map, **options}, "games", "env.params.options")
        self._map, self._left, self._key_worth = params.map, params.moves, params.key
        self._place = next((r, row.index("S")) for r, row in enumerate(self._map) if "S" in row)
        self._has_key = False

    @property
    def _told(self) -> str:
        return f"{self._place[0]},{self._place[1]}" + (", key" if self._has_key else "")

    def start(self) -> str:
        return self._told

    def move(self, said: str) -> Move:
        self._left -= 1
        found = _MOVE.findall(said)
        reward = self._go("".join(found[-1]).lower()) if found else 0.0
        square = self._square(self._place)
        if square == "G":
            return Move("You are there.", reward + 1.0, done=True)
        if square == "H":
            return Move("You fell into a hole.", reward, done=True)
        if not self._left:
            return Move("There are no moves left.", reward, done=True)
        return Move(self._told, reward, state=self._told)

    def _go(self, direction: str) -> float:
        """Take a step where the way is free. Returns what was found there."""
        place = tuple(a + b for a, b in zip(self._place, _STEPS[direction], strict=True))
        square = self._square((place[0], place[1]))
        if square == "#" or (square == "D" and not self._has_key):
            return 0.0
        self._place = place[0], place[1]
        found = square == "K" and not self._has_key
        self._has_key = self._has_key or found
        return self._key_worth if found else 0.0

    def _square(self, place: tuple[int, int]) -> str:
        row, column = place
        inside = 0 <= row < len(self._map) and 0 <= column < len(self._map[0])
        return self._map[row][column] if inside else "#"


class KeyAndDoor(Grid):
    """The key is on one side of the start, the door on the other."""

    map = ("K.S.DG",)
