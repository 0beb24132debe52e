"""Engines that are servers of other people: vLLM, SGLang. Requests are shared out among them, from one ledger.

    ServerEngine ── requests (`traffic`) ──► server, server, …      each speaks its dialect (`vllm`, `sglang`)
                 ◄── tokens as they come, spans of versions ──┘
                 ── pauses, weights, probes (`steering`) ──► all of them
    seats ── servers that come and go (`roster`)

A server is expendable. What it has told of a request is here, so another continues it from there.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from kitae.engines.base import Capabilities, Completion, EngineStats, Request, Sampled, WeightUpdate
from kitae.engines.requests_in_flight import Ledger
from kitae.engines.servers.model_folder import WeightsFolder
from kitae.engines.servers.request_progress import Attempt
from kitae.engines.servers.router import Traffic
from kitae.engines.servers.server import Peer, Seat
from kitae.engines.servers.server_pool import Roster
from kitae.engines.servers.weight_control import Steering
from kitae.errors import EngineError, RequestError, root_cause
from kitae.weights.probe import Probe
from kitae.weights.published_version import WeightStore
from kitae.workers.connection import Deadlines

LIMITS = Deadlines(start=1800.0, answer=600.0, silence=30.0, stall=600.0, close=10.0)


class ServerEngine:
    """Implements `kitae.engines.base.Engine`. `close` it when done.

    seats: where servers come from. weight_store: what was published. folder: where servers read it; the engine closes
    it. decode: tokens into text, for stop strings. vocabulary, context: of the model. tolerance: the largest
    difference between log-probs of the probe that rounding explains.

    A server serves when it has the weights that were published last, says their version, and scores the probe as they
    must, at its start and after every update. One that fails in any way is never used again; what becomes of its seat
    is in `roster`. When none is left, every call raises `EngineError`.
    """

    capabilities = Capabilities(shares_weights=False, scores=True, seeded=False)

    def __init__(
        self,
        seats: Sequence[Seat],
        weight_store: WeightStore,
        folder: WeightsFolder,
        *,
        decode: Callable[[Sequence[int]], str],
        vocabulary: int,
        context: int,
        tolerance: float,
        version: int = 0,
        limits: Deadlines = LIMITS,
    ) -> None:
        self.folder = folder
        self._vocabulary = vocabulary
        self._context = context
        self._ledger: Ledger[Attempt] = Ledger()
        self.roster = Roster(seats, limits, admit=self._admit, on_loss=self._lost, on_failure=self._ledger.fail)
        self._traffic = Traffic(self._ledger, self.roster, limits, decode)
        self._steering = Steering(
            self.roster,
            self._traffic,
            weight_store,
            folder,
            vocabulary=vocabulary,
            tolerance=tolerance,
            version=version,
        )

    async def _admit(self, peer: Peer) -> None:
        await self._steering.admit(peer)

    def _lost(self, peer: Peer) -> None:
        self._traffic.forsake(peer)

    async def start(self) -> None:
        """Wait until every seat has a server that serves. If one cannot be had, `EngineError` and all are closed."""
        try:
            await self.roster.fill()
        except BaseException as error:
            await self.close()
            if isinstance(error, BaseExceptionGroup):
                raise root_cause(error) from None
            raise

    async def generate(self, request: Request) -> Completion:
        self.roster.check_open()
        self._check_request(request)
        with self._ledger.enter(request) as flight:
            if len(request.prior.tokens) >= request.sampling.max_tokens:
                flight.complete(request.prior, "length")
            self._traffic.issue()
            try:
                return await flight.future
            except asyncio.CancelledError:
                if flight.holder is not None:
                    self._traffic.abandon(flight.holder)
                raise

    def _check_request(self, request: Request) -> None:
        length = len(request.prompt_tokens) + len(request.prior.tokens)
        problem = None
        if not request.prompt_tokens:
            problem = "the prompt is empty"
        elif length >= self._context:
            problem = f"a prompt must have fewer than {self._context} tokens, got {length}"
        elif not 0 <= min(request.prompt_tokens) <= max(request.prompt_tokens) < self._vocabulary:
            # vLLM does not survive one that its embedding does not have.
            problem = f"tokens must be from 0 to {self._vocabulary - 1}, got {max(request.prompt_tokens)}"
        else:
            problem = self.roster.seats[0].dialect.refusal(request.sampling)
        if problem is not None:
            raise RequestError(f"request {request.id!r}: {problem}")

    async def update_weights(self, update: WeightUpdate) -> int:
        self.roster.check_open()
        return await asyncio.shield(self.roster.keep(self._steering.update(update)))

    async def probe(self) -> tuple[Probe, ...]:
        self.roster.check_open()
        return await self._steering.probe()

    async def pause(self) -> None:
        self.roster.check_open()
        await self._steering.pause()

    async def resume(self) -> None:
        self.roster.check_open()
        await self._steering.resume()

    async def abort(self, request_id: str) -> None:
        self.roster.check_open()
        await self._traffic.end_early("abort", [f for f in self._ledger.open() if f.request.id == request_id])

    async def suspend(self) -> None:
        self.roster.check_open()
        await self._traffic.end_early("suspended", self._ledger.open())

    def sources(self, rollout: str) -> frozenset[str]:
        """See `kitae.engines.base.Accountable`."""
        return self._traffic.sources(rollout)

    async def refuse(self, source: str, why: str) -> None:
        for peer in [p for p in self.roster.peers if p.name == source]:
            self.roster.lose(peer, why)

    def progress(self, known: Mapping[str, int]) -> dict[str, Sampled]:
        self._traffic.note_all()
        return self._ledger.progress(known)

    def stats(self) -> EngineStats:
        traffic = self._traffic
        return EngineStats(
            version=self._steering.version,
            prompt_tokens=traffic.prompt_tokens,
            prompt_tokens_shared=traffic.shared_tokens,
            generated_tokens=traffic.generated,
            preemptions=0,
            running=traffic.running,
            waiting=len(self._ledger) - traffic.running,
            busy_seconds=traffic.busy.seconds,
            restarts=self.roster.restarts,
            repaired=self.folder.repaired,
        )

    async def close(self) -> None:
        if self.roster.closed:
            return
        self.roster.closed = True
        self._ledger.fail(EngineError("the engine was closed"))
        await self.roster.settle()
        await self.roster.part(self._traffic.drop_all())
        await asyncio.to_thread(self.folder.close)
