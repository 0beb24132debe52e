"""Templates and workers without verifiers: any module can be served."""

import asyncio
import gc
import json
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kitae.errors import EngineError
from kitae.workers.templates.template import Template
from kitae.workers.templates.worker_handle import OutOfTimeError, TemplateWorker, Words

MODULE = """
import os, time
from kitae.errors import ModelError
from kitae.workers.templates.template_main import serve

def main():
    serve(load)

def load(setup):
    if "refuse" in setup:
        raise ModelError(setup["refuse"])
    if "crash" in setup:
        raise RuntimeError(setup["crash"])
    return {"pid": os.getpid()}, lambda job: answer(setup, job)

def answer(setup, job):
    match job["do"]:
        case "double":
            return {"value": job["x"] * setup["factor"]}
        case "print":
            print("some words", end="")
            return {}
        case "fork":
            os.fork()
            return {"value": 1}
        case "exit":
            os._exit(3)
        case "sleep":
            time.sleep(60)
"""
Body = Callable[[Template[int]], Awaitable[Any]]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "doubling.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "doubling"


def opened() -> set[str]:
    """What this process has open, by names that are not used again."""
    found = set[str]()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing
            found.add(os.readlink(descriptor))
    return found


async def closed_since(before: set[str]) -> bool:
    """Nothing stays open that was not open then: transports close a little later, on a busy machine much later."""
    for _ in range(1000):
        gc.collect()
        if opened() <= before:
            return True
        await asyncio.sleep(0.01)
    return False


def run(module: str, body: Body, setup: Mapping[str, Any] | None = None, heard: list[bytes] | None = None) -> Any:
    async def whole() -> Any:
        template = Template(
            module,
            {"factor": 2} if setup is None else setup,
            read=lambda greeting: int(greeting["pid"]),
            hear=(heard if heard is not None else []).append,
            what="doubling worker",
            error=EngineError,
        )
        try:
            return await body(template)
        finally:
            await template.close()

    return asyncio.run(whole())


async def ask(worker: TemplateWorker, number: int, seconds: float = 10.0, **job: Any) -> dict[str, Any]:
    return await worker.ask(json.dumps({"id": number, **job}).encode() + b"\n", number, seconds)


def test_workers_are_forked_from_what_is_loaded_and_answer_jobs(module: str) -> None:
    async def body(template: Template[int]) -> None:
        workers = [await template.spawn() for _ in range(2)]
        for number, worker in enumerate(workers):
            assert await ask(worker, number, do="double", x=21) == {"value": 42}
            parent = int(Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[1])
            assert parent == template.greeting
        for worker in workers:
            await worker.kill()

    run(module, body)


def test_what_a_job_prints_is_heard_as_a_line(module: str) -> None:
    heard: list[bytes] = []

    async def body(template: Template[int]) -> None:
        worker = await template.spawn()
        assert await ask(worker, 1, do="print") == {}
        await worker.kill()

    run(module, body, heard=heard)
    assert heard == [b"some words"]


def test_a_job_that_returns_twice_is_answered_once(module: str) -> None:
    async def body(template: Template[int]) -> None:
        worker = await template.spawn()
        assert await ask(worker, 1, do="fork") == {"value": 1}
        assert await ask(worker, 2, do="double", x=1) == {"value": 2}
        await worker.kill()

    run(module, body)


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        ({"refuse": "the model must be small"}, "^the model must be small$"),
        ({"crash": "no reason"}, "^a doubling worker could not start: exit status 1; .*\n(.*\n)*.*no reason"),
    ],
)
def test_a_template_that_cannot_load_says_why_in_the_owner_s_words(
    module: str, setup: dict[str, str], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        run(module, lambda template: template.spawn(), setup)


def test_how_a_worker_ended(module: str) -> None:
    async def body(template: Template[int]) -> list[str]:
        exits, killed = [await template.spawn() for _ in range(2)]
        with pytest.raises(EOFError):
            await ask(exits, 1, do="exit")
        os.kill(killed.pid, signal.SIGKILL)
        with pytest.raises(EOFError):
            await ask(killed, 1, do="double", x=1)
        found = [await exits.post_mortem(), await killed.post_mortem()]
        for worker in (exits, killed):
            await worker.kill()
        return found

    assert run(module, body) == ["exit status 3", "killed by signal 9 (Killed)"]


def test_waiting_has_an_end(module: str) -> None:
    async def body(template: Template[int]) -> None:
        worker = await template.spawn()
        with pytest.raises(OutOfTimeError, match="waited"):
            await ask(worker, 1, 0.2, do="sleep")
        await worker.kill()

    run(module, body)


def test_a_dead_template_is_started_again(module: str) -> None:
    async def body(template: Template[int]) -> None:
        await template.start()
        first = template.greeting
        os.kill(first, signal.SIGKILL)
        worker = await template.spawn()
        assert template.greeting != first
        assert await ask(worker, 1, do="double", x=3) == {"value": 6}
        await worker.kill()

    run(module, body)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("place", ["of", "open_connection"])
def test_who_wants_a_worker_no_more_leaves_nothing_open(
    place: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Called off while the streams to a forked worker are opened: the first of them, or the second."""
    owner: Any = Words if place == "of" else asyncio
    opening, reached = getattr(owner, place), list[asyncio.Task[Any]]()

    async def slow(*arguments: Any, **settings: Any) -> Any:
        if task is not None:
            reached.append(task)
            task.cancel()
        return await opening(*arguments, **settings)

    async def body(template: Template[int]) -> None:
        nonlocal task
        await template.start()
        before = opened()
        task = asyncio.create_task(template.spawn())
        assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
        assert reached == [task]
        task = None
        assert await closed_since(before)

    task: asyncio.Task[Any] | None = None
    monkeypatch.setattr(owner, place, slow)
    run(module, body)


@pytest.mark.thorough
def test_a_start_that_is_called_off_is_none(module: str) -> None:
    """At any moment of it: nothing stays open, and the next start is a whole one."""

    async def body(template: Template[int]) -> None:
        before = opened()
        for wait in (0, 0.001, 0.01, 0.1):
            task = asyncio.create_task(template.start())
            await asyncio.sleep(wait)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert not task.cancelled() or await closed_since(before)
        worker = await template.spawn()
        assert await ask(worker, 1, do="double", x=2) == {"value": 4}
        await worker.kill()

    run(module, body)


def test_a_worker_is_reaped_by_the_template_that_forked_it(module: str) -> None:
    """Or the next template would look for a child of another one, and die of it."""

    async def body(template: Template[int]) -> None:
        old = await template.spawn()
        os.kill(template.greeting, signal.SIGKILL)
        new = await template.spawn()
        before = template.greeting
        await old.kill()
        assert await old.post_mortem() == "its template ended"
        assert await ask(new, 2, do="double", x=4) == {"value": 8} and template.greeting == before
        await new.kill()

    run(module, body)
