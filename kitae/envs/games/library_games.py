"""Games of two libraries: TextArena's for one player, and Gymnasium's with discrete actions, rendered as text where
possible.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from kitae.envs.games.guess import Move
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


ACTIONS = {
    "FrozenLake": ("left", "down", "right", "up"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Blackjack": ("stick", "hit"),
}
"""Names of actions, by the environment's name without its version. Other environments use numbers."""

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Gymnasium:
    """A `Game`: `Gymnasium(7, {"name": "FrozenLake-v1", "options": {"is_slippery": False}})`.

    The last action in a turn, by name or number, is the move; a turn without one has no effect.
    """

    def __init__(self, seed: int, about: Mapping[str, Any]) -> None:
        import gymnasium

        name = about["name"]
        pictured = "ansi" in _modes(name)
        self._environment = gymnasium.make(name, **({"render_mode": "ansi"} if pictured else {}), **about["options"])
        space = self._environment.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise ConfigError(f"{name} must have actions that can be named, got {space}")
        numbers = [str(int(space.start) + i) for i in range(int(space.n))]
        self._names = ACTIONS.get(name.partition("-")[0], tuple(numbers))
        self._first, self._pictured = int(space.start), pictured
        words = sorted({*self._names, *numbers}, key=len, reverse=True)
        self._action = re.compile(rf"\b({'|'.join(words)})\b", re.IGNORECASE)
        self._seed = seed % _SEEDS

    def start(self) -> str:
        observation, _ = self._environment.reset(seed=self._seed)
        return f"{self._shown(observation)}\nActions: {', '.join(self._names)}."

    def move(self, said: str) -> Move:
        found = self._action.findall(said)
        if not found:
            return Move(f"Name one of the actions: {', '.join(self._names)}.")
        word = found[-1].lower()
        action = self._names.index(word) + self._first if word in self._names else int(word)
        observation, reward, ended, cut, _ = self._environment.step(action)
        return Move(self._shown(observation), float(reward), bool(ended or cut), _name(observation))

    def _shown(self, observation: object) -> str:
        picture = self._environment.render() if self._pictured else None
        return _COLOURS.sub(_mark, picture).strip() if isinstance(picture, str) else str(observation)


def _name(observation: object) -> str:
    """The state, where the observation is one number or a few."""
    return str(observation) if isinstance(observation, int | np.integer | tuple) else ""


def _mark(colour: "re.Match[str]") -> str:
    """Brackets in place of colours, which mark the player's position."""
    return "]" if colour[0] == "\x1b[0m" else "["


def _modes(name: str) -> list[str]:
    """The render modes of an environment."""
    import gymnasium
    from gymnasium.envs.registration import load_env_creator

    creator = gymnasium.spec(name).entry_point
    kind: Any = load_env_creator(creator) if isinstance(creator, str) else creator
    return list(getattr(kind, "metadata", {}).get("render_modes", ()))
