"""The cluster seam: worker processes somewhere, each with one connection to the controller.

The controller, which is the process of `kitae train`, says what is to run and in which pool; the back-end finds a
place for it, starts it there and says how it ended. What the two sides send each other (`kitae.workers.frames`) is no
affair of the back-end. Tensors never go through it.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """What runs in a worker process, and what it needs.

    `LaunchSpec("engine 0", "kitae.engines.process.engine_main", {"model": {…}}, pool="engines")`

    module: has `main(setup, stream)`, which is called there with the setup and a connected socket. setup: JSON. threads
    and cores: of processors; None: as many as the place gives. descriptors: files that it inherits, in a process on
    this machine alone.
    """

    name: str
    module: str
    setup: Mapping[str, Any]
    pool: str = ""
    threads: int | None = None
    cores: tuple[int, ...] | None = None
    descriptors: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


class LaunchError(Exception):
    """A worker process could not be started; the message says why. The caller decides what that means."""


class WorkerProcess(Protocol):
    """A process that was launched.

    `wait` returns when the process is gone, and says how it ended; `words` is the end of what it wrote, for messages.
    `kill` ends it at once, wherever it is, and all that it has started. where: the machine, for messages.
    """

    where: str
    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def words(self) -> str: ...
    def kill(self) -> None: ...
    async def wait(self) -> str: ...


class Cluster(Protocol):
    """Back-end that launches worker processes. `start` returns one that is connected; `LaunchError` where there is no
    place for it in time.

    host: the address at which worker processes reach this process. remote: whether they may be on other machines, which
    know nothing of this one's memory and files. `close` ends all that is left.
    """

    remote: bool

    @property
    def host(self) -> str: ...

    async def start(self, spec: LaunchSpec) -> WorkerProcess: ...
    async def close(self) -> None: ...


async def end_processes(processes: Iterable[WorkerProcess]) -> None:
    """All at once; it returns when their processes are gone."""
    left = list(processes)
    for process in left:
        process.kill()
    for process in left:
        await process.wait()
        process.writer.transport.abort()
