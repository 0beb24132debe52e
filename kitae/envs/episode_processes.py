"""Processes that work for episodes: one for each that wants one, forked from a template that has loaded everything.

What an episode needs may hang, crash, flood or change its process for good (a game that seeds the global `random`): it
runs in a process of its own, which ends with the episode, whatever it does. All of them end with the run, even one that
is killed: the template dies with the run's main thread, helpers with the template.
"""

import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from kitae.errors import KitaeError
from kitae.workers.templates.template import Template
from kitae.workers.templates.worker_handle import OutOfTimeError, WorkerDied, WorkerProcess


class HelperLost(Exception):
    """A helper is gone, and what it knew; the message says why. The next thing asked begins with a new one."""


class Helpers:
    """`Helpers("kitae.envs.games.game_process", setup, "game", ConfigError)`: see `Template`. Open it with `async
    with`.
    """

    def __init__(self, module: str, setup: Mapping[str, Any], what: str, error: type[KitaeError]) -> None:
        self._template: Template[Mapping[str, Any]] = Template(
            module, setup, read=lambda greeting: greeting, hear=lambda line: None, what=what, error=error
        )
        self._working: set[Helper] = set()

    async def __aenter__(self) -> Self:
        await self._template.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for helper in list(self._working):
            await helper.close()
        await self._template.close()

    @property
    def greeting(self) -> Mapping[str, Any]:
        return self._template.greeting

    def hire(self) -> "Helper":
        """A helper of one episode; its process is forked when it is first asked something."""
        return Helper(self)

    async def spawn(self, helper: "Helper") -> WorkerProcess:
        process = await self._template.spawn()
        self._working.add(helper)
        return process

    def forget(self, helper: "Helper") -> None:
        self._working.discard(helper)


class Helper:
    """One process, from the first question to `close`. It is asked one thing at a time."""

    def __init__(self, helpers: Helpers) -> None:
        self._helpers = helpers
        self._process: WorkerProcess | None = None
        self._asked = 0

    async def ask(self, job: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to a job; `HelperLost` where it takes longer than so many seconds, or the process ends."""
        if self._process is None:
            self._process = await self._helpers.spawn(self)
        process = self._process
        self._asked += 1
        message = json.dumps({"id": self._asked, **job}).encode() + b"\n"
        try:
            return await process.ask(message, self._asked, seconds)
        except OutOfTimeError:
            reason = f"it took longer than {seconds:g} s"
        except EOFError:
            reason = await process.post_mortem()
        except WorkerDied as death:
            reason = str(death)
        except BaseException:  # cancelled: what it is doing now would be taken for the next answer
            await self.close()
            raise
        await self.close()
        raise HelperLost(reason)

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            try:
                await process.kill()
            finally:
                self._helpers.forget(self)
