"""A pool of worker processes that score responses, each of which can be killed without harm to the others.

    score() ─► take an idle worker ─► send the job, wait for the reply ─► give the worker back
                                        │ it takes long: a fresh worker takes its place, and this check goes on aside;
                                        │ it pauses while others wait for a worker
                                        │ deadline passed, or worker dead
                                        └─► kill its process group; a fresh one is forked in the background

A worker has one job at a time, so a lost worker costs one check, and its score says so: what a timeout means is the
verifier's `on_timeout`; everything else that goes wrong is an error, never a 0.

Built-in verifiers that only wait for a server (`async def`) need no worker: they run in the event loop, many at a time.
"""

import asyncio
import inspect
import itertools
import json
import sys
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from kitae.errors import VerifierError
from kitae.types import Prompt, Score
from kitae.verifiers.processes import Process, Template, WorkerDied, within
from kitae.verifiers.registry import VERIFIERS, check_params
from kitae.verifiers.remote import close_clients
from kitae.verifiers.worker import as_score

_PATIENCE = 3  # times the usual duration, after which a check is set aside
_SHORTEST, _LONGEST, _FIRST = 0.015, 0.5, 5.0  # seconds between which that lies; the first check may have to import
_ASIDE = 256  # checks set aside at most, for each worker
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(slots=True)
class PoolStats:
    """Counters since the start: checks that ended, and how many of them had no score or ran out of time."""

    checked: int = 0
    errors: int = 0
    timeouts: int = 0
    restarts: int = 0


class VerifierPool:
    """`async with VerifierPool("math", workers=4) as pool: score = await pool.score(response, reference)`.

    `score` may be called from any number of tasks; they wait for an idle worker in turn, and the deadline of a check
    begins when it has one. Cancelling a call kills its worker. `close` kills all of them: checks that were running or
    waiting end as errors. References and contexts travel as JSON.
    """

    def __init__(
        self, name: str, params: Mapping[str, Any] = _NOTHING, workers: int = 2, timeout: float = 10.0
    ) -> None:
        self.timeout = timeout
        self.stats = PoolStats()
        self._params = dict(params)
        found = VERIFIERS.get(name)
        self._references_are_answers = found is None or found.gold
        self._waiting = found if found is not None and inspect.iscoroutinefunction(found.score) else None
        self._template = Template({"name": name, "params": self._params})
        self._workers = {_Worker(self._template) for _ in range(0 if self._waiting else workers)}
        self._size = len(self._workers)
        self._aside: set[_Worker] = set()
        self._queued = 0
        self._draining = self._paused = False
        self._first, self._later = _Usual(min(_FIRST, timeout / 2)), _Usual(_LONGEST)
        self._job_ids = itertools.count(1)
        self._idle: asyncio.Queue[_Worker] = asyncio.LifoQueue()  # those that were busy last know the most
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = False

    def gold(self, prompt: Prompt) -> str | None:
        """A response to the prompt that must score 1, where one is known."""
        if prompt.gold is not None:
            return prompt.gold
        is_answer = self._references_are_answers and isinstance(prompt.reference, str | int | float)
        return str(prompt.reference) if is_answer else None

    async def start(self) -> None:
        """Start all workers; raise `VerifierError` if the verifier cannot be loaded or refuses its params."""
        try:
            if self._waiting:
                check_params(self._waiting, self._params)
            else:
                await self._template.start()
                for warning in self._template.warnings:
                    print(f"warning: {warning}", file=sys.stderr)
            for worker in self._workers:
                await worker.start()
        except BaseException:
            await self.close()
            raise
        self._running = True
        self._idle = asyncio.LifoQueue()
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def score(self, response: str, reference: Any, context: Mapping[str, Any] = _NOTHING) -> Score:
        if not self._running:
            raise VerifierError("a verifier pool scores between start() and close(), got a call outside")
        check = self._wait_for if self._waiting else self._check
        score = await check(response, reference, context)
        self.stats.checked += 1
        self.stats.errors += not score.valid
        return score

    async def close(self) -> None:
        self._running = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in (*self._workers, *self._aside)))
        await self._template.close()
        if self._waiting:
            await close_clients()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _wait_for(self, response: str, reference: Any, context: Mapping[str, Any]) -> Score:
        """A check that waits for a server. It has a deadline of its own, which begins when it is its turn."""
        assert self._waiting is not None
        waiting: Any = self._waiting.score(response, reference, context, **self._params)
        try:
            return as_score(await waiting)
        except Exception as error:
            return Score.error(f"{type(error).__name__}: {error}")

    async def _check(self, response: str, reference: Any, context: Mapping[str, Any]) -> Score:
        job_id = next(self._job_ids)
        try:
            job = _encode(job_id, {"response": response, "reference": reference, "context": dict(context)})
        except (TypeError, ValueError, RecursionError) as error:
            return Score.error(f"reference and context must be JSON values: {error}")
        self._queued += 1
        self._balance()
        try:
            worker = await self._idle.get()
        finally:
            self._queued -= 1
            self._balance()
        usual = self._first if worker.fresh else self._later
        loop = asyncio.get_running_loop()
        aside = loop.call_later(usual.patience(), self._set_aside, worker)
        began = loop.time()
        healthy = False
        try:
            reply = await worker.ask(job_id, job, self.timeout)
            healthy = True
            usual.add(loop.time() - began)
            return Score(**reply)
        except TimeoutError:
            self.stats.timeouts += 1
            reason = f"timed out after {self.timeout:g} s"
            return Score(0.0, detail=reason) if self._template.on_timeout == "wrong" else Score.error(reason)
        except WorkerDied as death:
            return Score.error(f"verifier worker died: {death}")
        finally:
            aside.cancel()
            self.stats.restarts += self._running and not healthy
            if worker in self._aside:
                self._in_background(self._retire(worker))
            elif healthy or not self._running:  # of a closed pool, so that those who still wait get their error
                self._idle.put_nowait(worker)
            else:
                self._in_background(self._restart(worker))

    def _balance(self) -> None:
        """Long checks pause while others wait; but when there are too many of them, they have to be got rid of."""
        if len(self._aside) >= _ASIDE * self._size:
            self._draining = True
        elif len(self._aside) <= self._size:
            self._draining = False
        paused = self._queued > 0 and not self._draining
        if paused != self._paused:
            self._paused = paused
            for worker in self._aside:
                worker.pause(paused)

    def _set_aside(self, worker: "_Worker") -> None:
        """A check takes long: it goes on, and another worker takes its place in the pool."""
        if not self._running or len(self._aside) >= _ASIDE * self._size:
            return
        self._workers.discard(worker)
        self._aside.add(worker)
        self._balance()
        worker.pause(self._paused)
        substitute = _Worker(self._template)
        self._workers.add(substitute)
        self._in_background(self._restart(substitute))

    async def _restart(self, worker: "_Worker") -> None:
        """A worker that does not come back answers its next job with the reason, and is then tried again."""
        try:
            await worker.stop()
            with suppress(VerifierError):
                await worker.start()
        finally:
            self._idle.put_nowait(worker)

    async def _retire(self, worker: "_Worker") -> None:
        """Its place is taken already."""
        await worker.stop()
        self._aside.discard(worker)
        self._balance()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def validate(pool: VerifierPool, prompts: Iterable[Prompt]) -> list[tuple[Prompt, Score]]:
    """Score gold answers as if they were responses; return those that do not get 1, which are bad data.

    Where there is no gold answer, a reference that the verifier cannot read is what can be found, as an error.
    """

    async def check(prompt: Prompt) -> tuple[Prompt, Score]:
        return prompt, await pool.score(pool.gold(prompt) or "", prompt.reference, prompt.context)

    results = await asyncio.gather(*map(check, prompts))
    return [(p, score) for p, score in results if not score.valid or (pool.gold(p) is not None and score.value != 1)]


class _Usual:
    """How long checks take, as a running mean; the first of a worker's checks and the later ones have one each."""

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._mean: float | None = None

    def add(self, seconds: float) -> None:
        """What took longer than our patience, be it by far, counts as that: few long checks must not hold up many."""
        seconds = min(seconds, self.patience())
        self._mean = seconds if self._mean is None else self._mean + 0.05 * (seconds - self._mean)

    def patience(self) -> float:
        if self._mean is None:
            return self._longest
        return min(self._longest, max(_SHORTEST, _PATIENCE * self._mean))


class _Worker:
    """One place in the pool, and the process that fills it at the moment.

    `fresh` until its process has answered once.
    """

    def __init__(self, template: Template) -> None:
        self.fresh = True
        self._template = template
        self._process: Process | None = None
        self._absence = "it was never started"

    async def start(self) -> None:
        self.fresh = True
        try:
            self._process = await self._template.spawn()
        except VerifierError as error:
            self._absence = str(error)
            raise

    async def ask(self, job_id: int, job: bytes, timeout: float) -> dict[str, Any]:
        """The reply to a job; `TimeoutError` or `WorkerDied` mean that the worker must be replaced."""
        if self._process is None:
            raise WorkerDied(self._absence)
        exchange = asyncio.create_task(self._process.exchange(job, job_id))
        try:
            reply: dict[str, Any] = await within(timeout, exchange, self._process)
            self.fresh = False
            return reply
        except EOFError:
            raise WorkerDied(await self._process.post_mortem() if self._process else self._absence) from None

    def pause(self, paused: bool) -> None:
        if self._process is not None and self._process.paused != paused:
            self._process.pause(paused)

    async def stop(self, reason: str = "it was stopped") -> None:
        process, self._process, self._absence = self._process, None, reason
        if process is not None:
            try:
                await process.kill()
            except asyncio.CancelledError:
                self._process = process  # it is not gone yet: the next stop waits for it
                raise


def _encode(message_id: int, message: Mapping[str, Any]) -> bytes:
    return json.dumps({"id": message_id, **message}).encode() + b"\n"
