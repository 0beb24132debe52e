"""A run that goes on beside its caller, who takes its steps one at a time: what `kitae.start` returns.

    caller's thread   for step in run ◄── reports ──┐          run.model.generate, run.evaluate, run.stop
    thread of the run the loops ── a step is done ──┘ ── wait until the body of the caller's loop is done ── next step

While the body of `for step in run` works, nothing is trained: the model is that of the step (with
`pipeline.max_staleness` above 0, a step that was under way may end meanwhile). A run that nobody iterates goes on by
itself.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kitae.config.root import Root
from kitae.engines.base import SamplingParams
from kitae.errors import ConfigError, Interrupted
from kitae.observe.observer import Audience, Observer, Reported, Several, Silent
from kitae.offline.loaded_model import Asked, as_messages, check_sampling
from kitae.run.hand_over import HandOver, Live
from kitae.scripting.carry_out import interrupted
from kitae.scripting.run_order import RunOrder
from kitae.store.run_folder import Metrics, Result
from kitae.types import Prompt

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """A step that is done: `Step(3, {"reward": 0.53, "length": 41.0, …})`; numbers: its line in metrics.jsonl."""

    number: int
    numbers: Mapping[str, Any]

    @property
    def reward(self) -> float | None:
        """The mean reward of the step's answers; None in a run that learns from a file."""
        return self.numbers.get("reward")

    @property
    def loss(self) -> float | None:
        return self.numbers.get("loss")

    def __getitem__(self, name: str) -> Any:
        return self.numbers[name]


class LiveModel:
    """The policy of a run, as it is just now."""

    def __init__(self, run: "LiveRun") -> None:
        self._run = run

    def generate(
        self, prompt: Asked, n: int = 1, *, max_tokens: int = 256, temperature: float = 1.0, seed: int = 0
    ) -> list[str]:
        """n answers to one prompt, as those of `kitae.load`."""
        if n < 1:
            raise ConfigError(f"n must be at least 1, got {n}")
        params = SamplingParams(temperature, max_tokens)
        check_sampling(params)
        return self._run.ask(Prompt("ask", as_messages(prompt), None), n, params, seed)


class LiveRun:
    """`run = kitae.start(…)`, then `for step in run: print(step.reward)`. Leaving the loop early stops the run cleanly,
    with a checkpoint.

    model: answers as the policy does now. result: how the run ended, once it has. Ctrl-C in the caller's loop stops it
    too.
    """

    def __init__(self, work: Callable[[HandOver, Audience], Result], audience: Audience, order: RunOrder) -> None:
        self._order = order
        self.model = LiveModel(self)
        self._reports: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._hands = _Hands(self._reports)
        self._done: Future[Result] = Future()
        watching = _Watching(audience, self._hands)

        def run() -> None:
            try:
                self._done.set_result(work(self._hands, watching))
            except BaseException as error:
                self._done.set_exception(error)
            finally:
                self._hands.over()
                self._reports.put(None)

        threading.Thread(target=run, name="kitae-run", daemon=True).start()

    def __iter__(self) -> Iterator[Step]:
        """Each step when it is done. After the last one, what went wrong with the run is raised."""
        self._hands.take_steps()
        try:
            while (step := self._next()) is not None:
                yield step
                self._hands.passed()
        finally:
            self._hands.let_go()
            if not self._done.done():
                self.stop()
        self._done.result()

    def _next(self) -> Step | None:
        try:
            return self._reports.get()
        except KeyboardInterrupt:
            raise self._interrupted() from None

    @property
    def folder(self) -> Path | None:
        """Its run folder, from the moment that there is one."""
        return self._hands.folder

    @property
    def metrics(self) -> list[Row]:
        """The lines of metrics.jsonl so far: steps and evaluations."""
        return Metrics(self.folder / "metrics.jsonl").rows() if self.folder is not None else []

    @property
    def result(self) -> Result:
        """Wait until the run is over, and say how it ended. Raises what went wrong."""
        try:
            return self._done.result()
        except KeyboardInterrupt:
            raise self._interrupted() from None

    def stop(self) -> Result:
        """Stop at the next safe point, with a checkpoint from which `kitae.resume` goes on; wait for that."""
        self._hands.stop()
        return self._done.result()

    def evaluate(self) -> Row | None:
        """The evaluation of the model on what is held out, after the last step that is done; None where nothing is."""
        return self._hands.between_steps()

    def ask(self, prompt: Prompt, n: int, params: SamplingParams, seed: int) -> list[str]:
        live, loop = self._hands.live()
        if live.ask is None:
            raise ConfigError(
                "a run that learns from a file samples nothing while it trains: load its model when it is over, with "
                "kitae.load(run.result)"
            )
        asked = asyncio.run_coroutine_threadsafe(_awaited(live.ask([prompt], n, params, seed)), loop)
        return [str(rollout.text) for rollout in asked.result()[0].rollouts]

    def _interrupted(self) -> Interrupted:
        return interrupted(self.stop(), self._order.functions)


async def _awaited(work: Any) -> Any:
    return await work


class _Hands:
    """The hand-over of steps between the thread of a run, with its event loop, and that of the caller."""

    def __init__(self, reports: "queue.SimpleQueue[Step | None]") -> None:
        self.folder: Path | None = None
        self._reports = reports
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._started = threading.Event()
        self._given = self._passed = 0
        self._stepping = self._stopping = self._over = False
        self._wanted: list[Future[Row | None]] = []  # evaluations

    # In the thread of the run.

    def begun(self, live: Live) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        self._live = live
        self.folder = live.folder
        self._started.set()
        if self._stopping:
            live.stop()

    async def between(self) -> None:
        assert self._wake is not None and self._live is not None
        while True:
            self._wake.clear()
            with self._lock:
                wanted, self._wanted = self._wanted, []
            for future in wanted:
                await self._evaluate(self._live, future)
            if self._wanted:
                continue
            if self._stopping or not self._stepping or self._passed >= self._given:
                return
            await self._wake.wait()

    async def _evaluate(self, live: Live, future: "Future[Row | None]") -> None:
        try:
            future.set_result(await live.evaluate())
        except BaseException as error:
            future.set_exception(error)
            raise

    def report(self, step: Step) -> None:
        self._given += 1
        self._reports.put(step)

    def over(self) -> None:
        with self._lock:
            self._over, wanted = True, self._wanted
        self._started.set()
        for future in wanted:
            future.set_exception(_over())

    # In the caller's thread.

    def take_steps(self) -> None:
        self._stepping = True

    def passed(self) -> None:
        """The body of the caller's loop is done with a step."""
        self._passed += 1
        self._call()

    def let_go(self) -> None:
        self._stepping = False
        self._call()

    def stop(self) -> None:
        self._stopping = True
        if self._live is not None:
            self._call(self._live.stop)
        self._call()

    def between_steps(self) -> Row | None:
        future: Future[Row | None] = Future()
        with self._lock:
            if self._over:
                raise _over()
            self._wanted.append(future)
        self._call()
        return future.result()

    def live(self) -> tuple[Live, asyncio.AbstractEventLoop]:
        self._started.wait()
        if self._over or self._live is None or self._loop is None:
            raise _over()
        return self._live, self._loop

    def _call(self, function: Callable[[], None] | None = None) -> None:
        if self._loop is None or self._wake is None:
            return
        with suppress(RuntimeError):  # its loop is closed: the run is over
            self._loop.call_soon_threadsafe(function or self._wake.set)


def _over() -> ConfigError:
    return ConfigError("the run is over: use kitae.load and kitae.evaluate with run.result")


class _Watching:
    """An audience that hears of the steps too."""

    def __init__(self, audience: Audience, hands: _Hands) -> None:
        self._audience, self._hands = audience, hands

    def note(self, text: str) -> None:
        self._audience.note(text)

    def watch(self, config: Root, folder: Path) -> AbstractContextManager[Observer]:
        return self._watched(config, folder)

    @contextmanager
    def _watched(self, config: Root, folder: Path) -> Iterator[Observer]:
        self._hands.folder = folder
        with self._audience.watch(config, folder) as observer:
            yield Several(observer, _Steps(self._hands))


class _Steps(Silent):
    def __init__(self, hands: _Hands) -> None:
        self._hands = hands

    def step(self, report: Reported) -> None:
        self._hands.report(Step(report.step, MappingProxyType(report.row())))
