"""A pool of worker processes that score responses, each of which can be killed without harm to the others.

    score() ─► take an idle worker ─► send the job, wait for the reply ─► give the worker back
                 ▲                      │ a repeatable check takes longer than most: the worker interrupts it
                 └──── last in line ◄───┤
                                        │ it takes long: a fresh worker takes its place, and this check goes on aside;
                                        │ it pauses while others wait for a worker
                                        │ deadline passed, or worker dead
                                        └─► kill its process group; a fresh one is forked in the background

A worker has one job at a time, so a lost worker costs one check, and its score says so: what it means to have used all
of one's processor time is the verifier's `on_timeout`; everything else that goes wrong is an error, never a 0. A check
that the machine kept from its processor time, or whose worker was killed from outside, is made once more.

Built-in verifiers that only wait for a server (`async def`) need no worker: they run in the event loop, many at a time.
"""

import asyncio
import inspect
import itertools
import json
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import Any, Self

from kitae.clients.http_client import close_clients
from kitae.errors import StoreError, VerifierError
from kitae.plugins import is_plugin
from kitae.types import LazyText, Prompt, Score
from kitae.verifiers.base import TimeoutMeaning
from kitae.verifiers.given_functions import check_given, copies_for, given_name, is_given
from kitae.verifiers.score_calls import as_score, check_params
from kitae.verifiers.verifier_registry import VERIFIERS
from kitae.workers.background_tasks import BackgroundTasks
from kitae.workers.templates.template import Template
from kitae.workers.templates.template_main import MAX_CONTROL
from kitae.workers.templates.worker_handle import OutOfTimeError, TemplateWorker, WorkerDied

_PATIENCE = 2.5  # times the usual duration, after which a check is set aside
_SHORTEST, _LONGEST, _FIRST = 0.015, 0.5, 5.0  # seconds between which that lies; the first check may have to import
_TURNS = 8  # of the event loop, in which what is in a pipe reaches who waits for it
_ALLOWANCE = 4  # times the usual processor time, after which a repeatable check is put off
_TRIES = (1, 2)  # times that, for its first tries: noise rarely strikes twice; then it has all its time
_LEAST, _MOST, _YOUNG = 0.0008, 0.5, 0.005  # seconds between which that lies; the least of a young worker
_WARM = 50  # checks after which a worker is not young: it has its own copy of the memory that it writes to
_ASIDE = 256  # checks set aside at most, for each worker
_LINES, _MINUTE, _LINE = 20, 60.0, 500  # printed lines that are shown in so many seconds; characters of one
_KILLED = re.compile(r"killed by signal (9|15)\b|its template ended")  # a check that did it will do it again
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(slots=True)
class PoolStats:
    """Counters since the start: checks that ended, how many of them had no score, ran out of time, or were made again
    because the machine kept them from their time; and workers that had to be replaced.
    """

    checked: int = 0
    errors: int = 0
    timeouts: int = 0
    retries: int = 0
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the template says of the verifier: `Loaded("wrong", repeatable=True, grouped=False, warnings=())`."""

    on_timeout: TimeoutMeaning
    repeatable: bool
    grouped: bool
    warnings: tuple[str, ...]

    @classmethod
    def of(cls, greeting: Mapping[str, Any]) -> Self:
        return cls(greeting["on_timeout"], greeting["repeatable"], greeting["grouped"], tuple(greeting["warnings"]))


class VerifierPool:
    """`async with VerifierPool("math", workers=4) as pool: score = await pool.score(response, reference)`.

    `score` may be called from any number of tasks; they wait for an idle worker in turn, and the deadline of a check
    begins when it has one. Cancelling a call kills its worker. `close` kills all of them: checks that were running or
    waiting end as errors. References and contexts travel as JSON. `note` gets what the user should see, line by line:
    warnings, and what functions of theirs print.
    """

    def __init__(
        self,
        name: str,
        params: Mapping[str, Any] = _NOTHING,
        workers: int = 2,
        timeout: float = 10.0,
        note: Callable[[str], None] | None = None,
    ) -> None:
        self.timeout = timeout
        self.stats = PoolStats()
        self._params = dict(params)
        found = VERIFIERS.get(name)
        self._waiting = found if found is not None and inspect.iscoroutinefunction(found.score) else None
        self._note = note or _to_stderr
        self._prints = _Prints(name, self._note)
        self._setup: dict[str, Any] = {"name": name, "params": self._params}
        self._template = Template(
            "kitae.verifiers.child_main",
            self._setup,
            read=Loaded.of,
            hear=self._prints.hear,
            what="verifier worker",
            error=VerifierError,
        )
        self._workers = {_Worker(self._template) for _ in range(0 if self._waiting else workers)}
        self._size = len(self._workers)
        self._aside: set[_Worker] = set()
        self._queued = 0
        self._draining = self._paused = False
        self._first, self._later = (_Usual(_PATIENCE, _SHORTEST, most) for most in (min(_FIRST, timeout / 2), _LONGEST))
        self._processor = _Usual(_ALLOWANCE, _LEAST, _MOST)
        self._job_ids = itertools.count(1)
        self._idle = _Desk()
        self._tasks = BackgroundTasks()
        self._running = False

    def gold(self, prompt: Prompt) -> str | None:
        """A response to the prompt that must score 1, where one is known."""
        return gold_of(self._setup["name"], prompt)

    async def start(self) -> None:
        """Start all workers; raise `VerifierError` if the verifier cannot be loaded or refuses its params."""
        try:
            if self._waiting:
                check_params(self._waiting, self._params)
                if self._waiting.prepare is not None:
                    self._waiting = self._waiting.prepare(self._params)
                if self._waiting.companion is not None:
                    await self._waiting.companion.start()
            else:
                _check_setup(self._setup)
                check_given(self._setup["name"], self._params)
                self._setup["held"] = copies_for(self._setup["name"], self._params)
                await self._template.start()
                for warning in self._template.greeting.warnings:
                    self._note(f"warning: {warning}")
            for worker in self._workers:
                await worker.start()
        except BaseException:
            await self.close()
            raise
        self._running = True
        self._idle = _Desk()
        for worker in self._workers:
            self._idle.put(worker)

    @property
    def grouped(self) -> bool:
        """Whether the answers to a prompt are best brought together, with `scores`."""
        return self._waiting is None and self._template.greeting.grouped

    async def score(self, response: str | LazyText, reference: Any, context: Mapping[str, Any] = _NOTHING) -> Score:
        (score,) = await self.scores([response], reference, [context])
        return score

    async def scores(
        self, responses: Sequence[str | LazyText], reference: Any, contexts: Sequence[Mapping[str, Any]]
    ) -> list[Score]:
        """Of the answers to one prompt, each with its context, in one check, if the verifier is `grouped`; else in one
        for each. The time for a check is `timeout` for each of its answers."""
        if not self._running:
            raise VerifierError("a verifier pool scores between start() and close(), got a call outside")
        if self.grouped:
            found = await self._judged(responses, reference, contexts)
        else:
            each = (self._judged([r], reference, [c]) for r, c in zip(responses, contexts, strict=True))
            found = [score for scores in await asyncio.gather(*each) for score in scores]
        self.stats.checked += len(found)
        self.stats.errors += sum(not score.valid for score in found)
        return found

    async def _judged(
        self, responses: Sequence[str | LazyText], reference: Any, contexts: Sequence[Mapping[str, Any]]
    ) -> list[Score]:
        """A text that lies in a file is read first; where it cannot be, there is nothing to judge."""
        try:
            texts = [r if isinstance(r, str) else await asyncio.to_thread(str, r) for r in responses]
        except StoreError as error:
            return [Score.error(str(error))] * len(responses)
        if self._waiting:
            return [await self._wait_for(texts[0], reference, contexts[0])]
        return await self._check(texts, reference, contexts)

    async def close(self) -> None:
        self._running = False
        await self._tasks.cancel()
        await asyncio.gather(*(worker.stop() for worker in (*self._workers, *self._aside)))
        await self._template.close()
        self._prints.close()
        if self._waiting:
            if self._waiting.companion is not None:
                await self._waiting.companion.close()
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

    async def _check(
        self, responses: Sequence[str], reference: Any, contexts: Sequence[Mapping[str, Any]]
    ) -> list[Score]:
        count = len(responses)
        try:
            job = json.dumps({"responses": responses, "reference": reference, "contexts": list(map(dict, contexts))})
        except (TypeError, ValueError, RecursionError) as error:
            return [Score.error(f"reference and context must be JSON values: {error}")] * count
        scores, lost, starved, killed = None, None, False, False
        loaded, timeout = self._template.greeting, self.timeout * count
        lane = 0 if loaded.repeatable else len(_TRIES)
        while scores is None:
            try:
                scores = await self._attempt(job, lane, timeout)
                lane += 1
            except OutOfTimeError as late:
                if late.reason == "computed" or (late.reason == "waited" and loaded.on_timeout == "error"):
                    lost = self._timed_out(late.reason, timeout)
                elif starved:
                    why = "kept from the processor" if late.reason == "starved" else "waiting"
                    lost = Score.error(f"not checked within {timeout:g} s of its own time, twice: it was {why}")
                else:
                    starved = True
                    self.stats.retries += 1
            except WorkerDied as death:
                if killed or not _KILLED.search(str(death)):
                    lost = Score.error(f"verifier worker died: {death}")
                killed = True
            if lost is not None:
                scores = [lost] * count
        return scores

    def _timed_out(self, reason: str, timeout: float) -> Score:
        self.stats.timeouts += 1
        detail = f"timed out after {timeout:g} s"
        wrong = self._template.greeting.on_timeout == "wrong" and reason == "computed"
        return Score(0.0, detail=detail) if wrong else Score.error(detail)

    async def _attempt(self, job: str, lane: int, timeout: float) -> list[Score] | None:
        """The scores of a check; None if it was interrupted at this try. Raises where its worker is lost."""
        worker = await self._take(lane)
        usual = self._first if worker.fresh else self._later
        allowance = None
        if lane < len(_TRIES) and not worker.fresh:
            least = _YOUNG if worker.answered < _WARM else 0.0
            allowance = max(least, _TRIES[lane] * self._processor.patience())
        began = monotonic()
        self._watch(worker, usual.patience())
        healthy = False
        try:
            checked = await worker.ask(next(self._job_ids), job, allowance, timeout)
            healthy = True
            if checked.scores is not None:
                usual.add(monotonic() - began)
                self._processor.add(checked.seconds)
            return checked.scores
        finally:
            worker.watch.cancel()
            self.stats.restarts += self._running and not healthy
            if worker in self._aside:
                self._tasks.start(self._retire(worker))
            elif healthy or not self._running:  # of a closed pool, so that those who still wait get their error
                self._idle.put(worker)
            else:
                self._tasks.start(self._restart(worker))

    async def _take(self, lane: int) -> "_Worker":
        """An idle worker that is fit for the check."""
        self._queued += 1
        self._balance()
        try:
            worker = await self._idle.take(lane)
        finally:
            self._queued -= 1
            self._balance()
        if self._running and (worker.ended or (worker.spoilt and lane == len(_TRIES))):
            renewal = self._tasks.start(self._renew(worker))
            try:
                await asyncio.wait({renewal})
            except asyncio.CancelledError:
                renewal.add_done_callback(lambda _: self._idle.put(worker))
                raise
        return worker

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

    def _watch(self, worker: "_Worker", patience: float, again: float = 0.0) -> None:
        """Set its check aside when our patience is over; time in which others had the processor says nothing of it.

        Nor does time in which this loop was busy: before it looks, it hears the answers that are there already.
        """
        loop = asyncio.get_running_loop()

        def look(turns: int = _TURNS) -> None:
            if turns:
                worker.watch = loop.call_soon(look, turns - 1)
            elif left := worker.owes(patience):
                self._watch(worker, patience, max(left, _SHORTEST))
            else:
                self._set_aside(worker)

        worker.watch = loop.call_later(again or patience, look)

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
        self._tasks.start(self._restart(substitute))

    async def _restart(self, worker: "_Worker") -> None:
        try:
            await self._renew(worker)
        finally:
            self._idle.put(worker)

    async def _renew(self, worker: "_Worker") -> None:
        """A worker that does not come back answers its next job with the reason, and is then tried again."""
        await worker.stop()
        with suppress(VerifierError):
            await worker.start()

    async def _retire(self, worker: "_Worker") -> None:
        """Its place is taken already."""
        await worker.stop()
        self._aside.discard(worker)
        self._balance()


def gold_of(verifier: str, prompt: Prompt) -> str | None:
    """A response to the prompt that must score 1 under the verifier of that name, where one is known. A function that
    was given from Python is a reward, which may give a right answer any number."""
    if is_given(verifier):
        return None
    found = VERIFIERS.get(verifier)
    if found is not None and not found.right_is_one:
        return None
    if prompt.gold is not None:
        return prompt.gold
    is_answer = (found is None or found.gold) and isinstance(prompt.reference, str | int | float)
    return str(prompt.reference) if is_answer else None


async def validate(pool: VerifierPool, prompts: Iterable[Prompt]) -> list[tuple[Prompt, Score]]:
    """Score gold answers as if they were responses; return those that do not get 1, which are bad data.

    Where there is no gold answer, a reference that the verifier cannot read is what can be found, as an error.
    """

    async def check(prompt: Prompt) -> tuple[Prompt, Score]:
        return prompt, await pool.score(pool.gold(prompt) or _as_answer(prompt), prompt.reference, prompt.context)

    results = await asyncio.gather(*map(check, prompts))
    return [(p, score) for p, score in results if not score.valid or (pool.gold(p) is not None and score.value != 1)]


async def validate_wrong(pool: VerifierPool, prompts: Sequence[Prompt]) -> list[tuple[Prompt, str, Score]]:
    """Score the answer to another prompt; return prompts, answers and scores where that is an error.

    A wrong answer is a 0 and never an error: a verifier that returns None, is not a number or does not end for what is
    wrong would leave all wrong answers out of their groups.
    """

    async def check(prompt: Prompt) -> tuple[Prompt, str, Score]:
        others = (p for p in prompts if p.reference != prompt.reference)
        wrong = next((answer for p in others if (answer := pool.gold(p) or _as_answer(p))), _NO_ANSWER)
        return prompt, wrong, await pool.score(wrong, prompt.reference, prompt.context)

    results = await asyncio.gather(*map(check, prompts))
    return [found for found in results if not found[2].valid]


_NO_ANSWER = "I do not know."


def _as_answer(prompt: Prompt) -> str:
    """The reference, where it reads as an answer."""
    return str(prompt.reference) if isinstance(prompt.reference, str | int | float) else ""


def _check_setup(setup: Mapping[str, Any]) -> None:
    where = f"params of verifier {setup['name']!r}"
    try:
        size = len(json.dumps(setup))  # which is ASCII
    except (TypeError, ValueError) as error:
        raise VerifierError(f"{where} must be JSON values, got {str(setup['params'])[:200]}: {error}") from None
    if size > MAX_CONTROL:
        raise VerifierError(f"{where} must have at most {MAX_CONTROL} bytes as JSON, got {size}")


class _Desk:
    """Idle workers, and who waits for one: checks at their first try come before those that took longer than that."""

    def __init__(self) -> None:
        self._idle: list[_Worker] = []  # those that were busy last know the most
        self._lanes: list[deque[asyncio.Future[_Worker]]] = [deque() for _ in (*_TRIES, None)]

    async def take(self, lane: int) -> "_Worker":
        if self._idle:
            return self._idle.pop()
        turn: asyncio.Future[_Worker] = asyncio.get_running_loop().create_future()
        self._lanes[lane].append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.put(turn.result())
            raise

    def put(self, worker: "_Worker") -> None:
        for waiting in self._lanes:
            while waiting:
                if not (turn := waiting.popleft()).done():
                    turn.set_result(worker)
                    return
        self._idle.append(worker)


class _Prints:
    """Tells the user what a score function prints: the first lines of each minute, and how many more there were.

    Those of built-in verifiers are their libraries' and concern nobody.
    """

    def __init__(self, name: str, note: Callable[[str], None]) -> None:
        file, colon, function = name.rpartition(":")
        known = given_name(name)
        self._name = known.label if known is not None else f"{Path(file).name}{colon}{function}"
        self._note = note if is_plugin(name) or is_given(name) or name == "compose" else None
        self._left, self._since, self._silent = _LINES, monotonic(), 0

    def hear(self, text: bytes) -> None:
        if self._note is None:
            return
        if monotonic() - self._since > _MINUTE:
            self.close()
            self._left, self._since = _LINES, monotonic()
        lines = text.split(b"\n")
        for line in lines[: self._left]:
            with suppress(OSError, UnicodeError):  # a terminal that is gone, or knows few letters, ends no check
                self._note(f"{self._name}: {line.decode(errors='replace')[:_LINE]}")
        self._silent += max(0, len(lines) - self._left)
        self._left -= min(self._left, len(lines))

    def close(self) -> None:
        """Say what was not said so far."""
        if self._note is not None and self._silent:
            with suppress(OSError, UnicodeError):
                self._note(f"{self._name}: {self._silent:,} more lines were printed")
        self._silent = 0


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


class _Usual:
    """How much time checks take, as a running mean, and how many `times` that, from `least` to `most`, is too long."""

    def __init__(self, times: float, least: float, most: float) -> None:
        self._times, self._least, self._most = times, least, most
        self._mean: float | None = None

    def add(self, seconds: float) -> None:
        """What took longer than our patience, be it by far, counts as that: few long checks must not hold up many."""
        seconds = min(seconds, self.patience())
        self._mean = seconds if self._mean is None else self._mean + 0.05 * (seconds - self._mean)

    def patience(self) -> float:
        if self._mean is None:
            return self._most
        return min(self._most, max(self._least, self._times * self._mean))


@dataclass(frozen=True, slots=True)
class _Checked:
    """`_Checked([Score(1.0)], seconds=0.002)` of processor time; no scores: the check was interrupted."""

    scores: list[Score] | None
    seconds: float


class _Worker:
    """One place in the pool, and the process that fills it at the moment: `answered` so many checks, and is `spoilt` by
    an interrupt, or `ended` by itself.
    """

    def __init__(self, template: Template[Loaded]) -> None:
        self.answered = 0
        self.spoilt = False
        self.watch: asyncio.Handle  # of its check
        self._template = template
        self._process: TemplateWorker | None = None
        self._absence = "it was never started"

    @property
    def fresh(self) -> bool:
        return self.answered == 0

    @property
    def ended(self) -> bool:
        return self._process is not None and self._process.ended

    async def start(self) -> None:
        self.answered, self.spoilt = 0, False
        try:
            self._process = await self._template.spawn()
        except VerifierError as error:
            self._absence = str(error)
            raise

    async def ask(self, job_id: int, job: str, allowance: float | None, timeout: float) -> "_Checked":
        """The answer to a job; `OutOfTimeError` or `WorkerDied` mean that the worker must be replaced."""
        if self._process is None:
            raise WorkerDied(self._absence)
        head = json.dumps({"id": job_id, "allowance": allowance})
        try:
            reply = await self._process.ask(f"{head[:-1]}, {job[1:]}\n".encode(), job_id, timeout)
            scores = reply["scores"]
            checked = _Checked(None if scores is None else [Score(**each) for each in scores], reply["seconds"])
            self.answered += 1
            self.spoilt = reply["spoilt"]
            return checked
        except EOFError:
            raise WorkerDied(await self._process.post_mortem() if self._process else self._absence) from None

    def owes(self, seconds: float) -> float:
        return self._process.owes(seconds) if self._process is not None else 0.0

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
