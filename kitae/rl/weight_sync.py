"""Let the engine serve the trainer's weights: publish a version once, have it loaded everywhere, check it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from kitae.clock import now
from kitae.engines.base import Engine, WeightUpdate
from kitae.errors import EngineError, WeightsDamaged
from kitae.weights.base import Manifest
from kitae.weights.probe import Probe

_MAX_RESENT = 2  # times that one version is sent again

log = logging.getLogger("kitae")


class WeightSource(Protocol):
    """The trainer, as the sync sees it. Nobody may train meanwhile.

    `publish` makes the current weights available as a version: the manifest for engines with weights of their own, or
    None where there is nothing to load. `probe`: the trainer's log-probs of the fixed sequence (`kitae.weights.probe`).
    """

    async def publish(self, version: int, *, in_full: bool = False) -> Manifest | None: ...
    async def probe(self) -> tuple[float, ...]: ...


@dataclass(frozen=True, slots=True)
class _Served:
    """What was handed over last, and the trainer's log-probs of the probe; empty where engines cannot score."""

    version: int
    manifest: Manifest
    ours: tuple[float, ...]


class WeightSync:
    """Hands versions from a source to an engine.

    recompute: what is in flight is computed again with the new weights. tolerance: the largest difference between the
    log-probs of engine and trainer that rounding explains.
    """

    def __init__(self, source: WeightSource, engine: Engine, *, recompute: bool, tolerance: float) -> None:
        self._source = source
        self._engine = engine
        self._recompute = recompute
        self.tolerance = tolerance
        self._served: _Served | None = None
        self._steady = asyncio.Lock()  # held while the served version changes, or an engine joins

    async def hand_over(self, version: int) -> dict[str, float]:
        """Let the engine serve the trainer's weights as this version, and resume it. Returns metrics:

        sync_seconds: of all this. Of an engine with weights of its own also: sync_bytes (published for all engines
        together), sync_delta (1: what changed was enough), sync_unchanged (share of values, where they were compared),
        sync_resent (times it had to be published again), sync_repaired (buckets that engines had to load twice) and
        probe_gap (largest difference of log-probs).

        Such an engine is paused meanwhile: no token is sampled before the probe has agreed. Damaged weights are sent
        again in full, at most twice; an engine whose probe disagrees with the trainer's gets a second sync.
        `EngineError` if that does not help.
        """
        async with self._steady:
            began, metrics = now(), {}
            if self._engine.capabilities.shares_weights:
                await self._update(WeightUpdate(version, None, self._recompute))
            else:
                await self._engine.pause()
                metrics = await self._send(version)
            await self._engine.resume()
            return {**metrics, "sync_seconds": now() - began}

    async def admit(self, engine: Engine, join: Callable[[Engine], Awaitable[None]]) -> None:
        """Let one more engine serve the version that was handed over last. It loads that version, and its probe must
        agree with the trainer's of then; only after that does it `join`. `EngineError` if it does not agree; the caller
        closes it.

        Nothing is handed over meanwhile. An engine that joins before the first version gets that with the others.
        """
        async with self._steady:
            if (served := self._served) is not None:
                await engine.pause()
                await engine.update_weights(WeightUpdate(served.version, served.manifest))
                _, wrong = self._judge(served.version, served.ours, await engine.probe())
                if wrong:
                    raise EngineError(f"an engine may not join: {wrong}")
            await join(engine)

    async def _send(self, version: int) -> dict[str, float]:
        repaired = self._engine.stats().repaired
        manifest, resent = await self._deliver(version, recompute=self._recompute)
        if manifest is None:
            return {}
        metrics: dict[str, float] = {}
        ours: tuple[float, ...] = ()
        if self._engine.capabilities.scores:
            ours = await self._source.probe()
            gap, wrong = await self._compare(version, ours)
            if wrong:
                log.warning("%s: it is sent again", wrong)
                again, more = await self._deliver(version, recompute=True, in_full=True)
                manifest, resent = again or manifest, resent + 1 + more
                gap, wrong = await self._compare(version, ours)
            if wrong:
                raise EngineError(f"{wrong}, also after a new sync")
            metrics["probe_gap"] = gap
        self._served = _Served(version, manifest, ours)
        if manifest.unchanged is not None:
            metrics["sync_unchanged"] = manifest.unchanged
        return metrics | {
            "sync_bytes": float(manifest.bytes),
            "sync_delta": float(manifest.mode == "delta"),
            "sync_resent": float(resent),
            "sync_repaired": float(self._engine.stats().repaired - repaired),
        }

    async def _deliver(self, version: int, *, recompute: bool, in_full: bool = False) -> tuple[Manifest | None, int]:
        """Publish a version and have the engine load it. Returns what was published, and how often it had to be
        published again."""
        for resent in range(_MAX_RESENT + 1):
            manifest = await self._source.publish(version, in_full=in_full or resent > 0)
            try:
                await self._update(WeightUpdate(version, manifest, recompute))
                return manifest, resent
            except WeightsDamaged as error:
                log.warning("%s: it is sent again", error)
        raise EngineError(f"version {version} does not reach the engine whole, sent {_MAX_RESENT + 1} times")

    async def _update(self, update: WeightUpdate) -> None:
        served = await self._engine.update_weights(update)
        assert served == update.version, f"the engine serves version {served}, expected {update.version}"

    async def _compare(self, version: int, ours: tuple[float, ...]) -> tuple[float, str]:
        return self._judge(version, ours, await self._engine.probe())

    def _judge(self, version: int, ours: tuple[float, ...], probes: tuple[Probe, ...]) -> tuple[float, str]:
        """The largest difference of all engines, and a sentence about one that disagrees, or an empty text."""
        largest, wrong = 0.0, ""
        for probe in probes:
            largest = max(largest, probe.gap(ours))
            wrong = probe.problem("the engine", version, ours, self.tolerance, "the trainer's") or wrong
        return largest, wrong
