"""Kuhn poker: three cards, two players, one bet; and how much a way to play it can lose.

first   passes            bets
second  passes   bets     passes   bets
        ±1       first:   first    ±2
                 passes   wins 1
                 or bets
"""

import random
import re
from collections.abc import Mapping, Sequence
from itertools import permutations, product
from typing import Any

from kitae.envs.config import read_params
from kitae.section import Section

CARDS = "JQK"
ROLES = ("first", "second")
_WORD = re.compile(r"\b(?:(b)(?:et)?|(p)(?:ass)?)\b", re.IGNORECASE)
_ENDS = {"pp": 1, "bp": 1, "bb": 2, "pbp": 1, "pbb": 2}
"""What is at stake where the game ends, by what was said: p for a pass, b for a bet."""


class KuhnParams(Section):
    """Options of the game: it has none."""


class Kuhn:
    """A `TwoPlayerGame`. Each reward is half of what was won, so that it lies between −1 and 1. What a player says is a
    pass unless it is bet, or b.
    """

    def __init__(self, seed: int, options: Mapping[str, Any]) -> None:
        read_params(KuhnParams, options, "games", "env.params.options")
        self._cards = dict(zip(ROLES, random.Random(f"kuhn/{seed}").sample(CARDS, 2), strict=True))
        self._said = ""

    @property
    def to_move(self) -> str | None:
        return None if self._said in _ENDS else ROLES[len(self._said) % 2]

    def told(self, role: str) -> str:
        """The card, and what was said: `"K pb"`."""
        return f"{self._cards[role]} {self._said}".strip()

    def move(self, said: str) -> None:
        found = _WORD.findall(said)
        self._said += "b" if found and found[-1][0] else "p"

    @property
    def rewards(self) -> Mapping[str, float]:
        won = gain(self._said, *(self._cards[role] for role in ROLES)) / 2
        return dict(zip(ROLES, (won, -won), strict=True))

    @property
    def record(self) -> str:
        """Both cards, and what was said: `"KJ pbp"`."""
        return f"{''.join(self._cards.values())} {self._said}"


def gain(said: str, first: str, second: str) -> int:
    """What the first player wins at the end of a game: `gain("pbp", "K", "Q")` → -1."""
    stake = _ENDS[said]
    if said in ("bp", "pbp"):  # who passes on a bet has lost
        return stake if said == "bp" else -stake
    return stake if CARDS.index(first) > CARDS.index(second) else -stake


Strategy = Mapping[str, float]
"""The chance of a bet by what a player is told: `{"K": 1.0, "J pb": 0.0, …}`; 0.5 where there is none."""


def exploitability(strategy: Strategy) -> float:
    """What the best reply to each role wins beyond the game's value, summed: 0 for an equilibrium, computed exactly."""
    best = [max(_value(strategy, reply, role) for reply in _replies(role)) for role in (0, 1)]
    return sum(best)


def _replies(role: int) -> Sequence[Strategy]:
    """All ways to play a role without chance."""
    before = ("", "pb") if role == 0 else ("p", "b")
    places = [f"{card} {said}".strip() for card in CARDS for said in before]
    return [dict(zip(places, map(float, choice), strict=True)) for choice in product((0, 1), repeat=len(places))]


def _value(strategy: Strategy, reply: Strategy, role: int) -> float:
    """The mean gain of a reply in this role against the strategy in the other."""
    deals = list(permutations(CARDS, 2))
    sign = 1 if role == 0 else -1
    players = (reply, strategy) if role == 0 else (strategy, reply)
    return sign * sum(_expected("", deal, players) for deal in deals) / len(deals)


def _expected(said: str, deal: tuple[str, ...], players: tuple[Strategy, Strategy]) -> float:
    """The mean gain of the first player from here on."""
    if said in _ENDS:
        return gain(said, *deal)
    mover = len(said) % 2
    bets = players[mover].get(f"{deal[mover]} {said}".strip(), 0.5)
    return sum(
        chance * _expected(said + word, deal, players) for word, chance in (("b", bets), ("p", 1 - bets)) if chance
    )
