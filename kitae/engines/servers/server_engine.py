"""A server of vLLM or SGLang as an engine: a plain member of an `EnginePool`.

    generate ──► an attempt at the server, whose tokens come as events; each kind of server speaks its dialect
    pause, update_weights, probe ──► the server stands still, loads a folder (`model_folder`), gives the right probe

The server is lost at the first sign that it is not well, and never used again. Its requests end as suspended then, with
the tokens that it has sent, and the pool continues them elsewhere. Draws of a server are a stream that begins with the
request: a continued request gets a seed that is derived from its own and the number of tokens it has, and goes on with
other tokens than it would have had undisturbed.

Nothing is served before version and probe agree, at the start and after every update. While the engine is paused, what
the server sends is kept back, and dropped if the server turns out bad: a probe has to let a paused server go on for a
moment.
"""

import asyncio
import hashlib
import itertools
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from kitae.data.pictures import PICTURE
from kitae.engines.base import Capabilities, Completion, EngineStats, Request, Sampled, WeightUpdate
from kitae.engines.requests_in_flight import Ending, Flight, Ledger
from kitae.engines.servers.dialect import StreamEvent
from kitae.engines.servers.model_folder import WeightsFolder
from kitae.engines.servers.request_progress import Attempt
from kitae.engines.servers.server import Server
from kitae.engines.servers.server_client import LineLost, Refusal
from kitae.errors import EngineError, EngineLost, RequestError, WeightsDamaged
from kitae.weights.probe import Probe, probe_tokens
from kitae.weights.published_version import WeightStore, hold_update
from kitae.workers.background_tasks import BackgroundTasks, within
from kitae.workers.connection import Deadlines

T = TypeVar("T")

LIMITS = Deadlines(start=1800.0, answer=600.0, silence=30.0, stall=600.0, close=10.0)
_SLICES = 10  # of the longest silence
_WORTH_NOTING = 64  # tokens of an attempt after which the ledger is brought up to date
_INSIST = 0.25  # seconds after which a server is asked again to abort a request: it may not have known it yet


class ServerEngine:
    """Implements `kitae.engines.base.Engine` over one server. `start` it first, and `close` it when done.

    server: was greeted; the engine ends it. weight_store: what was published. folder: where servers read it; other
    engines use it too. decode: tokens into text, for stop strings. vocabulary, context: of the model. tolerance: the
    largest difference between log-probs of the probe that rounding explains. lost: becomes the reason when it is lost;
    from then on every call raises `EngineLost`.
    """

    capabilities = Capabilities(shares_weights=False, scores=True, seeded=False)

    def __init__(
        self,
        server: Server,
        weight_store: WeightStore,
        folder: WeightsFolder,
        *,
        decode: Callable[[Sequence[int]], str],
        vocabulary: int,
        context: int,
        tolerance: float,
        limits: Deadlines = LIMITS,
    ) -> None:
        self.server = server
        self.version = -1  # of the weights it serves
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._dialect, self._line = server.dialect, server.line
        self._weight_store = weight_store
        self._folder = folder
        self._decode = decode
        self._vocabulary = vocabulary
        self._context = context
        self._tolerance = tolerance
        self._limits = limits
        self._closed = False
        self._paused = False  # by the caller
        self._halted = False  # a version did not arrive whole here: no step until one does
        self._broken = False  # weights did not reach the server whole
        self._stands = False  # the server was asked to pause
        self._shut = True  # what the server sends waits: it stands, or its weights are not known to be good
        self._heard = False  # something came from the server since somebody looked
        self._turn = asyncio.Lock()  # who pauses, resumes, loads or probes
        self._updating = asyncio.Lock()
        self._ledger: Ledger[Attempt] = Ledger()
        self._attempts: set[Attempt] = set()
        self._prompt_tokens = self._shared_tokens = self._generated = self._repaired = 0
        self._busy = Stopwatch()
        self._names = itertools.count()
        self._prefix = secrets.token_hex(4)  # others may use the same server
        self._talks = BackgroundTasks()  # that use the connection
        self._tasks = BackgroundTasks()
        self._updates = BackgroundTasks()

    @property
    def name(self) -> str:
        return self.server.name

    # Life.

    async def start(self) -> None:
        """Have the server serve what was published last, or the model of the start; `EngineError` if it cannot."""
        try:
            async with self._weight_store.hold() as manifest:
                if manifest is not None:
                    self._repaired += await asyncio.to_thread(self._folder.take, manifest)
                expected = self._folder.probe
                await self._load(expected.version, recompute=True)
                if self._broken:
                    raise LineLost("the weights did not reach it whole")
                await self._check_probe(expected)
            async with self._turn:
                await self._go_on()
        except BaseException as error:
            await self.close()
            if isinstance(error, LineLost | Refusal):
                words = self.server.words
                raise EngineError(f"the server at {self.name} cannot be used: {error}{words}") from None
            raise
        self._talks.start(self._watch())
        self._talks.start(self._wait_for_the_end())

    def _check_open(self) -> None:
        if self.lost.done():
            raise EngineLost(f"the server was lost: {self.lost.result()}")
        if self._closed:
            raise EngineError("the engine is closed")

    async def _or_lost(self, work: Coroutine[Any, Any, T]) -> T:
        """What the server was asked for; `EngineLost` if it is lost over it."""
        try:
            return await work
        except (LineLost, Refusal) as error:
            self._lose(str(error))
            self._check_open()
            raise

    def _lose(self, why: str) -> None:
        if self.lost.done() or self._closed:
            return
        self.lost.set_result(f"{why}{self.server.words}")
        for attempt in list(self._attempts):
            attempt.flight.sampled = attempt.sampled
            self._drop(attempt)
        for flight in self._ledger.open():
            flight.end_early(flight.ending or "suspended")

    async def _watch(self) -> None:
        """Whether the server is well: it answers, and makes progress if it has work.

        Time is counted in slices: an event loop that was blocked is late for one of them.
        """
        pause, idle = self._limits.silence / _SLICES, 0.0
        while True:
            await asyncio.sleep(pause)
            try:
                await self._look()
            except (LineLost, Refusal) as error:
                self._lose(str(error))
                return
            idle = idle + pause if self._attempts and not self._stands and not self._heard else 0.0
            self._heard = False
            if idle >= self._limits.stall:
                self._lose(f"it had work and sent nothing for {self._limits.stall:g} s")
                return

    async def _look(self) -> None:
        """Twice, before a server that says nothing is given up."""
        with suppress(LineLost):
            await self._line.get(self._dialect.alive, self._limits.silence)
            return
        await self._line.get(self._dialect.alive, self._limits.silence)

    async def _wait_for_the_end(self) -> None:
        if self.server.program is not None:
            self._lose(await self.server.program.wait())

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._ledger.fail(EngineError("the engine was closed"))
        left = [attempt.name for attempt in self._attempts]
        for attempt in list(self._attempts):
            self._drop(attempt)
        await asyncio.gather(self._talks.cancel(), self._tasks.cancel())
        if self.server.program is None and not self.lost.done():
            with suppress(LineLost, Refusal, TimeoutError):
                await within(self._limits.close, asyncio.create_task(self._tidy(left)))
        await self.server.end()
        await self._updates.finish()  # an update that is under way fails, as the connection is closed

    async def _tidy(self, names: Iterable[str]) -> None:
        """Others may go on using the server: nothing of ours is left on it."""
        for name in names:
            await self._dialect.abort(self._line, name)
        if self._stands and not self._broken:
            await self._dialect.resume(self._line)

    # Requests.

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

    def _check_request(self, request: Request) -> None:
        length = len(request.prompt_tokens) + len(request.prior.tokens)
        problem = None
        if not request.prompt_tokens:
            problem = "the prompt is empty"
        elif max(request.prompt_tokens) >= PICTURE:
            problem = "a server cannot be sent pictures; engine.kind must be native"
        elif length >= self._context:
            problem = f"a prompt must have fewer than {self._context} tokens, got {length}"
        elif not 0 <= min(request.prompt_tokens) <= max(request.prompt_tokens) < self._vocabulary:
            # vLLM does not survive one that its embedding does not have.
            problem = f"tokens must be from 0 to {self._vocabulary - 1}, got {max(request.prompt_tokens)}"
        elif shaped := request.sampling.shaped:
            problem = f"{', '.join(shaped)}: only Kitae's own engines follow them"
        else:
            problem = self._dialect.refusal(request.sampling)
        if problem is not None:
            raise RequestError(f"request {request.id!r}: {problem}")

    def _issue(self) -> None:
        """Give the server the requests that wait, unless it must stand still."""
        if self._paused or self._halted or self._shut or self._closed or self.lost.done():
            return
        for flight in self._ledger.open():
            if flight.holder is None and flight.ending is None:
                prior = flight.progress()
                name = f"{self._prefix}-{next(self._names)}"
                attempt = Attempt(name, flight, before=prior, stamp=self.version)
                request = self._ledger.issue(flight, attempt)
                request = replace(request, seed=continued_seed(request.seed, len(prior.tokens)))
                self._attempts.add(attempt)
                self._note_busy()
                attempt.task = self._talks.start(self._follow(attempt, request))

    async def _follow(self, attempt: Attempt, request: Request) -> None:
        """Take what the server sends for one request, to its end."""
        path, body = self._dialect.request(attempt.name, request, self.version)
        try:
            async for event in self._line.events(path, body):
                self._heard = True
                news = self._dialect.news(event, attempt.told)
                version = attempt.note(news, self.version)
                if self._shut:
                    attempt.waiting.append((news, version))
                else:
                    self._take(attempt, news, version)
            self._ended(attempt)
        except Refusal as refused:
            self._drop(attempt)
            attempt.flight.settle(RequestError(f"request {request.id!r}: {refused}"))
        except LineLost as error:
            self._lose(str(error))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            self._lose(f"it sent what {self._dialect.kind} does not send: {type(error).__name__}: {error}")

    def _release(self) -> None:
        """What the server has sent while it was shut counts."""
        for attempt in list(self._attempts):
            waiting, attempt.waiting = attempt.waiting, []
            for news, version in waiting:
                self._take(attempt, news, version)
            self._conclude(attempt)

    def _take(self, attempt: Attempt, news: StreamEvent, version: int) -> None:
        """Count tokens, unless the response was cut before them."""
        if attempt.cut is not None:
            return
        length = attempt.length
        attempt.add(news, version)
        self._generated += len(news.tokens)
        if stops := attempt.flight.request.sampling.stop_strings:
            attempt.cut = self._stop_in((*attempt.before.tokens, *attempt.tokens), length, stops)
            if attempt.cut is not None and attempt.last is None:
                self._tasks.start(self._insist([attempt]))
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
        """The server has sent all."""
        if attempt.last is None:
            raise LineLost("an answer ended without a reason")
        prompt = len(attempt.flight.request.prompt_tokens) + len(attempt.before.tokens)
        self._prompt_tokens += prompt - attempt.cached
        self._shared_tokens += attempt.cached
        attempt.task = None
        self._conclude(attempt)

    def _conclude(self, attempt: Attempt) -> None:
        """Give the caller its result, if all is there and may be known. A request that was asked to end ends at once,
        with what was sent before the server was shut."""
        last, flight = attempt.last, attempt.flight
        if last is None or attempt.task is not None or (attempt.waiting and last.finish != "abort"):
            return
        attempt.date(last.spans)
        self._drop(attempt)
        flight.sampled = attempt.sampled
        if attempt.cut is not None:
            flight.complete(attempt.sampled, "stop")
        elif last.finish != "abort":
            assert last.finish is not None
            flight.complete(attempt.sampled, last.finish)
        elif flight.ending is not None:
            flight.complete(attempt.sampled, flight.ending)
        else:  # some other user of the server had it end: it is continued
            flight.holder = None
            self._issue()

    def _drop(self, attempt: Attempt) -> None:
        """It is over: nobody listens any more."""
        self._attempts.discard(attempt)
        if attempt.task is not None and attempt.task is not asyncio.current_task():
            attempt.task.cancel()
        self._note_busy()

    def _abandon(self, attempt: Attempt) -> None:
        """Its caller is gone. A server that does not know would go on to the end."""
        self._drop(attempt)
        if not self._closed:
            self._tasks.start(self._abort([attempt]))

    async def _abort(self, attempts: Sequence[Attempt]) -> None:
        try:
            for attempt in attempts:
                await self._dialect.abort(self._line, attempt.name)
        except (LineLost, Refusal) as error:
            self._lose(str(error))

    async def abort(self, request_id: str) -> None:
        self._check_open()
        await self._end_early("abort", [f for f in self._ledger.open() if f.request.id == request_id])

    async def suspend(self) -> None:
        self._check_open()
        await self._end_early("suspended", self._ledger.open())

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
        """Have the server end these, however often that must be said; one that does not is lost."""
        futures = [attempt.flight.future for attempt in attempts]
        for _ in range(int(self._limits.answer / _INSIST)):
            await self._abort([attempt for attempt in attempts if attempt in self._attempts])
            _, left = await asyncio.wait(futures, timeout=_INSIST)
            if not left:
                return
        if any(attempt in self._attempts for attempt in attempts):
            self._lose(f"it did not end a request within {self._limits.answer:g} s")

    def progress(self, known: Mapping[str, int]) -> dict[str, Sampled]:
        for attempt in self._attempts:
            attempt.flight.sampled = attempt.sampled
        return self._ledger.progress(known)

    def stats(self) -> EngineStats:
        running = min(len(self._attempts), len(self._ledger))
        return EngineStats(
            version=self.version,
            prompt_tokens=self._prompt_tokens,
            prompt_tokens_shared=self._shared_tokens,
            generated_tokens=self._generated,
            preemptions=0,
            running=running,
            waiting=len(self._ledger) - running,
            busy_seconds=self._busy.seconds,
            repaired=self._repaired,
        )

    def _note_busy(self) -> None:
        """It is busy while the server works on something."""
        self._busy.note(bool(self._attempts) and not self._paused)

    # Pauses, weights and probes.

    async def pause(self) -> None:
        self._check_open()
        self._paused = True
        await self._adjust()

    async def resume(self) -> None:
        self._check_open()
        self._paused = False
        await self._adjust()
        self._issue()

    async def _adjust(self) -> None:
        """Have the server stand still, or go on, as it must now."""
        async with self._turn:
            must_stand = self._paused or self._halted or self._broken
            await self._or_lost(self._stop() if must_stand else self._go_on())
        self._note_busy()

    async def _stop(self) -> None:
        self._shut = True
        if not self._stands:
            await self._dialect.pause(self._line)
            self._stands = True

    async def _go_on(self) -> None:
        if self._stands:
            await self._dialect.resume(self._line)
            self._stands = False
        self._shut = False
        self._release()

    async def update_weights(self, update: WeightUpdate) -> int:
        self._check_open()
        return await self._updates.shielded(self._update(update))

    async def _update(self, update: WeightUpdate) -> int:
        async with self._updating, hold_update(self._weight_store, update.version, update.manifest) as manifest:
            try:  # what is wrong with a version is found before the server gets it
                self._repaired += await asyncio.to_thread(self._folder.take, manifest)
            except WeightsDamaged:
                self._halted = True
                await self._adjust()
                raise
            self._halted = False
            async with self._turn:
                await self._or_lost(self._renew(update.recompute))
            await self._adjust()
        if self._broken:
            raise WeightsDamaged(f"version {update.version} did not reach {self.name} whole")
        self._issue()
        return self.version

    async def _renew(self, recompute: bool) -> None:
        await self._stop()
        await self._load(self._folder.probe.version, recompute=recompute)
        if not self._broken:
            await self._check_probe(self._folder.probe)

    async def _load(self, version: int, *, recompute: bool) -> None:
        """Weights, then the caches that were made with others, then the name: in this order, or a token is sampled from
        what nobody trained."""
        self._broken = bool(await self._dialect.load(self._line, self._folder.current))
        if not self._broken:
            await self._dialect.forget(self._line, recompute=recompute)
            await self._dialect.label(self._line, version)
            self.version = version

    async def probe(self) -> tuple[Probe, ...]:
        self._check_open()
        async with self._turn:
            return (await self._or_lost(self._score()),)

    async def _check_probe(self, expected: Probe) -> None:
        found = await self._score()
        if wrong := found.problem("it", expected.version, expected.logprobs, self._tolerance, "the published weights"):
            raise LineLost(wrong)

    async def _score(self) -> Probe:
        """By whoever has the turn."""
        if self._stands:
            await self._dialect.resume(self._line)  # what it sends of others meanwhile waits: it is shut
        logprobs = await self._dialect.score(self._line, probe_tokens(self._vocabulary))
        found = Probe(await self._dialect.version(self._line), logprobs)
        if self._stands:
            await self._dialect.pause(self._line)
        return found


class Stopwatch:
    """Seconds in which something was so."""

    def __init__(self) -> None:
        self._passed = 0.0
        self._since: float | None = None

    def note(self, so: bool) -> None:
        """How it is from now on."""
        self._passed = self.seconds
        self._since = time.monotonic() if so else None

    @property
    def seconds(self) -> float:
        return self._passed + (time.monotonic() - self._since if self._since is not None else 0.0)


def continued_seed(seed: int, prior: int) -> int:
    """Of the draws after `prior` tokens: with the same seed, a server would repeat the first draws."""
    if not prior:
        return seed % 2**63
    return int.from_bytes(hashlib.blake2b(f"{seed} {prior}".encode(), digest_size=8).digest(), "little") % 2**63
