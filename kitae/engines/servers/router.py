"""Requests among servers: who gets one, what is told of it as it comes, and how it ends.

A request is given to a server as an *attempt*. What a server that is shut tells waits in it. Draws of a server are a
stream that begins with the request: a continued request gets a seed that is derived from its own and the number of
tokens it has, and goes on with other tokens than it would have had undisturbed.
"""

import asyncio
import hashlib
import itertools
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from kitae.engines.base import Request
from kitae.engines.requests_in_flight import Ending, Flight, Ledger
from kitae.engines.servers.dialect import Tidings
from kitae.engines.servers.request_progress import Attempt
from kitae.engines.servers.server import Peer
from kitae.engines.servers.server_client import LineLost, Refusal
from kitae.engines.servers.server_pool import Roster
from kitae.errors import RequestError
from kitae.workers.connection import Deadlines

_WORTH_NOTING = 64  # tokens of an attempt after which the ledger is told
_INSIST = 0.25  # seconds after which a server is told again to abort a request: it may not have known it yet
_MOST_REMEMBERED = 100_000  # sessions, and rollouts


class Traffic:
    """paused: by the engine's caller. halted: weights did not arrive whole, no step until whole ones come. In both
    cases no request is given to a server. prompt_tokens, shared_tokens, generated: that were computed, found computed,
    and sampled."""

    def __init__(
        self, ledger: Ledger[Attempt], roster: Roster, limits: Deadlines, decode: Callable[[Sequence[int]], str]
    ) -> None:
        self.paused = False
        self.halted = False
        self.prompt_tokens = self.shared_tokens = self.generated = 0
        self.busy = Stopwatch()
        self._ledger = ledger
        self._roster = roster
        self._limits = limits
        self._decode = decode
        self._attempts: set[Attempt] = set()
        self._sessions: OrderedDict[str, Peer] = OrderedDict()  # who had the last request of a session
        self._answered: OrderedDict[str, frozenset[str]] = OrderedDict()  # by whom, see `sources`
        self._names = itertools.count()
        self._prefix = secrets.token_hex(4)  # others may use the same server

    @property
    def running(self) -> int:
        return min(len(self._attempts), len(self._ledger))

    def sources(self, rollout: str) -> frozenset[str]:
        """See `kitae.engines.base.Accountable`."""
        return self._answered.get(rollout, frozenset())

    def note_all(self) -> None:
        """Tell the ledger what is known of each request."""
        for attempt in self._attempts:
            attempt.flight.sampled = attempt.sampled

    def note_busy(self) -> None:
        """It is while a server works on something."""
        self.busy.note(bool(self._attempts) and not self.paused)

    # Whom a request is given to.

    def issue(self) -> None:
        """Give what waits to servers that serve."""
        if self.paused or self.halted or self._roster.closed:
            return
        for flight in self._ledger.open():
            if flight.holder is None and flight.ending is None:
                peer = self._choose(flight.request)
                if peer is None:
                    return
                self._send(flight, peer)

    def _choose(self, request: Request) -> Peer | None:
        """Where requests with its share key are, or the last one of its session was, or who has the fewest."""
        peers = [peer for peer in self._roster.peers if not peer.shut]
        if not peers:
            return None
        sharing = [peer for peer in peers if request.share and peer.sharing[request.share]]
        session = self._sessions.pop(request.session, None)
        if sharing:
            found = sharing[0]
        else:
            found = session if session in peers else min(peers, key=lambda peer: peer.sharing.total())
        if request.session:
            self._sessions[request.session] = found
            _shorten(self._sessions)
        return found

    def _send(self, flight: Flight[Attempt], peer: Peer) -> None:
        prior = flight.progress()
        name = f"{self._prefix}-{next(self._names)}"
        attempt = Attempt(name, flight, peer, before=prior, stamp=peer.version)
        request = self._ledger.issue(flight, attempt)
        request = replace(request, seed=_seed(request.seed, len(prior.tokens)))
        peer.sharing[request.share] += 1
        self._attempts.add(attempt)
        self.note_busy()
        attempt.task = peer.have(self._follow(attempt, request))

    # What is told of it.

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
            self._roster.lose(peer, str(error))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            why = f"it told what {dialect.kind} does not tell: {type(error).__name__}: {error}"
            self._roster.lose(peer, why)

    def _hear(self, attempt: Attempt, news: Tidings) -> None:
        version = attempt.hear(news)
        if attempt.peer.shut:
            attempt.waiting.append((news, version))
        else:
            self._take(attempt, news, version)

    def release(self, peer: Peer) -> None:
        """What a server has told while it was shut counts."""
        for attempt in self._of(peer):
            waiting, attempt.waiting = attempt.waiting, []
            for news, version in waiting:
                self._take(attempt, news, version)
            self._conclude(attempt)

    def _take(self, attempt: Attempt, news: Tidings, version: int) -> None:
        """Count tokens, unless the response was cut before them."""
        if attempt.cut is not None:
            return
        length = attempt.length
        attempt.add(news, version)
        self.generated += len(news.tokens)
        if stops := attempt.flight.request.sampling.stop_strings:
            attempt.cut = self._stop_in((*attempt.before.tokens, *attempt.tokens), length, stops)
            if attempt.cut is not None and attempt.last is None:
                self._roster.keep(self._insist([attempt]))
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

    # How it ends.

    def _ended(self, attempt: Attempt) -> None:
        """The server has told all."""
        if attempt.last is None:
            raise LineLost("an answer ended without a reason")
        prompt = len(attempt.flight.request.prompt_tokens) + len(attempt.before.tokens)
        self.prompt_tokens += prompt - attempt.cached
        self.shared_tokens += attempt.cached
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
            self.issue()

    def forsake(self, peer: Peer) -> None:
        """A server is lost: others go on from what it had told."""
        for attempt in self._of(peer):
            attempt.flight.sampled = attempt.sampled
            self._drop(attempt)
            self._remember(attempt)
            self._ledger.lose(attempt)
        self.issue()

    def abandon(self, attempt: Attempt) -> None:
        """Its caller is gone. A server that is not told would go on to the end."""
        self._drop(attempt)
        work = attempt.peer.seat.dialect.abort(attempt.peer.line, attempt.name)
        self._roster.keep(self._roster.or_lose(attempt.peer, work))

    async def end_early(self, ending: Ending, flights: Iterable[Flight[Attempt]]) -> None:
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
                await self._roster.or_lose(peer, _each(peer.seat.dialect.abort(peer.line, name) for name in names))
            _, left = await asyncio.wait(futures, timeout=_INSIST)
            if not left:
                return
        for attempt in attempts:
            if attempt in self._attempts:
                self._roster.lose(attempt.peer, f"it did not end a request within {self._limits.answer:g} s")

    def drop_all(self) -> dict[Peer, list[str]]:
        """The names of what servers still have."""
        left: dict[Peer, list[str]] = {}
        for attempt in list(self._attempts):
            left.setdefault(attempt.peer, []).append(attempt.name)
            self._drop(attempt)
        return left

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
        self.note_busy()

    def _remember(self, attempt: Attempt) -> None:
        if attempt.tokens:
            rollout = attempt.flight.request.id.rpartition("/")[0]
            self._answered[rollout] = self._answered.pop(rollout, frozenset()) | {attempt.peer.name}
            _shorten(self._answered)

    def _of(self, peer: Peer) -> list[Attempt]:
        return [attempt for attempt in self._attempts if attempt.peer is peer]


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


def _seed(seed: int, prior: int) -> int:
    """Of the draws after `prior` tokens: with the same seed, a server would repeat the first draws."""
    if not prior:
        return seed % 2**63
    return int.from_bytes(hashlib.blake2b(f"{seed} {prior}".encode(), digest_size=8).digest(), "little") % 2**63


def _shorten(found: "OrderedDict[str, Any]") -> None:
    if len(found) > _MOST_REMEMBERED:
        found.popitem(last=False)


async def _each(work: Iterable[Awaitable[None]]) -> None:
    for each in work:
        await each
