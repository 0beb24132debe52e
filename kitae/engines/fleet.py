"""Several engines as one: requests are shared out among them, everything else is for all of them."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from kitae.engines.base import Capabilities, Completion, Engine, EngineStats, Request, Sampled, WeightUpdate
from kitae.errors import EngineError, RequestError, WeightsDamaged

if TYPE_CHECKING:
    from kitae.weights.probe import Probe

T = TypeVar("T")

_MOST_THREADS = 100_000  # that are remembered


class Fleet:
    """Implements `kitae.engines.base.Engine` over `engines`, which all share the trainer's weights or none does.

    A request goes to the engine that has the fewest; but requests with the same share key go where the first of them
    went while any of them is in flight, so that their prompt is computed once, and those of a thread where its last one
    went. `busy_seconds` of its stats is the mean
    of the engines, so that it is a share of the time that passed; other counters are sums. It can do what all of them
    can. An update goes to all at the same time; if it reaches some damaged, those stand still and it must be repeated.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        if not engines:
            raise EngineError("a fleet needs at least 1 engine, got 0")
        found = [engine.capabilities for engine in engines]
        if len({c.shares_weights for c in found}) > 1:
            raise EngineError("all engines of a fleet must share the trainer's weights, or none, got both kinds")
        self.engines = tuple(engines)
        self.capabilities = Capabilities(
            shares_weights=found[0].shares_weights,
            scores=all(c.scores for c in found),
            seeded=all(c.seeded for c in found),
            stop_strings=all(c.stop_strings for c in found),
        )
        self._load = [0] * len(self.engines)
        self._homes: dict[str, int] = {}  # where requests with a share key go
        self._sharing: Counter[str] = Counter()
        self._where: dict[str, int] = {}
        self._threads: OrderedDict[str, int] = OrderedDict()  # where the last request of a thread went

    async def generate(self, request: Request) -> Completion:
        if request.id in self._where:
            raise RequestError(f"request id {request.id!r} is in flight already")
        key = request.share or f"request {request.id}"
        idlest = min(range(len(self._load)), key=self._load.__getitem__)
        place = self._homes.setdefault(key, self._threads.pop(request.thread, idlest))
        if request.thread:
            self._threads[request.thread] = place
            if len(self._threads) > _MOST_THREADS:
                self._threads.popitem(last=False)
        self._where[request.id] = place
        self._load[place] += 1
        self._sharing[key] += 1
        try:
            return await self.engines[place].generate(request)
        finally:
            del self._where[request.id]
            self._load[place] -= 1
            self._sharing[key] -= 1
            if not self._sharing[key]:
                del self._homes[key], self._sharing[key]

    async def update_weights(self, update: WeightUpdate) -> int:
        versions = set(await _all(engine.update_weights(update) for engine in self.engines))
        if len(versions) > 1:
            raise EngineError(f"all engines of a fleet must serve version {update.version}, got {sorted(versions)}")
        return versions.pop()

    async def probe(self) -> "tuple[Probe, ...]":
        return tuple(probe for found in await _all(e.probe() for e in self.engines) for probe in found)

    async def pause(self) -> None:
        await _all(engine.pause() for engine in self.engines)

    async def resume(self) -> None:
        await _all(engine.resume() for engine in self.engines)

    async def abort(self, request_id: str) -> None:
        if request_id in self._where:
            await self.engines[self._where[request_id]].abort(request_id)

    async def park(self) -> None:
        await _all(engine.park() for engine in self.engines)

    def progress(self, known: Mapping[str, int]) -> dict[str, Sampled]:
        return {id: sampled for engine in self.engines for id, sampled in engine.progress(known).items()}

    def stats(self) -> EngineStats:
        found = [engine.stats() for engine in self.engines]
        return EngineStats(
            version=min(s.version for s in found),
            prompt_tokens=sum(s.prompt_tokens for s in found),
            prompt_tokens_shared=sum(s.prompt_tokens_shared for s in found),
            generated_tokens=sum(s.generated_tokens for s in found),
            preemptions=sum(s.preemptions for s in found),
            running=sum(s.running for s in found),
            waiting=sum(s.waiting for s in found),
            busy_seconds=sum(s.busy_seconds for s in found) / len(found),
            restarts=sum(s.restarts for s in found),
            repaired=sum(s.repaired for s in found),
        )

    async def close(self) -> None:
        await _all(engine.close() for engine in self.engines)


async def _all(work: Iterable[Awaitable[T]]) -> list[T]:
    """Every result; if some fail, the first error, after all have ended: none is left half done. Damaged weights, which
    can be sent again, come after errors that cannot be helped."""
    found = await asyncio.gather(*work, return_exceptions=True)
    errors = [result for result in found if isinstance(result, BaseException)]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, WeightsDamaged))
    return [result for result in found if not isinstance(result, BaseException)]
