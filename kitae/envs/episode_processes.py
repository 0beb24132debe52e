"""Processes that work for episodes: one for each that needs one, forked from a template that has loaded everything.

What an episode runs may hang, crash, flood its output or change its process for good (a game that seeds the global
`random`). So it runs in a process of its own, which ends with the episode whatever it does. All these processes end
with the run, even if the run is killed: the template dies with the run's main thread, and they die with the template.
"""

import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from kitae.errors import KitaeError
from kitae.workers.templates.template import Template
from kitae.workers.templates.worker_handle import OutOfTimeError, TemplateWorker, WorkerDied


class EpisodeProcessLost(Exception):
    """The process is lost, with its state; the message is the reason. The next request starts a new process."""


class EpisodeProcesses:
    """`EpisodeProcesses("kitae.envs.games.game_process", setup, "game", ConfigError)`: see `Template`; for `async
    with`."""

    def __init__(self, module: str, setup: Mapping[str, Any], what: str, error: type[KitaeError]) -> None:
        self._template: Template[Mapping[str, Any]] = Template(
            module, setup, read=lambda greeting: greeting, hear=lambda line: None, what=what, error=error
        )
        self._working: set[EpisodeProcess] = set()

    async def __aenter__(self) -> Self:
        await self._template.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in list(self._working):
            await process.close()
        await self._template.close()

    @property
    def greeting(self) -> Mapping[str, Any]:
        return self._template.greeting

    def create(self) -> "EpisodeProcess":
        """A process for one episode. It is forked at the first request."""
        return EpisodeProcess(self)

    async def spawn(self, process: "EpisodeProcess") -> TemplateWorker:
        worker = await self._template.spawn()
        self._working.add(process)
        return worker

    def forget(self, process: "EpisodeProcess") -> None:
        self._working.discard(process)


class EpisodeProcess:
    """One process, from the first request to `close`. It handles one request at a time."""

    def __init__(self, processes: EpisodeProcesses) -> None:
        self._processes = processes
        self._process: TemplateWorker | None = None
        self._asked = 0

    async def ask(self, job: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to a job. Raises `EpisodeProcessLost` if it takes longer than `seconds` or the process ends."""
        if self._process is None:
            self._process = await self._processes.spawn(self)
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
        except BaseException:  # cancelled: the answer in progress would be taken for the next one
            await self.close()
            raise
        await self.close()
        raise EpisodeProcessLost(reason)

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            try:
                await process.kill()
            finally:
                self._processes.forget(self)
