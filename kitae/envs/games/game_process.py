"""The processes in which games of other packages run; see `kitae.envs.episode_processes`.

    setup  {"package", "name", "options"}      job  {"seed"}, then {"said"} for each move
                                               answer  {"text", "reward", "done"}, or {"problem"}

The package is imported in the template, and one game is made and started there as a test. A game may then do anything
to its process: seed the global `random`, print, leave threads behind.
"""

import random
from collections.abc import Mapping
from typing import Any

from kitae.envs.games.guess import Game, GameMaker, Move
from kitae.envs.games.library_games import Gymnasium, TextArena
from kitae.errors import ConfigError
from kitae.workers.templates.template_main import Answer, serve

MAKERS: dict[str, GameMaker] = {"textarena": TextArena, "gymnasium": Gymnasium}


def main() -> None:
    serve(load)


def load(setup: Mapping[str, Any]) -> tuple[Mapping[str, Any], Answer]:
    """Import the package and start one game, to check that it can be played."""
    package, name, options = setup["package"], setup["name"], setup["options"]
    game = f"env.params.game = '{package}:{name}'"

    def make(seed: int) -> Game:
        return MAKERS[package](seed, {"name": name, "options": options})

    try:
        make(0).start()
    except ImportError as missing:
        raise ConfigError(f"{game} needs a package: pip install 'kitae[games]' ({missing})") from None
    except Exception as problem:
        raise ConfigError(f"{game} cannot be played: {type(problem).__name__}: {problem}") from None
    return {}, _Table(make).answer


class _Table:
    """The game of one process."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._game: Game | None = None

    def answer(self, job: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            move = self._begun(job["seed"]) if "seed" in job else self._moved(job["said"])
            return {"text": str(move.text), "reward": float(move.reward), "done": bool(move.done), "state": move.state}
        except Exception as problem:
            return {"problem": f"{type(problem).__name__}: {problem}"[:2000]}

    def _begun(self, seed: int) -> Move:
        random.seed(seed)
        self._game = self._make(seed)
        return Move(self._game.start())

    def _moved(self, said: str) -> Move:
        assert self._game is not None, "a game must be started before a move"
        return self._game.move(said)
