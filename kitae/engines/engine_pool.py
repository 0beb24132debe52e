"""Engines of one kind as one engine, which join, leave and are lost while it serves.

    request ──► an engine of the pool ── done ─────────────────────────────► completion
                    ▲                      │ suspended: its engine leaves, or is lost
                    └── continued ◄────────┘
                        from what it has, on another engine; where there is none it waits for one

Who gets a request, and who replaces a lost engine, is decided in `kitae.workers.pool`. Here is what only engines have:
requests that are continued from the tokens they have, versions, pauses, and counters over engines that are gone.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kitae.engines.base import (
    AnswerCheck,
    Capabilities,
    Completion,
    Engine,
    EngineStats,
    Request,
    Sampled,
    WeightUpdate,
)
from kitae.engines.requests_in_flight import Ending
from kitae.errors import EngineError, EngineLost, KitaeError, RequestError, WeightsDamaged
from kitae.workers.pool import Membership, Replacement, WorkerPool

if TYPE_CHECKING:
    from kitae.weights.probe import Probe

_MOST_REMEMBERED = 100_000  # rollouts
_DRAINS, _MOMENT = 100, 0.05  # times, and seconds between them, that an engine which leaves is asked to suspend
_MIXED = "all engines of a pool must share the trainer's weights, or none, got both kinds"


@dataclass(eq=False, slots=True)
class _InFlight:
    """A request, with what it would be continued from; the engine that works on it; what it was asked to end with."""

    request: Request
    engine: Engine | None = None
    ending: Ending | None = None


class EnginePool(WorkerPool[Engine]):
    """Implements `kitae.engines.base.Engine` over engines that all share the trainer's weights, or none does.

        pool = EnginePool(make, 4, patience=300)   # make(number) gives an engine that serves what was published last
        await pool.start()

    Requests with the same share key go to the same engine while any of them is in flight, so that their prompt is
    computed once; those of a session go where its last one went; all others go to the engine with the fewest. A weight
    update goes to all engines at the same time. If it reaches some damaged, those stand still and it must be repeated.

    check: judges each answer, where the engines are not trusted. One that fails is lost with all that it gave: nothing
    is used that was not judged, so what it reported of a request in flight, or a lost one did, is sampled again.

    `busy_seconds` of its stats is the mean of the engines that there were, so it is a share of the time that passed.
    Other counters are sums, also over engines that are gone.
    """

    what = "engine"
    whole = "engine"
    error = EngineError

    def __init__(
        self,
        make: Callable[[int], Awaitable[Engine]] | None,
        size: int,
        *,
        version: int = 0,
        patience: float = 300.0,
        replacement: Replacement | None = None,
        note: Callable[[str], None] | None = None,
        at_end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(make, size, patience=patience, replacement=replacement, note=note, at_end=at_end)
        self.check: AnswerCheck | None = None
        self._out: set[str] = set()  # names of engines that failed the check
        self.withdrawn: set[str] = set()  # see `kitae.engines.base.Provable`
        self._answered: OrderedDict[str, frozenset[str]] = OrderedDict()  # names of engines, by rollout
        self._requests: dict[str, _InFlight] = {}
        self._past = EngineStats(version, 0, 0, 0, 0, 0, 0, 0.0)  # of engines that are gone
        self._busy: dict[Engine, float] = {}  # seconds of each engine that are part of `_past`
        self._paused = False
        self._capabilities: Capabilities | None = None
        self._arrivals: list[Engine | WeightsDamaged] = []  # that were started since the last update began
        self._short = False  # an update has lost all engines, and waits for one

    @classmethod
    def of(cls, engines: Sequence[Engine], patience: float = 300.0) -> "EnginePool":
        """A pool of engines that run already; none is started in place of one that is lost."""
        if not engines:
            raise EngineError("a pool needs at least 1 engine, got 0")
        found = [engine.capabilities for engine in engines]
        if len({c.shares_weights for c in found}) > 1:
            raise EngineError(_MIXED)
        pool = cls(None, len(engines), version=engines[0].stats().version, patience=patience)
        pool._capabilities = Capabilities(
            shares_weights=found[0].shares_weights,
            scores=all(c.scores for c in found),
            seeded=all(c.seeded for c in found),
            stop_strings=all(c.stop_strings for c in found),
        )
        for number, engine in enumerate(engines):
            pool._serve(engine, number)
        return pool

    @property
    def capabilities(self) -> Capabilities:
        """What all engines can do that it began with."""
        assert self._capabilities is not None, "an engine pool must be started first"
        return self._capabilities

    # Engines come and go.

    async def _started(self, number: int) -> Engine:
        """Known before it is admitted, which may wait for the end of an update that has lost all other engines."""
        try:
            engine = await super()._started(number)
            self._arrivals.append(engine)
            return engine
        except WeightsDamaged as error:
            self._arrivals.append(error)
            raise
        finally:
            self._wake()

    def _counts(self, error: KitaeError) -> bool:
        return not (self._short and isinstance(error, WeightsDamaged))  # the update sends them again

    async def _prepare(self, engine: Engine) -> None:
        found, known = engine.capabilities, self._capabilities
        if known is not None and found.shares_weights != known.shares_weights:
            raise EngineError(_MIXED)
        if known is not None and known.scores and not found.scores:
            raise EngineError("an engine that joins must score the probe as the others do, got one that does not")
        self._capabilities = known or found
        if self._paused:
            await engine.pause()

    async def _welcome(self, engine: Engine) -> None:
        self._busy[engine] = engine.stats().busy_seconds
        if not self._paused:
            await engine.resume()

    def _before_change(self) -> None:
        """Account for the busy seconds so far, which are a mean over the engines that there are."""
        self._past = replace(self._past, busy_seconds=self._past.busy_seconds + self._mean_busy(self.members))
        self._busy = {engine: engine.stats().busy_seconds for engine in self.members}

    def _before_leave(self, engine: Engine) -> None:
        self._past = _add(self._past, engine.stats())
        self._busy.pop(engine, None)

    async def _drain(self, place: Membership[Engine]) -> None:
        for _ in range(_DRAINS):
            await place.member.suspend()
            if not place.load:
                break
            await asyncio.sleep(_MOMENT)

    # Requests.

    async def generate(self, request: Request) -> Completion:
        self.check_open()
        if request.id in self._requests:
            raise RequestError(f"request id {request.id!r} is in flight already")
        flight = self._requests[request.id] = _InFlight(request)
        try:
            while True:
                await self.some(lambda: flight.ending is None)
                done = await self._try(flight) if flight.ending is None else _ended(flight.request, flight.ending)
                if done is not None:
                    return done
        finally:
            del self._requests[request.id]

    async def _try(self, flight: _InFlight) -> Completion | None:
        """The completion; None: the request must go on elsewhere."""
        served = self._past.version
        try:
            with self.use(flight.request.share, flight.request.session) as engine:
                flight.engine = engine
                done = await engine.generate(flight.request)
            if self.check is not None:
                done = await self._judged(getattr(engine, "name", "an engine"), engine, flight, done, served)
        except EngineLost:
            return None
        except RequestError:
            raise
        except EngineError:
            if self._closed or engine in self.members:
                raise
            return None  # it has left, and was closed before it could send what it had
        finally:
            flight.engine = None
        if len(done.tokens) > len(flight.request.prior.tokens):
            self._remember(flight.request.id, engine)
        if done.finish != "suspended" or flight.ending is not None:
            return done
        experts = flight.request.prior_experts if done.experts is None else done.experts
        flight.request = replace(flight.request, prior=done.sampled, prior_experts=experts)
        self.lose(engine, "it gave up what it was sampling")  # unless it was asked to leave
        return None

    async def _judged(self, name: str, engine: Engine, flight: _InFlight, done: Completion, served: int) -> Completion:
        """The answer if it is in order. Otherwise the engine is out; `EngineLost` where the request must go on
        elsewhere from what it had."""
        assert self.check is not None, "a pool judges answers when it has been given a check"
        request = flight.request
        if done.finish in ("suspended", "abort") and done.proof is None:  # as its owner has it from reports
            done = _ended(request, done.finish)
        why = await self.check.examine(request, done, served)
        if why and name not in self._out:
            self._out.add(name)
            answered = [rollout for rollout, names in self._answered.items() if name in names]
            self.withdrawn.update(answered)
            for rollout in answered:
                del self._answered[rollout]
            self.lose(engine, why)
            try:
                await self.check.refused(name, why, answered)
            except EngineError as error:  # of the run, not of this engine
                self._failure = error
                self._wake()
        if name not in self._out:
            return done
        if flight.ending is not None:
            return _ended(request, flight.ending)
        raise EngineLost(f"{name} is out")

    def _remember(self, request_id: str, engine: Engine) -> None:
        rollout, name = request_id.rpartition("/")[0], getattr(engine, "name", "")
        if rollout and name:
            self._answered[rollout] = self._answered.pop(rollout, frozenset()) | {name}
            if len(self._answered) > _MOST_REMEMBERED:
                self._answered.popitem(last=False)

    def sources(self, rollout: str) -> frozenset[str]:
        """See `kitae.engines.base.Accountable`."""
        return self._answered.get(rollout, frozenset())

    async def refuse(self, source: str, why: str) -> None:
        for engine in self.members:
            if getattr(engine, "name", "") == source:
                self.lose(engine, why)

    async def abort(self, request_id: str) -> None:
        self.check_open()
        flight = self._requests.get(request_id)
        if flight is not None:
            flight.ending = "abort"
            self._wake()
            if flight.engine is not None:
                with suppress(EngineLost):
                    await flight.engine.abort(request_id)

    async def suspend(self) -> None:
        self.check_open()
        for flight in self._requests.values():
            flight.ending = "suspended"
        self._wake()
        await self.broadcast(lambda engine: engine.suspend())

    def progress(self, known: Mapping[str, int]) -> dict[str, Sampled]:
        between = {
            id: flight.request.prior.after(known.get(id, 0))
            for id, flight in self._requests.items()
            if flight.engine is None
        }
        if self.check is not None:  # reports are not judged
            return between
        return between | {id: news for engine in self.members for id, news in engine.progress(known).items()}

    # Everything else is for all engines.

    async def update_weights(self, update: WeightUpdate) -> int:
        self.check_open()
        self._arrivals.clear()
        versions = set(await self.broadcast(lambda engine: engine.update_weights(update)))
        while not versions and self._make is not None:
            versions = await self._update_one_more(update)
        if len(versions) > 1:
            raise EngineError(f"all engines of a pool must serve version {update.version}, got {sorted(versions)}")
        served = versions.pop() if versions else update.version  # one that joins has it
        self._past = replace(self._past, version=served)
        return served

    async def _update_one_more(self, update: WeightUpdate) -> set[int]:
        """All engines were lost over an update, so nobody has said whether it can be loaded: ask one that takes their
        place. Nothing is returned if that is lost as well."""
        self._short = True
        try:
            await self.some(lambda: not self._arrivals)
        finally:
            self._short = False
        if self._places:
            return set(await self.broadcast(lambda engine: engine.update_weights(update)))
        match self._arrivals.pop():
            case WeightsDamaged() as error:
                raise error
            case engine:
                with suppress(EngineLost):
                    return {await engine.update_weights(update)}
        return set()

    def _worst(self, errors: Sequence[BaseException]) -> BaseException:
        """Damaged weights can be sent again, so errors that cannot be helped come first."""
        return min(errors, key=lambda error: isinstance(error, WeightsDamaged))

    async def probe(self) -> "tuple[Probe, ...]":
        self.check_open()
        return tuple(probe for found in await self.broadcast(lambda engine: engine.probe()) for probe in found)

    async def pause(self) -> None:
        self.check_open()
        self._paused = True
        await self.broadcast(lambda engine: engine.pause())

    async def resume(self) -> None:
        self.check_open()
        self._paused = False
        await self.broadcast(lambda engine: engine.resume())

    def stats(self) -> EngineStats:
        """Any thread may ask, as a watchdog does: nothing changes by it."""
        engines, total = self.members, self._past
        found = [engine.stats() for engine in engines]
        busy = total.busy_seconds + self._mean_busy(engines)
        for each in found:
            total = _add(total, each)
        between = sum(flight.engine is None for flight in list(self._requests.values()))
        return replace(
            total,
            version=min((s.version for s in found), default=self._past.version),
            running=sum(s.running for s in found),
            waiting=sum(s.waiting for s in found) + between,
            restarts=total.restarts + self.losses,
            engines=sum(s.engines for s in found),
            busy_seconds=busy,
        )

    def _mean_busy(self, engines: Sequence[Engine]) -> float:
        """Of the seconds that are not part of `_past`."""
        busy = sum(engine.stats().busy_seconds - self._busy.get(engine, 0.0) for engine in engines)
        return busy / max(1, len(engines))


def _ended(request: Request, ending: Ending) -> Completion:
    """A request that no engine works on ends with what it has."""
    prior = request.prior
    return Completion.of(request.id, prior, ending, request.prior_experts)


def _add(past: EngineStats, more: EngineStats) -> EngineStats:
    """Counters that are sums."""
    return replace(
        past,
        prompt_tokens=past.prompt_tokens + more.prompt_tokens,
        prompt_tokens_shared=past.prompt_tokens_shared + more.prompt_tokens_shared,
        generated_tokens=past.generated_tokens + more.generated_tokens,
        preemptions=past.preemptions + more.preemptions,
        restored=past.restored + more.restored,
        restarts=past.restarts + more.restarts,
        repaired=past.repaired + more.repaired,
    )
