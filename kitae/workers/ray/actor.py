"""The actor at a place of a Ray cluster, which has a process there, and its reports about the process."""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kitae.workers.base import LaunchSpec
from kitae.workers.gpus import VISIBLE
from kitae.workers.remote_process import LaunchedProcess
from kitae.workers.worker_main import pack_order

_PULSE = 0.5  # seconds between two lots of what a process writes


@dataclass(frozen=True, slots=True)
class Begun:
    """`Begun(pid=4711, host="10.0.0.3", node="1a2b…")`: what an actor says of the process that it has started."""

    pid: int
    host: str
    node: str


@dataclass(frozen=True, slots=True)
class Bulletin:
    """`Bulletin(heard=120, words="…", ended=None)`: of a process; ended: how it ended, if it has."""

    heard: int
    words: str
    ended: str | None


class LaunchActor:
    """The actor: starts one process beside it, reports what it writes and how it ends, and takes it along when it dies.

    Its methods are coroutines, so they run in one thread, whose end is the end of the process (see `die_with`).
    """

    _process: LaunchedProcess

    async def start(
        self, record: Mapping[str, Any], where: Mapping[str, Any], home: str, paths: Sequence[str], folder: str
    ) -> Begun:
        """home: of the package that the controller uses; if it is here too, on the same machine or a shared disk, its
        paths and folder are used; else those of this node's own package."""
        import ray

        known = Path(home).is_dir()
        spec = LaunchSpec(**record)
        self._process = await LaunchedProcess.launch(
            spec,
            asyncio.subprocess.PIPE,
            environment_of(os.environ, ray.get_gpu_ids()),
            paths if known else None,
            folder if known and Path(folder).is_dir() else None,
        )
        await self._process.order(pack_order(spec, os.getpid(), where))
        context = ray.get_runtime_context()
        return Begun(self._process.pid, ray.util.get_node_ip_address(), context.get_node_id())

    async def news(self, heard: int) -> Bulletin:
        """Once there are any: more than `heard` bytes were written, or it has ended."""
        process = self._process
        while not process.ended.done() and process.heard <= heard:
            await asyncio.wait({process.ended}, timeout=_PULSE)
        ended = process.ended.result() if process.ended.done() else None
        return Bulletin(process.heard, process.words, ended)

    async def kill(self) -> None:
        self._process.kill()


def environment_of(environment: Mapping[str, str], gpus: Sequence[Any]) -> dict[str, str]:
    """What a process gets of its actor's environment: without Ray's own, which would make it a part of this cluster,
    and with the GPUs that Ray assigned, which may be none."""
    left = {key: value for key, value in environment.items() if not key.startswith("RAY_")}
    return {**left, VISIBLE: ",".join(map(str, gpus))}


def home() -> tuple[str, list[str], str]:
    """Where this process has its package, its imports and its files."""
    return str(Path(__file__).parents[2]), [os.path.abspath(path) for path in sys.path], os.getcwd()
