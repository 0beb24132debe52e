"""What servers must do before they go on: stand still, load weights, give the right probe.

    a publisher ── weights ──► a copy here ──► a folder (`folder`) ──► servers load it

Nothing is served before version and probe agree, at a server's start and after every update. While an engine is paused,
what servers tell is kept back, and dropped with a server that turns out bad: a probe has to let a paused server go on
for a moment.
"""

import asyncio

from kitae.engines.base import WeightUpdate
from kitae.engines.servers.model_folder import WeightsFolder
from kitae.engines.servers.router import Traffic
from kitae.engines.servers.server import Peer
from kitae.engines.servers.server_client import LineLost
from kitae.engines.servers.server_pool import Roster
from kitae.errors import EngineError, WeightsDamaged
from kitae.weights.base import Manifest
from kitae.weights.probe import Probe, probe_tokens
from kitae.weights.published_version import WeightStore


class Steering:
    """version: that servers serve. vocabulary: of the model. tolerance: the largest difference between log-probs of the
    probe that rounding explains."""

    def __init__(
        self,
        roster: Roster,
        traffic: Traffic,
        weight_store: WeightStore,
        folder: WeightsFolder,
        *,
        vocabulary: int,
        tolerance: float,
        version: int,
    ) -> None:
        self.version = version
        self._roster = roster
        self._traffic = traffic
        self._weight_store = weight_store
        self._folder = folder
        self._vocabulary = vocabulary
        self._tolerance = tolerance
        self._updating = asyncio.Lock()

    # Pausing.

    async def pause(self) -> None:
        self._traffic.paused = True
        await self._adjust_all()

    async def resume(self) -> None:
        self._traffic.paused = False
        await self._adjust_all()
        self._traffic.issue()

    async def _adjust_all(self) -> None:
        peers = tuple(self._roster.peers)
        await asyncio.gather(*(self._roster.or_lose(peer, self._adjust(peer)) for peer in peers))
        self._traffic.note_busy()

    async def _adjust(self, peer: Peer) -> None:
        """Have it stand still, or go on, as it must now."""
        async with peer.turn:
            if self._traffic.paused or self._traffic.halted or peer.broken:
                await _stop(peer)
            else:
                await self._go_on(peer)

    async def _go_on(self, peer: Peer) -> None:
        if peer.paused:
            await peer.seat.dialect.resume(peer.line)
            peer.paused = False
        peer.shut = False
        self._traffic.release(peer)

    # Weights.

    async def admit(self, peer: Peer) -> None:
        """Have a new server serve what was published last; `LineLost` or `Refusal`: it cannot."""
        async with self._weight_store.hold() as manifest:
            if manifest is not None:
                await asyncio.to_thread(self._folder.take, manifest)
            expected = self._folder.probe
            await self._load(peer, expected.version, recompute=True)
            if peer.broken:
                raise LineLost("the weights did not reach it whole")
            await self._check_probe(peer, expected)
            self.version = expected.version
            self._roster.enlist(peer)
        await self._roster.or_lose(peer, self._adjust(peer))
        self._traffic.issue()

    async def update(self, update: WeightUpdate) -> int:
        manifest = update.manifest
        if manifest is None:
            raise EngineError(
                f"weight update {update.version} must have a manifest: a server does not share the trainer's weights"
            )
        async with self._updating, self._weight_store.hold() as current:
            if manifest != current:
                raise EngineError(
                    f"weight update {update.version} must be what was published last, got the manifest of version "
                    f"{manifest.version}"
                )
            await self._take_in(manifest)
            await self._renew_all(manifest, update.recompute)
            self.version = manifest.version
        await self._roster.present()  # a server that takes the place of another loads the same
        self._traffic.issue()
        return manifest.version

    async def _take_in(self, manifest: Manifest) -> None:
        """What is wrong with a version is found here, before a server hears of it."""
        try:
            await asyncio.to_thread(self._folder.take, manifest)
        except WeightsDamaged:
            self._traffic.halted = True
            await self._adjust_all()
            raise
        self._traffic.halted = False

    async def _renew_all(self, manifest: Manifest, recompute: bool) -> None:
        peers = tuple(self._roster.peers)
        await asyncio.gather(*(self._roster.or_lose(p, self._renew(p, manifest, recompute)) for p in peers))
        if damaged := [peer.name for peer in self._roster.peers if peer.broken]:
            raise WeightsDamaged(f"version {manifest.version} did not reach {', '.join(damaged)} whole")

    async def _renew(self, peer: Peer, manifest: Manifest, recompute: bool) -> None:
        async with peer.turn:
            await _stop(peer)
            await self._load(peer, manifest.version, recompute=recompute)
            if not peer.broken:
                await self._check_probe(peer, self._folder.probe)
        await self._adjust(peer)

    async def _load(self, peer: Peer, version: int, *, recompute: bool) -> None:
        """Weights, then the caches that were made with others, then the name: in this order, or a token is sampled from
        what nobody trained."""
        dialect = peer.seat.dialect
        peer.broken = bool(await dialect.load(peer.line, self._folder.current))
        if not peer.broken:
            await dialect.forget(peer.line, recompute=recompute)
            await dialect.label(peer.line, version)
            peer.version = version

    # Probes.

    async def probe(self) -> tuple[Probe, ...]:
        """Of every server that is not lost over it."""
        peers = tuple(self._roster.peers)
        found = await asyncio.gather(*(self._roster.or_lose(peer, self._probe(peer)) for peer in peers))
        return tuple(probe for probe in found if probe is not None)

    async def _check_probe(self, peer: Peer, expected: Probe) -> None:
        found = await self._score(peer)
        gap = found.gap(expected.logprobs)
        if found.version != expected.version or not gap <= self._tolerance:
            raise LineLost(
                f"it must serve version {expected.version} with log-probs within {self._tolerance:g} of the published "
                f"weights; it serves version {found.version} with a difference of {gap:.3g}"
            )

    async def _probe(self, peer: Peer) -> Probe:
        async with peer.turn:
            return await self._score(peer)

    async def _score(self, peer: Peer) -> Probe:
        """In the peer's turn."""
        dialect = peer.seat.dialect
        if peer.paused:
            await dialect.resume(peer.line)  # what it tells of others meanwhile waits: it is shut
        logprobs = await dialect.score(peer.line, probe_tokens(self._vocabulary))
        found = Probe(await dialect.version(peer.line), logprobs)
        if peer.paused:
            await dialect.pause(peer.line)
        return found


async def _stop(peer: Peer) -> None:
    peer.shut = True
    if not peer.paused:
        await peer.seat.dialect.pause(peer.line)
        peer.paused = True
