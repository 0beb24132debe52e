"""The requests in flight of an engine that lives elsewhere, in another process or behind a server.

Whoever does the work is expendable: the ledger has all that is needed to give a request to somebody else, who continues
it from what the first had told. It knows *holders* by identity alone; how to talk to them is the engine's affair.
"""

import asyncio
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar

from kitae.engines.base import Completion, Request, Sampled
from kitae.errors import EngineError, RequestError
from kitae.types import ExpertArray, FinishReason

H = TypeVar("H")
Ending = Literal["abort", "suspended"]


@dataclass(slots=True, eq=False)
class Flight(Generic[H]):
    """A request whose result is awaited, and what it has so far.

    number: names it on the wire, where the id may have been used before. holder: who works on it. ending: what it was
    asked to end with by `abort` or `suspend`.
    """

    number: int
    request: Request
    future: "asyncio.Future[Completion]"
    sampled: Sampled
    holder: H | None = None
    ending: Ending | None = None

    def progress(self, known: int = 0) -> Sampled:
        """What to continue from, after the first `known` tokens. The last reported token may have been the one that
        ended it: it is drawn again."""
        s = self.sampled
        return s.until(max(len(self.request.prior.tokens), len(s.tokens) - 1)).after(known)

    def settle(self, result: Completion | EngineError) -> None:
        """Give the caller its result; one that has it, or is gone, does not notice."""
        if self.future.done():
            return
        if isinstance(result, EngineError):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)

    def complete(self, sampled: Sampled, finish: FinishReason, experts: ExpertArray | None = None) -> None:
        self.settle(Completion.of(self.request.id, sampled, finish, experts))

    def end_early(self, ending: Ending) -> None:
        """With what it has."""
        self.settle(self.ended(ending))

    def ended(self, ending: Ending) -> Completion:
        """What it has, as the end of it."""
        return Completion.of(self.request.id, self.progress(), ending)


class Ledger(Generic[H]):
    """`with ledger.enter(request) as flight: … await flight.future`."""

    def __init__(self) -> None:
        self._flights: dict[str, Flight[H]] = {}
        self._numbered: dict[int, Flight[H]] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._flights)

    @contextmanager
    def enter(self, request: Request) -> Iterator[Flight[H]]:
        """In flight until the block ends, however it does; `RequestError` if its id is."""
        if request.id in self._flights:
            raise RequestError(f"request id {request.id!r} is in flight already")
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        flight: Flight[H] = Flight(next(self._numbers), request, future, request.prior)
        self._flights[request.id] = self._numbered[flight.number] = flight
        try:
            yield flight
        finally:
            del self._flights[request.id], self._numbered[flight.number]

    def find(self, number: int) -> Flight[H] | None:
        """None: its caller is gone."""
        return self._numbered.get(number)

    def open(self) -> list[Flight[H]]:
        """Those without a result, in the order they came."""
        return [flight for flight in self._flights.values() if not flight.future.done()]

    def issue(self, flight: Flight[H], holder: H) -> Request:
        """Give it to a holder: the request to send, which continues from what is known."""
        flight.holder = holder
        flight.sampled = flight.progress()
        return replace(flight.request, prior=flight.sampled)

    def grow(self, number: int, start: int, news: Sampled) -> None:
        """Tokens from position `start` on, as the holder told."""
        if (flight := self.find(number)) is not None:
            flight.sampled = flight.sampled.until(start).then(news)

    def end_early(self, ending: Ending, holder: H | None, request_id: str | None = None) -> bool:
        """One, or all, are to end. Whether `holder` works on any, and must be asked; the others end with what they
        have."""
        asked = False
        for flight in self._flights.values():
            if request_id in (None, flight.request.id):
                flight.ending = ending
                if holder is None or flight.holder is not holder:
                    flight.end_early(ending)
                else:
                    asked = True
        return asked

    def lose(self, holder: H) -> None:
        """Nobody works on its requests now. Those that it was asked to end, end with what it had told."""
        for flight in self._flights.values():
            if flight.holder is holder:
                flight.holder = None
                if flight.ending is not None:
                    flight.end_early(flight.ending)

    def fail(self, error: EngineError) -> None:
        """All of them."""
        for flight in self._flights.values():
            flight.settle(error)

    def progress(self, known: Mapping[str, int]) -> dict[str, Sampled]:
        """See `Engine.progress`."""
        return {id: flight.progress(known.get(id, 0)) for id, flight in self._flights.items()}
