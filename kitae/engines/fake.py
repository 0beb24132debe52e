"""A deterministic engine without a model, for testing environments, verifiers and pipelines in milliseconds.

    engine = FakeEngine(lambda request: tokenizer.encode("42"))
    engine = FakeEngine(lambda request: (7,) * 512, Pace(step=0.0016, sequence=6.4e-6, prefill=150_000))

It keeps the contract of `Engine`: versions, pause, suspend, abort, per-request errors and, with a receiver, weights. It
knows no text, so stop strings are ignored, and it scores nothing.

Its work costs an event for each change of what runs, not for each token: between two changes all steps take equally
long, so the next sequence to end and the moment of that are known.
"""

import asyncio
import heapq
import itertools
import math
import random
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kitae.clock import now
from kitae.engines.base import Capabilities, Completion, EngineStats, Request, Sampled, WeightUpdate
from kitae.errors import EngineError, RequestError, WeightsDamaged
from kitae.types import FinishReason

if TYPE_CHECKING:
    from kitae.weights.base import Receiver
    from kitae.weights.probe import Probe

_EPSILON = 1e-6  # of a step: what rounding may take from it


@dataclass(frozen=True, slots=True)
class Pace:
    """How long the engine takes, in seconds: `Pace(step=0.0016, sequence=6.4e-6, prefill=150_000, update=0.5)`.

    step, sequence: a decoding step of n sequences takes `step + n × sequence`.
    prefill: prompt tokens a second; decoding waits meanwhile. Prompts with the same share key are computed once.
    batch: most sequences at a time; the others wait.
    update: it stands still so long for new weights.
    life, restart: it dies after `life` on average, and is back after `restart`. Its requests go on where they were,
    after their contexts were computed anew.
    """

    step: float = 0.0
    sequence: float = 0.0
    prefill: float = math.inf
    batch: int = 1 << 30
    update: float = 0.0
    life: float = math.inf
    restart: float = 0.0


@dataclass(slots=True, eq=False)
class _Flight:
    """A request being answered. Its next token is drawn at the step `joined + 1` of the engine's count."""

    request: Request
    planned: Sequence[int]
    finish: FinishReason
    future: "asyncio.Future[Completion]"
    joined: float | None = None  # None: it waits

    @property
    def prior(self) -> int:
        return len(self.request.prior.tokens)

    def drawn(self, steps: float) -> int:
        """New tokens after so many steps of the engine."""
        return 0 if self.joined is None else math.floor(steps - self.joined + _EPSILON)


class FakeEngine:
    """Answers every request with `respond(request)` at the given pace; log-probs are all -1.

    `respond` may raise `RequestError`. The answer is cut at max_tokens (finish "length") and after the first stop
    token (finish "stop"); without either it also ends with "stop". `seed` is that of its failures. `receiver` fetches
    the weights that it is sent; its answers do not depend on them.
    """

    def __init__(
        self,
        respond: Callable[[Request], Sequence[int]],
        pace: Pace | None = None,
        *,
        version: int = 0,
        seed: int = 0,
        shares_weights: bool = True,
        receiver: "Receiver | None" = None,
    ) -> None:
        self.capabilities = Capabilities(shares_weights=shares_weights, stop_strings=False)
        self._receiver = receiver
        self._broken = False  # weights did not arrive whole: no step with these
        self._respond = respond
        self._pace = pace or Pace()
        self._flights: dict[str, _Flight] = {}
        self._waiting: deque[_Flight] = deque()
        self._running: set[_Flight] = set()
        self._ends: list[tuple[float, int, _Flight]] = []  # a heap: the step at which each is complete
        self._numbers = itertools.count()
        self._sharing: Counter[str] = Counter()  # running requests of each key
        self._marks = [(-math.inf, version)]  # from which step on each version was served
        self._steps = 0.0
        self._since = now()  # what `_steps` is up to
        self._absent = 0.0  # seconds in which it will be dead or loading weights
        self._owed = 0.0  # seconds of prefill to do
        self._random = random.Random(seed)
        self._dies = self._since + self._lifetime()
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False
        self._closed = False
        self._prompt_tokens = self._shared_tokens = self._finished_tokens = self._restarts = 0
        self._busy = 0.0

    async def generate(self, request: Request) -> Completion:
        self._check_open()
        if not request.prompt_tokens:
            raise RequestError(f"request {request.id!r}: the prompt is empty")
        if request.id in self._flights:
            raise RequestError(f"request id {request.id!r} is in flight already")
        planned, finish = _plan(self._respond(request), request)
        flight = _Flight(request, planned, finish, asyncio.get_running_loop().create_future())
        self._flights[request.id] = flight
        self._waiting.append(flight)
        self._move()
        try:
            return await flight.future
        finally:
            if self._flights.get(request.id) is flight:  # its caller is gone
                self._leave(flight)
                self._move()

    async def update_weights(self, update: WeightUpdate) -> int:
        self._check_open()
        self._advance()
        self._fetch(update)
        if self._pace.update:
            self._absent += self._pace.update
            self._move()
            await asyncio.sleep(self._absent)
            self._advance()
        self._marks.append((self._steps, update.version))
        if update.recompute:
            self._owed += self._contexts(self._running) / self._pace.prefill
        self._move()
        return update.version

    def _fetch(self, update: WeightUpdate) -> None:
        if update.manifest is not None and self.capabilities.shares_weights:
            raise EngineError(f"weight update {update.version} must have no manifest: the engine shares the trainer's")
        if self._receiver is None or update.manifest is None:
            return
        damaged = self._receiver.fetch(update.manifest)
        self._broken = bool(damaged)
        if damaged:
            self._move()
            raise WeightsDamaged(f"version {update.version} did not arrive whole: damaged are buckets {list(damaged)}")

    async def probe(self) -> "tuple[Probe, ...]":
        self._check_open()
        return ()

    async def pause(self) -> None:
        self._check_open()
        self._advance()
        self._paused = True
        self._move()

    async def resume(self) -> None:
        self._check_open()
        self._advance()
        self._paused = False
        self._move()

    async def abort(self, request_id: str) -> None:
        self._check_open()
        if request_id in self._flights:
            self._end_early([self._flights[request_id]], "abort")

    async def suspend(self) -> None:
        self._check_open()
        self._end_early(list(self._flights.values()), "suspended")

    def progress(self, known: Mapping[str, int]) -> dict[str, Sampled]:
        self._advance()
        return {id: self._sampled(flight).after(known.get(id, 0)) for id, flight in self._flights.items()}

    def stats(self) -> EngineStats:
        self._advance()
        return EngineStats(
            version=self._marks[-1][1],
            prompt_tokens=self._prompt_tokens,
            prompt_tokens_shared=self._shared_tokens,
            generated_tokens=self._finished_tokens + sum(f.drawn(self._steps) for f in tuple(self._running)),
            preemptions=0,
            running=len(self._running),
            waiting=len(self._waiting),
            busy_seconds=self._busy,
            restarts=self._restarts,
            repaired=0 if self._receiver is None else self._receiver.repaired,
        )

    async def close(self) -> None:
        self._closed = True
        for flight in list(self._flights.values()):
            self._leave(flight)
            if not flight.future.done():
                flight.future.set_exception(EngineError("the engine was closed"))
        self._move()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")

    # Time.

    @property
    def _rests(self) -> bool:
        return self._paused or self._broken

    def _move(self) -> None:
        """After any change: answer what is complete, let others begin, and come back when the next one is."""
        self._advance()
        while self._ends and (self._ends[0][2] not in self._running or self._ends[0][0] <= self._steps + _EPSILON):
            flight = heapq.heappop(self._ends)[2]
            if flight in self._running:
                self._settle(flight, flight.finish)
        while self._waiting and len(self._running) < self._pace.batch:
            self._join(self._waiting.popleft())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running and not self._rests:
            left = self._absent + self._owed + (self._ends[0][0] - self._steps) * self._step_seconds
            when = min(self._since + left, self._dies)
            self._timer = asyncio.get_running_loop().call_at(when, self._move)

    def _advance(self) -> None:
        """Count the steps made up to now, deaths included. A thread that looks on sees what the last event left."""
        try:
            present = asyncio.get_running_loop().time()
        except RuntimeError:
            return
        while True:
            until = min(present, self._dies)
            self._work(until - self._since)
            self._since = until
            if self._dies > present:
                return
            self._restarts += 1
            self._absent = self._pace.restart
            self._owed = self._contexts(self._running) / self._pace.prefill
            self._dies = until + self._pace.restart + self._lifetime()

    def _work(self, seconds: float) -> None:
        absent = min(self._absent, seconds)
        self._absent -= absent
        if self._rests or not self._running:
            return
        prefill = min(self._owed, seconds - absent)
        self._owed -= prefill
        rest, each = seconds - absent - prefill, self._step_seconds
        while self._ends[0][2] not in self._running:
            heapq.heappop(self._ends)
        steps = max(0.0, self._ends[0][0] - self._steps)  # a timer that is late draws no more tokens than planned
        if each:
            steps = min(steps, rest / each)
        elif self._absent or self._owed:
            steps = 0.0
        self._steps += steps
        self._busy += prefill + steps * each

    @property
    def _step_seconds(self) -> float:
        return self._pace.step + self._pace.sequence * len(self._running)

    def _lifetime(self) -> float:
        return self._random.expovariate(1 / self._pace.life) if self._pace.life < math.inf else math.inf

    # Flights.

    def _join(self, flight: _Flight) -> None:
        prompt, share = len(flight.request.prompt_tokens), flight.request.share
        if share and self._sharing[share]:
            self._shared_tokens += prompt
            prompt = 0
        self._prompt_tokens += prompt
        self._sharing[share] += 1
        self._owed += (prompt + flight.prior) / self._pace.prefill
        flight.joined = self._steps
        self._running.add(flight)
        left = max(0, len(flight.planned) - flight.prior)
        heapq.heappush(self._ends, (self._steps + left, next(self._numbers), flight))
        if not left:
            self._settle(flight, flight.finish)

    def _end_early(self, flights: Iterable[_Flight], finish: FinishReason) -> None:
        self._advance()
        for flight in flights:
            self._settle(flight, finish)
        self._move()

    def _settle(self, flight: _Flight, finish: FinishReason) -> None:
        found = self._sampled(flight)
        self._leave(flight)
        if not flight.future.done():
            flight.future.set_result(
                Completion(flight.request.id, found.tokens, found.logprobs, found.versions, finish)
            )

    def _sampled(self, flight: _Flight) -> Sampled:
        new, prior = flight.drawn(self._steps), flight.request.prior
        tokens = (*prior.tokens, *flight.planned[flight.prior : flight.prior + new])
        return Sampled(tokens, (-1.0,) * len(tokens), (*prior.versions, *self._versions(flight, new)))

    def _leave(self, flight: _Flight) -> None:
        del self._flights[flight.request.id]
        if flight.joined is None:
            self._waiting.remove(flight)
            return
        self._finished_tokens += flight.drawn(self._steps)
        self._running.discard(flight)
        self._sharing[flight.request.share] -= 1
        if not self._sharing[flight.request.share]:
            del self._sharing[flight.request.share]

    def _versions(self, flight: _Flight, new: int) -> list[int]:
        """Of its new tokens: each has the version that was served when its step ended."""
        assert flight.joined is not None or not new
        found: list[int] = []
        first = 0 if flight.joined is None else bisect_right(self._marks, (flight.joined, math.inf)) - 1
        marks = self._marks[first:]
        for (_, version), (end, _) in itertools.pairwise([*marks, (math.inf, 0)]):
            drawn = new if end == math.inf else min(new, flight.drawn(end))
            found += [version] * (drawn - len(found))
        return found

    def _contexts(self, flights: Iterable[_Flight]) -> int:
        """Tokens to compute for them if nothing is in the cache."""
        prompts = {f.request.share or f.request.id: len(f.request.prompt_tokens) for f in flights}
        return sum(prompts.values()) + sum(f.prior + f.drawn(self._steps) for f in flights)


def _plan(answer: Sequence[int], request: Request) -> tuple[Sequence[int], FinishReason]:
    limit, stops = request.sampling.max_tokens, request.sampling.stop_tokens
    planned = answer[:limit]
    for position, token in enumerate(planned) if stops else ():
        if token in stops:
            return planned[: position + 1], "stop"
    return planned, "length" if len(planned) == limit else "stop"
