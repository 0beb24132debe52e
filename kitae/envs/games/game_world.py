"""The environment `games`: the model plays, the game gives the rewards.

A prompt of the data is a seed, and a seed is a game: `data.task = "episodes"` makes them. Games of other packages run
in processes of their own, one for each episode.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, Self

from pydantic import Field, JsonValue

from kitae.envs.base import Observation, Opening
from kitae.envs.config import read_params
from kitae.envs.episode_processes import EpisodeProcess, EpisodeProcesses
from kitae.envs.games.grid import Grid, KeyAndDoor
from kitae.envs.games.guess import Game, Guess, Move
from kitae.envs.games.kuhn import Kuhn
from kitae.envs.games.self_play import SelfPlay, TwoPlayerMaker
from kitae.envs.tools.base import readable, shortened
from kitae.errors import ConfigError
from kitae.section import Section
from kitae.types import Message, Prompt, Turn

OWN: dict[str, Callable[[int, Mapping[str, Any]], Game]] = {"guess": Guess, "lake": Grid, "keys": KeyAndDoor}
"""Games that need no process of their own: they are fast, and change nothing outside themselves."""

FOR_TWO: dict[str, TwoPlayerMaker] = {"kuhn": Kuhn}
"""Games that the model plays against itself."""

PACKAGES = {"textarena": "TextArena", "gymnasium": "Gymnasium"}


class GamesParams(Section):
    """Params of the environment `games`."""

    game: str = Field(description="guess, lake, keys, kuhn, textarena:NAME or gymnasium:NAME.")
    options: dict[str, JsonValue] = Field(default_factory=dict, description="Options of the game itself.")
    system: str = Field("", description="A system message before the game.")
    examples: tuple[tuple[str, ...], ...] = Field(
        (), description="Games to show first: what the game and the player said in each, by turns."
    )
    seconds: float = Field(20.0, gt=0, description="Seconds that a move may take the game.")
    output: int = Field(4000, ge=50, description="Characters that a game may say at once; the middle is cut.")


class Player(Protocol):
    """A game as an episode plays it, in this process or in another."""

    async def start(self) -> str: ...
    async def move(self, said: str) -> Move: ...
    async def close(self) -> None: ...


class GameEpisode:
    """An `Environment` in which each move has a reward, mostly 0, so an interrupted game counts as far as it went."""

    def __init__(self, player: Player, params: GamesParams) -> None:
        self._player, self._params = player, params

    async def start(self) -> Opening:
        messages = [Message("system", self._params.system)] if self._params.system else []
        for example in self._params.examples:
            messages += [Message("user" if n % 2 == 0 else "assistant", said) for n, said in enumerate(example)]
        return Opening((*messages, Message("user", self._shown(await self._player.start()))))

    async def step(self, turn: Turn) -> Observation:
        move = await self._player.move(turn.text)
        said = (Message("user", self._shown(move.text)),)
        return Observation(said, done=move.done, reward=move.reward, state=move.state)

    async def close(self) -> None:
        await self._player.close()

    def _shown(self, text: str) -> str:
        return shortened(readable(text), self._params.output)


class _LocalGame:
    """A `Player` of a game in this process."""

    def __init__(self, game: Game) -> None:
        self._game = game

    async def start(self) -> str:
        return self._game.start()

    async def move(self, said: str) -> Move:
        return self._game.move(said)

    async def close(self) -> None:
        pass


class _GameInProcess:
    """A `Player` of a game in a process of its own. If that process is lost, the episode fails."""

    def __init__(self, process: EpisodeProcess, seed: int, seconds: float) -> None:
        self._process, self._seed, self._seconds = process, seed, seconds

    async def start(self) -> str:
        answer = await self._process.ask({"seed": self._seed}, self._seconds)
        return _move_of(answer).text

    async def move(self, said: str) -> Move:
        return _move_of(await self._process.ask({"said": said}, self._seconds))

    async def close(self) -> None:
        await self._process.close()


class GameFailed(Exception):
    """A game raised an exception."""


def _move_of(answer: Mapping[str, Any]) -> Move:
    if "problem" in answer:
        raise GameFailed(answer["problem"])
    return Move(answer["text"], answer["reward"], answer["done"], answer["state"])


class Games:
    """Games that the model plays for rewards.

    A `World`. The game's package is imported once, in the template of the processes.
    """

    params: ClassVar = GamesParams

    def __init__(self, params: Mapping[str, Any]) -> None:
        self._params = read_params(GamesParams, params, "games")
        package, _, name = self._params.game.partition(":")
        self._processes: EpisodeProcesses | None = None
        if package in PACKAGES and name:
            setup = {"package": package, "name": name, "options": self._params.options}
            self._processes = EpisodeProcesses("kitae.envs.games.game_process", setup, "game", ConfigError)
        elif self._params.game in FOR_TWO:
            if self._params.examples:
                raise ConfigError(f"env.params.examples are for games of one player, got game {self._params.game!r}")
            FOR_TWO[self._params.game](0, self._params.options)
        elif self._params.game not in OWN:
            raise ConfigError(
                f"env.params.game must be {', '.join((*OWN, *FOR_TWO))}, textarena:NAME or gymnasium:NAME, got "
                f"{self._params.game!r}"
            )
        else:
            OWN[self._params.game](0, self._params.options)  # raises if the options are wrong

    async def __aenter__(self) -> Self:
        if self._processes is not None:
            await self._processes.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._processes is not None:
            await self._processes.__aexit__(None, None, None)

    def make(self, prompt: Prompt) -> GameEpisode | SelfPlay:
        seed = seed_of(prompt)
        if self._params.game in FOR_TWO:
            return SelfPlay(FOR_TWO[self._params.game](seed, self._params.options), self._params.system)
        if self._processes is not None:
            return GameEpisode(_GameInProcess(self._processes.create(), seed, self._params.seconds), self._params)
        return GameEpisode(_LocalGame(OWN[self._params.game](seed, self._params.options)), self._params)


def seed_of(prompt: Prompt) -> int:
    """The seed of a prompt: from its context or reference, or else derived from its id."""
    for found in (prompt.context.get("seed"), prompt.reference):
        if isinstance(found, int) and not isinstance(found, bool):
            return found
        if isinstance(found, str) and found.isdecimal() and len(found) < 19:
            return int(found)
    return int.from_bytes(hashlib.sha256(prompt.id.encode()).digest()[:4], "big")
