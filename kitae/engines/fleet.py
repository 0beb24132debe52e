"""Several engines as one, which join and leave while it serves: requests are shared out among them, everything else is
for all of them.

    request ──► the idlest engine ── done ─────────────────────────────► completion
                    ▲                 │ suspended: its engine leaves, or is lost
                    └── continued ◄───┘
                        from what it has, on another engine; where there is none it waits for one

A request ends once: an engine that has suspended one, or is lost, is never heard again.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from kitae.engines.base import Capabilities, Completion, Engine, EngineStats, Request, Sampled, WeightUpdate
from kitae.engines.requests_in_flight import Ending
from kitae.errors import EngineError, EngineLost, RequestError, WeightsDamaged

if TYPE_CHECKING:
    from kitae.weights.probe import Probe

T = TypeVar("T")

_MOST_SESSIONS = 100_000  # that are remembered
_FAREWELLS, _MOMENT = 100, 0.05  # times, and seconds between them, that an engine which leaves is asked to suspend

log = logging.getLogger("kitae")


@dataclass(eq=False, slots=True)
class _Member:
    """An engine of the fleet; busy: of its seconds, those that are accounted for."""

    engine: Engine
    load: int = 0
    busy: float = 0.0


@dataclass(eq=False, slots=True)
class _Stay:
    """A request in flight: what it would be continued from, where it is now, and what it was asked to end with."""

    request: Request
    member: _Member | None = None
    ending: Ending | None = None


class Fleet:
    """Implements `kitae.engines.base.Engine` over `engines`, which all share the trainer's weights or none does.

    A request goes to the engine that has the fewest; but requests with the same share key go where the first of them
    went while any of them is in flight, so that their prompt is computed once, and those of a session where its last
    went. `busy_seconds` of its stats is the mean of the engines that there were, so that it is a share of the time that
    passed; other counters are sums, over engines that have left too. It can do what all of those can that it begins
    with. An update goes to all at the same time; if it reaches some damaged, those stand still and it must be repeated.

    An engine that raises `EngineLost` is out, and is closed; the others go on. A fleet that has none left keeps its
    requests for `patience` seconds, in which one must `join`, and fails them then.
    """

    def __init__(self, engines: Sequence[Engine], patience: float = 300.0) -> None:
        if not engines:
            raise EngineError("a fleet needs at least 1 engine, got 0")
        found = [engine.capabilities for engine in engines]
        if len({c.shares_weights for c in found}) > 1:
            raise EngineError("all engines of a fleet must share the trainer's weights, or none, got both kinds")
        self.capabilities = Capabilities(
            shares_weights=found[0].shares_weights,
            scores=all(c.scores for c in found),
            seeded=all(c.seeded for c in found),
            stop_strings=all(c.stop_strings for c in found),
        )
        self.lost = 0  # engines
        self._patience = patience
        self._members = [_Member(engine) for engine in engines]
        self._homes: dict[str, _Member] = {}  # where requests with a share key go
        self._sharing: Counter[str] = Counter()
        self._stays: dict[str, _Stay] = {}
        self._sessions: OrderedDict[str, _Member] = OrderedDict()  # where the last request of a session went
        self._past = EngineStats(engines[0].stats().version, 0, 0, 0, 0, 0, 0, 0.0)  # of engines that are gone
        self._last_loss = ""
        self._paused = self._closed = False
        self._changed = asyncio.Event()
        self._retiring: set[asyncio.Task[None]] = set()

    @property
    def engines(self) -> tuple[Engine, ...]:
        return tuple(member.engine for member in self._members)

    # Joining and leaving.

    async def join(self, engine: Engine) -> None:
        """It serves from now on. Whoever lets it join has made sure that it has the weights that the others have."""
        if self._closed:
            raise EngineError("the engine is closed")
        if engine.capabilities.shares_weights != self.capabilities.shares_weights:
            raise EngineError("all engines of a fleet must share the trainer's weights, or none, got both kinds")
        if self.capabilities.scores and not engine.capabilities.scores:
            raise EngineError("an engine that joins must score the probe as the others do, got one that does not")
        if self._paused:
            await engine.pause()
        self._account()
        self._members.append(_Member(engine, busy=engine.stats().busy_seconds))
        if not self._paused:
            await engine.resume()
        self._tell()

    async def leave(self, engine: Engine) -> None:
        """Its requests go on elsewhere, from what they have; then it is closed."""
        member = next((m for m in self._members if m.engine is engine), None)
        if member is None:
            raise EngineError("an engine that leaves must be one of the fleet, got another")
        if len(self._members) == 1:
            raise EngineError("the last engine of a fleet cannot leave")
        self._remove(member)
        with suppress(EngineLost):  # and its requests with it: they go on too
            for _ in range(_FAREWELLS):
                await engine.suspend()
                if not member.load:
                    break
                await asyncio.sleep(_MOMENT)
        await engine.close()

    def _remove(self, member: _Member) -> None:
        self._account()
        stats = member.engine.stats()
        self._past = _add(self._past, stats)
        self._members.remove(member)
        self._homes = {key: home for key, home in self._homes.items() if home is not member}
        for session in [session for session, home in self._sessions.items() if home is member]:
            del self._sessions[session]

    def _lose(self, member: _Member, why: str) -> None:
        """Once for each engine, whoever notices first."""
        if member not in self._members:
            return
        self._remove(member)
        self.lost += 1
        self._last_loss = why
        log.warning("an engine was lost, %d are left: %s", len(self._members), why)
        self._aside(member.engine.close())
        self._tell()

    def _aside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    def _tell(self) -> None:
        """Those who wait for an engine."""
        self._changed.set()
        self._changed = asyncio.Event()

    # The face.

    async def generate(self, request: Request) -> Completion:
        if request.id in self._stays:
            raise RequestError(f"request id {request.id!r} is in flight already")
        key = request.share or f"request {request.id}"
        stay = self._stays[request.id] = _Stay(request)
        self._sharing[key] += 1
        try:
            while True:
                done = await self._try(stay, key)
                if done is not None:
                    return done
        finally:
            del self._stays[request.id]
            self._sharing[key] -= 1
            if not self._sharing[key]:
                del self._sharing[key]
                self._homes.pop(key, None)

    async def _try(self, stay: _Stay, key: str) -> Completion | None:
        """The completion, or nothing: it must go on elsewhere."""
        if not self._members:
            await self._wait(stay)
        if stay.ending is not None:
            prior, experts = stay.request.prior, stay.request.prior_experts
            return Completion(stay.request.id, prior.tokens, prior.logprobs, prior.versions, stay.ending, experts)
        member = stay.member = self._choose(stay.request, key)
        member.load += 1
        try:
            done = await member.engine.generate(stay.request)
        except EngineLost as error:
            self._lose(member, str(error))
            return None
        except RequestError:
            raise
        except EngineError:
            if member in self._members:
                raise
            return None  # it has left, and was closed before it could tell what it had
        finally:
            member.load -= 1
            stay.member = None
        if done.finish != "suspended" or stay.ending is not None:
            return done
        experts = stay.request.prior_experts if done.experts is None else done.experts
        stay.request = replace(stay.request, prior=done.sampled, prior_experts=experts)
        self._lose(member, "it gave up what it was sampling")  # unless it was asked to leave
        return None

    async def _wait(self, stay: _Stay) -> None:
        """Until there is an engine, or the request is to end."""
        try:
            async with asyncio.timeout(self._patience):
                while not self._members and stay.ending is None and not self._closed:
                    await self._changed.wait()
        except TimeoutError:
            raise EngineError(
                f"no engine is left, and none was found within {self._patience:g} s; the last was lost: "
                f"{self._last_loss}"
            ) from None
        if self._closed:
            raise EngineError("the engine was closed")

    def _choose(self, request: Request, key: str) -> _Member:
        known = self._sessions.pop(request.session, None)
        member = self._homes.get(key) or known or min(self._members, key=lambda member: member.load)
        self._homes[key] = member
        if request.session:
            self._sessions[request.session] = member
            if len(self._sessions) > _MOST_SESSIONS:
                self._sessions.popitem(last=False)
        return member

    async def update_weights(self, update: WeightUpdate) -> int:
        versions = set(await self._all(lambda engine: engine.update_weights(update)))
        if len(versions) > 1:
            raise EngineError(f"all engines of a fleet must serve version {update.version}, got {sorted(versions)}")
        served = versions.pop() if versions else update.version  # one that joins has it
        self._past = replace(self._past, version=served)
        return served

    async def probe(self) -> "tuple[Probe, ...]":
        return tuple(probe for found in await self._all(lambda engine: engine.probe()) for probe in found)

    async def pause(self) -> None:
        self._paused = True
        await self._all(lambda engine: engine.pause())

    async def resume(self) -> None:
        self._paused = False
        await self._all(lambda engine: engine.resume())

    async def abort(self, request_id: str) -> None:
        stay = self._stays.get(request_id)
        if stay is None:
            return
        stay.ending = "abort"
        if stay.member is None:
            self._tell()
            return
        try:
            await stay.member.engine.abort(request_id)
        except EngineLost as error:
            self._lose(stay.member, str(error))

    async def suspend(self) -> None:
        for stay in self._stays.values():
            stay.ending = "suspended"
        self._tell()
        await self._all(lambda engine: engine.suspend())

    def progress(self, known: Mapping[str, int]) -> dict[str, Sampled]:
        between = {
            id: stay.request.prior.after(known.get(id, 0)) for id, stay in self._stays.items() if stay.member is None
        }
        return between | {id: news for engine in self.engines for id, news in engine.progress(known).items()}

    def stats(self) -> EngineStats:
        """Any thread may ask, as a watchdog does: nothing changes by it."""
        members, total = tuple(self._members), self._past
        found = [member.engine.stats() for member in members]
        busy = total.busy_seconds + _mean_busy(members, found)
        for each in found:
            total = _add(total, each)
        between = sum(stay.member is None for stay in list(self._stays.values()))
        return replace(
            total,
            version=min((s.version for s in found), default=self._past.version),
            running=sum(s.running for s in found),
            waiting=sum(s.waiting for s in found) + between,
            restarts=total.restarts + self.lost,
            engines=sum(s.engines for s in found),
            busy_seconds=busy,
        )

    def _account(self) -> None:
        """For the busy seconds so far, before there are more engines, or fewer."""
        found = [member.engine.stats() for member in self._members]
        busy = self._past.busy_seconds + _mean_busy(self._members, found)
        for member, stats in zip(self._members, found, strict=True):
            member.busy = stats.busy_seconds
        self._past = replace(self._past, busy_seconds=busy)

    async def close(self) -> None:
        self._closed = True
        self._tell()
        await self._all(lambda engine: engine.close())
        await asyncio.gather(*self._retiring, return_exceptions=True)

    async def _all(self, ask: Callable[[Engine], Awaitable[T]]) -> list[T]:
        """Every result but those of engines that are lost; if some fail, the first error, after all have ended: none is
        left half done. Damaged weights, which can be sent again, come after errors that cannot be helped."""
        asked = list(self._members)
        found = await asyncio.gather(*(ask(member.engine) for member in asked), return_exceptions=True)
        for member, result in zip(asked, found, strict=True):
            if isinstance(result, EngineLost):
                self._lose(member, str(result))
        errors = [each for each in found if isinstance(each, BaseException) and not isinstance(each, EngineLost)]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, WeightsDamaged))
        return [result for result in found if not isinstance(result, BaseException)]


def _mean_busy(members: Sequence[_Member], found: Sequence[EngineStats]) -> float:
    """Of the seconds that are not accounted for."""
    busy = sum(stats.busy_seconds - member.busy for member, stats in zip(members, found, strict=True))
    return busy / max(1, len(members))


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
