"""Games for two: the model plays all roles, each in a conversation of its own and with a reward of its own."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from kitae.engines.base import SamplingParams
from kitae.envs.base import Outcome
from kitae.serving.base import Ask, Model
from kitae.types import Message

_LONGEST = 1 << 20  # tokens of an answer; the run's own bound is lower


class TwoPlayerGame(Protocol):
    """One game, played once. to_move: the role whose turn it is; None: the game is over, and there are rewards.

    record: the whole game, for those who look at it later.
    """

    @property
    def to_move(self) -> str | None: ...
    def told(self, role: str) -> str: ...
    def move(self, said: str) -> None: ...
    @property
    def rewards(self) -> Mapping[str, float]: ...
    @property
    def record(self) -> str: ...


TwoPlayerMaker = Callable[[int, Mapping[str, Any]], TwoPlayerGame]


class SelfPlay:
    """An `Agent` that asks the model in each role what it does. system: before each conversation."""

    def __init__(self, game: TwoPlayerGame, system: str = "") -> None:
        self._game = game
        self._talks: dict[str, tuple[Message, ...]] = {}
        self._opening = (Message("system", system),) if system else ()

    async def enter(self) -> None: ...

    async def run(self, model: Model) -> Outcome:
        while (role := self._game.to_move) is not None:
            talk = (*self._talks.get(role, self._opening), Message("user", self._game.told(role)))
            sampling = SamplingParams(max_tokens=_LONGEST)
            answer = await model.ask(Ask(role, talk, sampling=sampling, role=role))
            self._talks[role] = (*talk, Message("assistant", answer.turn.told))
            self._game.move(answer.turn.text)
        return Outcome(roles=self._rewards(), detail=self._game.record)

    def _rewards(self) -> dict[str, float]:
        """Of the roles that have spoken; who never had a turn has learnt nothing."""
        return {role: reward for role, reward in self._game.rewards.items() if role in self._talks}

    async def close(self) -> None: ...
