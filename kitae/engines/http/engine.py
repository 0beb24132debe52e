"""Engines that are servers of other people: vLLM, SGLang. Requests are shared out among them, from one ledger.

    ServerEngine ── requests ──► server, server, …      each speaks its dialect (`vllm`, `sglang`)
                 ◄── tokens as they come, spans of versions ──┘
    a publisher  ── weights ──► a copy here ──► a folder ──► servers load it (`folder`)

A server is expendable. What it has told of a request is here, so another continues it from there. Draws of a server are
a stream that begins with the request: a continued request gets a seed that is derived from its own and the number of
tokens it has, and goes on with other tokens than it would have had undisturbed.
"""

import asyncio
import hashlib
import itertools
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kitae.cluster.link import Deadlines
from kitae.engines.base import Capabilities, Completion, EngineStats, Request, Sampled, WeightUpdate
from kitae.engines.http.attempt import Attempt
from kitae.engines.http.dialect import Tidings
from kitae.engines.http.folder import WeightsFolder
from kitae.engines.http.line import LineLost, Refusal
from kitae.engines.http.peer import Peer, Seat
from kitae.engines.ledger import Ending, Flight, Ledger
from kitae.errors import EngineError, RequestError, WeightsDamaged, root_cause
from kitae.processes.deadlines import within
from kitae.weights.base import Manifest
from kitae.weights.board import Board
from kitae.weights.probe import Probe, probe_tokens

LIMITS = Deadlines(start=1800.0, answer=600.0, silence=30.0, stall=600.0, close=10.0)

_MAX_RESTARTS = 3  # of one seat, within
_WINDOW = 600.0  # seconds
_WORTH_NOTING = 64  # tokens of an attempt after which the ledger is told
_INSIST = 0.25  # seconds after which a server is told again to abort a request: it may not have known it yet
_SLICES = 10  # of the longest silence
_MOST_REMEMBERED = 100_000  # threads, and rollouts

log = logging.getLogger("kitae")


class ServerEngine:
    """Implements `kitae.engines.base.Engine`. `close` it when done.

    seats: where servers come from. board: where to read what was published. folder: where servers read it; the engine
    closes it. decode: tokens into text, for stop strings. vocabulary, context: of the model. tolerance: the largest
    difference between log-probs of the probe that rounding explains.

    A server serves when it has the weights that were published last, says their version, and scores the probe as they
    must, at its start and after every update. One that fails in any way is never used again. A seat that lasts gets
    another server, `_MAX_RESTARTS` times in ten minutes; any other stays empty. When none is left, every call raises
    `EngineError`.

    While an engine is paused, what servers tell is kept back, and dropped with a server that turns out bad: `probe` has
    to let a paused server go on for a moment.
    """

    capabilities = Capabilities(shares_weights=False, scores=True, seeded=False)

    def __init__(
        self,
        seats: Sequence[Seat],
        board: Board,
        folder: WeightsFolder,
        *,
        decode: Callable[[Sequence[int]], str],
        vocabulary: int,
        context: int,
        tolerance: float,
        version: int = 0,
        limits: Deadlines = LIMITS,
    ) -> None:
        self._seats = tuple(seats)
        self._board = board
        self._folder = folder
        self._decode = decode
        self._vocabulary = vocabulary
        self._context = context
        self._tolerance = tolerance
        self._version = version
        self._limits = limits
        self._ledger: Ledger[Attempt] = Ledger()
        self._peers: list[Peer] = []
        self._attempts: set[Attempt] = set()
        self._filling: set[asyncio.Task[None]] = set()  # seats that wait for a server
        self._background: set[asyncio.Task[Any]] = set()
        self._threads: OrderedDict[str, Peer] = OrderedDict()  # who had the last request of a thread
        self._answered: OrderedDict[str, frozenset[str]] = OrderedDict()  # by whom, see `sources`
        self._names = itertools.count()
        self._prefix = secrets.token_hex(4)  # others may use the same server
        self._restarts: dict[Seat, list[float]] = {seat: [] for seat in self._seats}
        self._gone: list[str] = []  # servers that were not replaced, and why
        self._changed = asyncio.Event()  # servers come and go
        self._updating = asyncio.Lock()
        self._paused = False
        self._halted = False  # weights did not arrive whole: no step until whole ones come
        self._closed = False
        self._failure: EngineError | None = None
        self._prompt_tokens = self._shared_tokens = self._generated = 0
        self._busy, self._busy_since = 0.0, 0.0

    # The face.

    async def start(self) -> None:
        """Wait until every seat has a server that serves. If one cannot be had, `EngineError` and all are closed."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for seat in self._seats:
                    tasks.create_task(self._fill(seat))
        except BaseException as error:
            await self.close()
            if isinstance(error, BaseExceptionGroup):
                raise root_cause(error) from None
            raise

    async def generate(self, request: Request) -> Completion:
        self._check_open()
        self._check_request(request)
        with self._ledger.enter(request) as flight:
            if len(request.prior.tokens) >= request.sampling.max_tokens:
                flight.complete(request.prior, "length")
            self._issue()
            try:
                return await flight.future
            except asyncio.CancelledError:
                if flight.holder is not None:
                    self._abandon(flight.holder)
                raise

    async def update_weights(self, update: WeightUpdate) -> int:
        self._check_open()
        return await asyncio.shield(self._keep(self._update(update)))

    async def probe(self) -> tuple[Probe, ...]:
        self._check_open()
        found = await asyncio.gather(*(self._or_lose(peer, self._probe(peer)) for peer in tuple(self._peers)))
        return tuple(probe for probe in found if probe is not None)

    async def pause(self) -> None:
        self._check_open()
        self._paused = True
        await self._adjust_all()

    async def resume(self) -> None:
        self._check_open()
        self._paused = False
        await self._adjust_all()
        self._issue()

    async def abort(self, request_id: str) -> None:
        self._check_open()
        await self._end_early("abort", [f for f in self._ledger.open() if f.request.id == request_id])

    async def park(self) -> None:
        self._check_open()
        await self._end_early("parked", self._ledger.open())

    def sources(self, rollout: str) -> frozenset[str]:
        """See `kitae.engines.base.Accountable`."""
        return self._answered.get(rollout, frozenset())

    async def refuse(self, source: str, why: str) -> None:
        for peer in [p for p in self._peers if p.name == source]:
            self._lose(peer, why)

    def progress(self, known: Mapping[str, int]) -> dict[str, Sampled]:
        for attempt in self._attempts:
            attempt.flight.sampled = attempt.sampled
        return self._ledger.progress(known)

    def stats(self) -> EngineStats:
        running = min(len(self._attempts), len(self._ledger))
        return EngineStats(
            version=self._version,
            prompt_tokens=self._prompt_tokens,
            prompt_tokens_shared=self._shared_tokens,
            generated_tokens=self._generated,
            preemptions=0,
            running=running,
            waiting=len(self._ledger) - running,
            busy_seconds=self._busy + (time.monotonic() - self._busy_since if self._is_busy else 0.0),
            restarts=sum(map(len, self._restarts.values())) + len(self._gone),
            repaired=self._folder.repaired,
        )

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._ledger.fail(EngineError("the engine was closed"))
        for task in (*self._filling, *self._background):
            task.cancel()
        await asyncio.gather(*self._filling, *self._background, return_exceptions=True)
        attempts = list(self._attempts)
        for attempt in attempts:
            self._drop(attempt)
        await asyncio.gather(*(self._part(peer, attempts) for peer in self._peers), return_exceptions=True)
        await asyncio.to_thread(self._folder.close)

    async def _part(self, peer: Peer, attempts: Iterable[Attempt]) -> None:
        """From a server that others may go on using, with nothing of ours left on it."""
        if peer.program is None:
            with suppress(LineLost, Refusal, TimeoutError):
                tidy = asyncio.create_task(self._tidy(peer, [a.name for a in attempts if a.peer is peer]))
                await within(self._limits.close, tidy)
        await peer.end()

    async def _tidy(self, peer: Peer, names: Iterable[str]) -> None:
        for name in names:
            await peer.seat.dialect.abort(peer.line, name)
        if peer.paused and not peer.broken:
            await peer.seat.dialect.resume(peer.line)

    # Servers come and go.

    async def _fill(self, seat: Seat) -> None:
        """A server for a seat, which serves what was published last."""
        peer = await seat.open()
        try:
            await self._join(peer)
        except BaseException as error:
            words = peer.program.words if peer.program is not None else ""
            await peer.end()
            if isinstance(error, LineLost | Refusal):
                raise EngineError(f"the server at {peer.name} cannot be used: {error}{words}") from None
            raise

    async def _join(self, peer: Peer) -> None:
        async with self._board.hold() as manifest:
            if manifest is not None:
                await asyncio.to_thread(self._folder.take, manifest)
            expected = self._folder.probe
            await self._load(peer, expected.version, recompute=True)
            if peer.broken:
                raise LineLost("the weights did not reach it whole")
            await self._check_probe(peer, expected)
            self._version = expected.version
            self._peers.append(peer)
        peer.have(self._watch(peer))
        if peer.program is not None:
            peer.have(self._mourn(peer))
        await self._or_lose(peer, self._adjust(peer))
        self._changed.set()
        self._issue()

    async def _check_probe(self, peer: Peer, expected: Probe) -> None:
        """Nothing is served before version and probe agree."""
        found = await self._score(peer)
        gap = found.gap(expected.logprobs)
        if found.version != expected.version or not gap <= self._tolerance:
            raise LineLost(
                f"it must serve version {expected.version} with log-probs within {self._tolerance:g} of the published "
                f"weights; it serves version {found.version} with a difference of {gap:.3g}"
            )

    async def _watch(self, peer: Peer) -> None:
        """Whether it is well: it answers, and makes progress if it has work.

        Time is counted in slices: an event loop that was blocked is late for one of them.
        """
        pause, idle = self._limits.silence / _SLICES, 0.0
        while True:
            await asyncio.sleep(pause)
            try:
                await self._look(peer)
            except (LineLost, Refusal) as error:
                self._keep(self._lose_soon(peer, str(error)))
                return
            works = peer.sharing.total() > 0 and not peer.paused
            idle = idle + pause if works and not peer.heard else 0.0
            peer.heard = False
            if idle >= self._limits.stall:
                self._keep(self._lose_soon(peer, f"it had work and told nothing for {self._limits.stall:g} s"))
                return

    async def _look(self, peer: Peer) -> None:
        """Twice, before a server that says nothing else is given up."""
        with suppress(LineLost):
            await peer.line.get(peer.seat.dialect.alive, self._limits.silence)
            return
        await peer.line.get(peer.seat.dialect.alive, self._limits.silence)

    async def _mourn(self, peer: Peer) -> None:
        assert peer.program is not None
        self._keep(self._lose_soon(peer, await peer.program.wait()))

    async def _lose_soon(self, peer: Peer, why: str) -> None:
        """From a task of the server's own, which ends with it."""
        self._lose(peer, why)

    def _lose(self, peer: Peer, why: str) -> None:
        """Give it up: its requests go to others, its seat to another server."""
        if peer.lost is not None or self._closed:
            return
        peer.lost = why
        if peer in self._peers:
            self._peers.remove(peer)
        for attempt in [a for a in self._attempts if a.peer is peer]:
            attempt.flight.sampled = attempt.sampled
            self._drop(attempt)
            self._remember(attempt)
            self._ledger.lose(attempt)
        task = asyncio.create_task(self._replace(peer))
        self._filling.add(task)
        task.add_done_callback(self._filling.discard)
        self._issue()

    async def _replace(self, peer: Peer) -> None:
        seat, words = peer.seat, peer.program.words if peer.program is not None else ""
        await peer.end()
        why = f"{peer.lost}{words}"
        try:
            while seat.lasting:
                self._count_restart(seat, why)
                try:
                    await self._fill(seat)
                    return
                except EngineError as error:
                    why = str(error)
        except EngineError as error:
            why = str(error)
        self._gone.append(f"{seat.name}: {why}")
        log.warning("the server %s is taken out: %s", seat.name, why)
        self._filling.discard(asyncio.current_task())
        if not self._peers and not self._filling:
            self._fail(EngineError(f"no server is left; {'; '.join(self._gone)}"))
        self._changed.set()

    def _count_restart(self, seat: Seat, why: str) -> None:
        now = time.monotonic()
        self._restarts[seat].append(now)
        recent = sum(now - then < _WINDOW for then in self._restarts[seat])
        if recent > _MAX_RESTARTS:
            raise EngineError(f"it was lost {recent} times within {_WINDOW:g} s, the last time: {why}")
        log.warning("the server %s is replaced: %s", seat.name, why)

    async def _present(self) -> None:
        """Wait until there is a server."""
        while not self._peers:
            self._check_open()
            self._changed.clear()
            await self._changed.wait()

    async def _or_lose(self, peer: Peer, work: Awaitable[Any]) -> Any:
        """What a server was asked for; None if it is lost over it."""
        try:
            return await work
        except (LineLost, Refusal) as error:
            self._lose(peer, str(error))
            return None

    # Pausing.

    async def _adjust_all(self) -> None:
        await asyncio.gather(*(self._or_lose(peer, self._adjust(peer)) for peer in tuple(self._peers)))
        self._note_busy()

    async def _adjust(self, peer: Peer) -> None:
        """Have it stand still, or go on, as it must now."""
        async with peer.turn:
            if self._paused or self._halted or peer.broken:
                await self._stop(peer)
            else:
                await self._go_on(peer)

    async def _stop(self, peer: Peer) -> None:
        peer.shut = True
        if not peer.paused:
            await peer.seat.dialect.pause(peer.line)
            peer.paused = True

    async def _go_on(self, peer: Peer) -> None:
        if peer.paused:
            await peer.seat.dialect.resume(peer.line)
            peer.paused = False
        peer.shut = False
        for attempt in [a for a in self._attempts if a.peer is peer]:
            waiting, attempt.waiting = attempt.waiting, []
            for news, version in waiting:
                self._take(attempt, news, version)
            self._conclude(attempt)

    # Requests.

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
            problem = self._seats[0].dialect.refusal(request.sampling)
        if problem is not None:
            raise RequestError(f"request {request.id!r}: {problem}")

    def _issue(self) -> None:
        """Give what waits to servers that serve."""
        if self._paused or self._halted or self._closed:
            return
        for flight in self._ledger.open():
            if flight.holder is None and flight.ending is None:
                peer = self._choose(flight.request)
                if peer is None:
                    return
                self._send(flight, peer)

    def _choose(self, request: Request) -> Peer | None:
        """Where requests with its share key are, or the last one of its thread was, or who has the fewest."""
        peers = [peer for peer in self._peers if not peer.shut]
        if not peers:
            return None
        sharing = [peer for peer in peers if request.share and peer.sharing[request.share]]
        thread = self._threads.pop(request.thread, None)
        if sharing:
            found = sharing[0]
        else:
            found = thread if thread in peers else min(peers, key=lambda peer: peer.sharing.total())
        if request.thread:
            self._threads[request.thread] = found
            _shorten(self._threads)
        return found

    def _send(self, flight: Flight[Attempt], peer: Peer) -> None:
        prior = flight.progress()
        name = f"{self._prefix}-{next(self._names)}"
        attempt = Attempt(name, flight, peer, before=prior, stamp=peer.version)
        request = self._ledger.issue(flight, attempt)
        request = replace(request, seed=_seed(request.seed, len(prior.tokens)))
        peer.sharing[request.share] += 1
        self._attempts.add(attempt)
        self._note_busy()
        attempt.task = peer.have(self._follow(attempt, request))

    async def _follow(self, attempt: Attempt, request: Request) -> None:
        """Hear what a server tells of one request, to its end."""
        peer, dialect = attempt.peer, attempt.peer.seat.dialect
        path, body = dialect.request(attempt.name, request, peer.version)
        try:
            async for event in peer.line.events(path, body):
                peer.heard = True
                self._hear(attempt, dialect.news(event, attempt.told))
            self._ended(attempt)
        except Refusal as refused:
            self._drop(attempt)
            attempt.flight.settle(RequestError(f"request {request.id!r}: {refused}"))
        except LineLost as error:
            self._lose(peer, str(error))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            self._lose(peer, f"it told what {dialect.kind} does not tell: {type(error).__name__}: {error}")

    def _hear(self, attempt: Attempt, news: Tidings) -> None:
        version = attempt.hear(news)
        if attempt.peer.shut:
            attempt.waiting.append((news, version))
        else:
            self._take(attempt, news, version)

    def _take(self, attempt: Attempt, news: Tidings, version: int) -> None:
        """Count tokens, unless the response was cut before them."""
        if attempt.cut is not None:
            return
        length = attempt.length
        attempt.add(news, version)
        self._generated += len(news.tokens)
        if stops := attempt.flight.request.sampling.stop_strings:
            attempt.cut = self._stop_in(attempt.before.tokens + tuple(attempt.tokens), length, stops)
            if attempt.cut is not None and attempt.last is None:
                self._keep(self._insist([attempt]))
        if attempt.length - len(attempt.flight.sampled.tokens) >= _WORTH_NOTING:
            attempt.flight.sampled = attempt.sampled

    def _stop_in(self, tokens: tuple[int, ...], known: int, stops: Sequence[str]) -> int | None:
        """After how many tokens a stop string is complete, which the first `known` do not have."""
        window = 4 * max(map(len, stops)) + 8  # tokens: a character may take four of them
        for end in range(known + 1, len(tokens) + 1):
            text = self._decode(tokens[max(0, end - window) : end])
            if any(stop in text for stop in stops):
                return end
        return None

    def _ended(self, attempt: Attempt) -> None:
        """The server has told all."""
        if attempt.last is None:
            raise LineLost("an answer ended without a reason")
        prompt = len(attempt.flight.request.prompt_tokens) + len(attempt.before.tokens)
        self._prompt_tokens += prompt - attempt.cached
        self._shared_tokens += attempt.cached
        attempt.task = None
        self._conclude(attempt)

    def _conclude(self, attempt: Attempt) -> None:
        """Give the caller its result, if all is there and may be told. One that was asked to end ends at once, with
        what was told before its server was shut."""
        last, flight = attempt.last, attempt.flight
        if last is None or attempt.task is not None or (attempt.waiting and last.finish != "abort"):
            return
        attempt.date(last.spans)
        self._drop(attempt)
        self._remember(attempt)
        flight.sampled = attempt.sampled
        if attempt.cut is not None:
            flight.complete(attempt.sampled, "stop")
        elif last.finish != "abort":
            assert last.finish is not None
            flight.complete(attempt.sampled, last.finish)
        elif flight.ending is not None:
            flight.complete(attempt.sampled, flight.ending)
        else:  # somebody else had the server end it: it is continued
            flight.holder = None
            self._issue()

    def _drop(self, attempt: Attempt) -> None:
        """It is over: nobody listens any more."""
        if attempt not in self._attempts:
            return
        self._attempts.discard(attempt)
        share = attempt.flight.request.share
        attempt.peer.sharing[share] -= 1
        if not attempt.peer.sharing[share]:
            del attempt.peer.sharing[share]
        if attempt.task is not None and attempt.task is not asyncio.current_task():
            attempt.task.cancel()
        self._note_busy()

    def _remember(self, attempt: Attempt) -> None:
        if attempt.tokens:
            rollout = attempt.flight.request.id.rpartition("/")[0]
            self._answered[rollout] = self._answered.pop(rollout, frozenset()) | {attempt.peer.name}
            _shorten(self._answered)

    def _abandon(self, attempt: Attempt) -> None:
        """Its caller is gone. A server that is not told would go on to the end."""
        self._drop(attempt)
        work = attempt.peer.seat.dialect.abort(attempt.peer.line, attempt.name)
        self._keep(self._or_lose(attempt.peer, work))

    async def _end_early(self, ending: Ending, flights: Iterable[Flight[Attempt]]) -> None:
        asked: list[Attempt] = []
        for flight in flights:
            flight.ending = ending
            if flight.holder is None:
                flight.end_early(ending)
            else:
                asked.append(flight.holder)
        if asked:
            await self._insist(asked)

    async def _insist(self, attempts: Sequence[Attempt]) -> None:
        """Have servers end these, however often that must be said; one that does not is lost."""
        futures = [attempt.flight.future for attempt in attempts]
        for _ in range(int(self._limits.answer / _INSIST)):
            for peer in {a.peer for a in attempts if a in self._attempts}:
                names = [a.name for a in attempts if a.peer is peer and a in self._attempts]
                await self._or_lose(peer, _each(peer.seat.dialect.abort(peer.line, name) for name in names))
            _, left = await asyncio.wait(futures, timeout=_INSIST)
            if not left:
                return
        for attempt in attempts:
            if attempt in self._attempts:
                self._lose(attempt.peer, f"it did not end a request within {self._limits.answer:g} s")

    # Weights.

    async def _update(self, update: WeightUpdate) -> int:
        manifest = update.manifest
        if manifest is None:
            raise EngineError(
                f"weight update {update.version} must have a manifest: a server does not share the trainer's weights"
            )
        async with self._updating, self._board.hold() as current:
            if manifest != current:
                raise EngineError(
                    f"weight update {update.version} must be what was published last, got the manifest of version "
                    f"{manifest.version}"
                )
            await self._take_in(manifest)
            await asyncio.gather(
                *(self._or_lose(p, self._renew(p, manifest, update.recompute)) for p in tuple(self._peers))
            )
            if damaged := [peer.name for peer in self._peers if peer.broken]:
                raise WeightsDamaged(f"version {manifest.version} did not reach {', '.join(damaged)} whole")
            self._version = manifest.version
        await self._present()  # a server that takes the place of another loads the same
        self._issue()
        return manifest.version

    async def _take_in(self, manifest: Manifest) -> None:
        """What is wrong with a version is found here, before a server hears of it."""
        try:
            await asyncio.to_thread(self._folder.take, manifest)
        except WeightsDamaged:
            self._halted = True
            await self._adjust_all()
            raise
        self._halted = False

    async def _renew(self, peer: Peer, manifest: Manifest, recompute: bool) -> None:
        async with peer.turn:
            await self._stop(peer)
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

    # Counting, and endings.

    @property
    def _is_busy(self) -> bool:
        return self._busy_since > 0

    def _note_busy(self) -> None:
        """It is while a server works on something."""
        works = bool(self._attempts) and not self._paused
        if works and not self._is_busy:
            self._busy_since = time.monotonic()
        elif not works and self._is_busy:
            self._busy += time.monotonic() - self._busy_since
            self._busy_since = 0.0

    def _keep(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Have it done, whoever waits for it."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(_see)
        return task

    def _check_open(self) -> None:
        if self._failure is not None:
            raise EngineError(f"the engine is closed: {self._failure}") from self._failure
        if self._closed:
            raise EngineError("the engine is closed")

    def _fail(self, error: EngineError) -> None:
        self._failure = self._failure or error
        self._ledger.fail(error)


def _seed(seed: int, prior: int) -> int:
    """Of the draws after `prior` tokens: with the same seed, a server would repeat the first draws."""
    if not prior:
        return seed % 2**63
    return int.from_bytes(hashlib.blake2b(f"{seed} {prior}".encode(), digest_size=8).digest(), "little") % 2**63


def _shorten(found: "OrderedDict[str, Any]") -> None:
    if len(found) > _MOST_REMEMBERED:
        found.popitem(last=False)


def _see(task: "asyncio.Task[Any]") -> None:
    """Its error, if nobody else does: then it is no news."""
    if not task.cancelled():
        task.exception()


async def _each(work: Iterable[Awaitable[None]]) -> None:
    for each in work:
        await each
