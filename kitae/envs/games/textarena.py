"""Games of TextArena for one player."""

from collections.abc import Mapping
from typing import Any

from kitae.envs.games.base import Move
from kitae.errors import ConfigError

_SEEDS = 2**31


class TextArena:
    """A `Game`: `TextArena(7, {"name": "GuessTheNumber-v0", "options": {"max_number": 10}})`.

    TextArena returns the text of the whole game each time; only what is new is passed on. The only reward is the final
    one.
    """

    def __init__(self, seed: int, about: Mapping[str, Any]) -> None:
        import textarena

        self._seed = seed % _SEEDS
        self._environment = textarena.make(about["name"], **about["options"])
        self._shown = ""

    def start(self) -> str:
        self._environment.reset(num_players=1, seed=self._seed)
        return self._news("")

    def move(self, said: str) -> Move:
        done, _ = self._environment.step(said)
        if not done:
            return Move(self._news(said))
        rewards, told = self._environment.close()
        info = told.get(0, {}) if isinstance(told, Mapping) else {}
        return Move(str(info.get("reason", "The game is over.")), float((rewards or {}).get(0, 0.0)), done=True)

    def _news(self, said: str) -> str:
        player, observation = self._environment.get_observation()
        if player != 0:
            raise ConfigError(f"a game must be for one player, got the turn of player {player}")
        shown = observation if isinstance(observation, str) else "\n".join(str(part[1]) for part in observation)
        before, self._shown = self._shown, shown
        new = shown.removeprefix(before) if before else shown
        return new.strip().removeprefix(f"[Player] {said}").strip() or "Go on."
