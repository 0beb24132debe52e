"""A pool of workers of one kind: the one place that routes, waits, replaces, retries and resizes.

    work ──► the member that has its share key, or its session, or else the least to do ──► result
               ▲                          │ the member is lost, or leaves
               └── elsewhere, by `use` ◄──┘        └──► another is started in its place

Members are plain. A member fails once, with the error that means that it is lost, and never retries. What its work was
goes on elsewhere: whoever uses the pool takes another member and starts from what is known.
"""

import asyncio
import itertools
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar, runtime_checkable

from kitae.clock import now
from kitae.errors import KitaeError, WorkerLost, root_cause
from kitae.workers.background_tasks import BackgroundTasks
from kitae.workers.process_status import cause_of

_MOST_SESSIONS = 100_000  # that are remembered

log = logging.getLogger("kitae")


class Member(Protocol):
    async def close(self) -> None: ...


@runtime_checkable
class Watched(Protocol):
    """A member that knows when it is lost. lost: becomes the reason then."""

    @property
    def lost(self) -> "asyncio.Future[str]": ...


M = TypeVar("M", bound=Member)
T = TypeVar("T")
Join = Callable[[M], Awaitable[None]]

_ALIKE = 3  # deaths by one error after which nobody is put in the place
_SOON = 300.0  # seconds from one to the next


@dataclass(frozen=True, slots=True)
class Replacement:
    """When a lost member is replaced: `Replacement(retry=1.0, most=3, within=60.0)`.

    retry: seconds from a start that failed to the next one. most: how often a member and its successors may be lost, or
    fail to start, within so many seconds; then their place stays empty. None: as often as it takes.
    """

    retry: float = 30.0
    most: int | None = None
    within: float = 60.0


@dataclass(eq=False, slots=True)
class Membership(Generic[M]):
    """A member that serves. number: kept by its successors. name: for messages. load: what it works on now."""

    member: M
    number: int
    name: str
    load: int = 0


class WorkerPool(Generic[M]):
    """`size` members, each made by `make(number)`. Nothing is started before `start`.

    make: None: members only `join`. patience: seconds that work waits for a member when none is left; then it fails.
    note: gets what the user should know: losses, replacements, starts that failed. at_end: called when all members have
    been closed. admit: checks a new member and has it join; it is called with the member and with what lets it join,
    and raises a `KitaeError` where it must not join.

    A member raises `WorkerLost`, or an error of that kind, when it is lost. A subclass says what its members and the
    whole are called, and which error is raised when no member is left.
    """

    what: ClassVar[str] = "worker"
    whole: ClassVar[str] = "pool"
    error: ClassVar[type[KitaeError]] = KitaeError

    def __init__(
        self,
        make: Callable[[int], Awaitable[M]] | None,
        size: int,
        *,
        patience: float = 300.0,
        replacement: Replacement | None = None,
        note: Callable[[str], None] | None = None,
        at_end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.size = size
        self.losses = 0
        self.refused = 0  # starts that failed, and members that were not admitted
        self.note = note or log.warning
        self.admit: Callable[[M, Join[M]], Awaitable[None]] = _join_at_once
        self._make = make
        self._patience = patience
        self._at_end = at_end
        self._replacement = replacement or Replacement()
        self._places: list[Membership[M]] = []
        self._starting: dict[int, asyncio.Task[None]] = {}
        self._empty: dict[int, str] = {}  # places that stay so, and why
        self._failures: dict[int, list[float]] = {}  # when, of each place
        self._causes: dict[int, list[tuple[float, str]]] = {}  # of losses: when, and the error, of each place
        self._not_before = 0.0  # no member is started
        self._complained = False
        self._last_loss = ""
        self._failure: KitaeError | None = None
        self.running = False
        self._closed = False
        self._changed = asyncio.Event()
        self._homes: dict[str, Membership[M]] = {}  # of share keys that are in use
        self._sharing: Counter[str] = Counter()
        self._sessions: OrderedDict[str, Membership[M]] = OrderedDict()
        self._tasks = BackgroundTasks()
        self._farewells = BackgroundTasks()

    @property
    def members(self) -> tuple[M, ...]:
        return tuple(place.member for place in self._places)

    def name_of(self, number: int) -> str:
        return f"{self.what} {number}"

    # The life of the pool.

    async def start(self) -> None:
        """Start all members, or none: an error is raised when those that came up have been closed."""
        assert self._make is not None, "members of this pool only join"
        starting: list[asyncio.Task[M]] = []
        try:
            async with asyncio.TaskGroup() as group:
                starting += [group.create_task(self._started(number)) for number in range(self.size)]
            for number, task in enumerate(starting):
                await self._enter(task.result(), number)
            self.running = True
        except BaseException as error:
            came_up = [task.result() for task in starting if not task.cancelled() and task.exception() is None]
            await asyncio.gather(*(member.close() for member in came_up), return_exceptions=True)
            await self.close()
            if isinstance(error, BaseExceptionGroup):
                raise root_cause(error) from None
            raise

    async def close(self) -> None:
        self._closed, self.running = True, False
        self._wake()
        await self._tasks.cancel()
        places, self._places = self._places, []
        await asyncio.gather(*(place.member.close() for place in places))
        await self._farewells.finish()
        if self._at_end is not None:
            at_end, self._at_end = self._at_end, None
            await at_end()

    def check_open(self) -> None:
        if self._failure is not None:
            raise self.error(str(self._failure)) from self._failure
        if self._closed:
            raise self.error(f"the {self.whole} was closed")

    # Work.

    async def some(self, wanted: Callable[[], bool] = lambda: True) -> None:
        """Wait until there is a member, or nobody wants one any more; an error where that takes too long."""
        try:
            async with asyncio.timeout(self._patience):
                while True:
                    self.check_open()
                    if self._places or not wanted():
                        return
                    await self._changed.wait()
        except TimeoutError:
            raise self.error(
                f"no {self.what} is left, and none was found within {self._patience:g} s; the last was lost: "
                f"{self._last_loss}"
            ) from None

    @contextmanager
    def use(self, share: str = "", session: str = "") -> Iterator[M]:
        """The member for one piece of work, of those that there are (see `some`). One that is lost over it is out."""
        place = self._choose(share, session)
        place.load += 1
        self._sharing[share] += 1
        try:
            yield place.member
        except WorkerLost as error:
            self._lose(place, str(error))
            raise
        finally:
            place.load -= 1
            self._sharing[share] -= 1
            if not self._sharing[share]:
                del self._sharing[share]
                self._homes.pop(share, None)

    def _choose(self, share: str, session: str) -> Membership[M]:
        """Where work with this share key is, or where the last of this session was, or which has the least."""
        known = self._sessions.pop(session, None)
        place = self._homes.get(share) or known or min(self._places, key=lambda place: place.load)
        if share:
            self._homes[share] = place
        if session:
            self._sessions[session] = place
            if len(self._sessions) > _MOST_SESSIONS:
                self._sessions.popitem(last=False)
        return place

    async def broadcast(self, ask: Callable[[M], Awaitable[T]]) -> list[T]:
        """The results of all members but those that are lost over it. If some fail, the worst error, after all have
        ended: none is left half done."""
        asked = list(self._places)
        found = await asyncio.gather(*(ask(place.member) for place in asked), return_exceptions=True)
        for place, result in zip(asked, found, strict=True):
            if isinstance(result, WorkerLost):
                self._lose(place, str(result))
        errors = [each for each in found if isinstance(each, BaseException) and not isinstance(each, WorkerLost)]
        if errors:
            raise self._worst(errors)
        return [result for result in found if not isinstance(result, BaseException)]

    def _worst(self, errors: Sequence[BaseException]) -> BaseException:
        return errors[0]

    # Members come.

    def resize(self, size: int) -> None:
        """How many members there should be from now on."""
        if size != self.size:
            self.size = size
            self._maintain()

    async def join(self, member: M, number: int | None = None) -> None:
        """It serves from now on. Whoever lets it join has made sure that it may."""
        self.check_open()
        await self._enter(member, self._free_numbers(1)[0] if number is None else number)

    async def _enter(self, member: M, number: int) -> None:
        await self._prepare(member)
        self._before_change()
        place = self._serve(member, number)
        try:
            await self._welcome(member)
        except BaseException:
            if place in self._places:
                self._remove(place)
            raise
        self._wake()

    def _serve(self, member: M, number: int) -> Membership[M]:
        """Let it have work from now on, and be lost when it says so."""
        place = Membership(member, number, str(getattr(member, "name", self.name_of(number))))
        self._starting.pop(number, None)
        self._places.append(place)
        watched: object = member
        if isinstance(watched, Watched):
            watched.lost.add_done_callback(lambda lost: self._lose(place, lost.result()))
        return place

    async def _started(self, number: int) -> M:
        assert self._make is not None
        return await self._make(number)

    def _maintain(self) -> None:
        """Start members that are missing, and let go of those that are too many."""
        if self._closed or self._make is None:
            return
        excess = len(self._places) + len(self._starting) - self.size
        for number, task in list(self._starting.items())[: max(0, excess)]:
            task.cancel()
            del self._starting[number]
            excess -= 1
        for place in self._places[::-1][: max(0, excess)]:
            self._remove(place)
            self._tasks.start(self._let_go(place))
        if now() >= self._not_before:
            for number in self._free_numbers(-excess - len(self._empty)):
                self._starting[number] = self._tasks.start(self._add(number))

    def _free_numbers(self, count: int) -> list[int]:
        taken = {place.number for place in self._places} | self._starting.keys() | self._empty.keys()
        return list(itertools.islice((n for n in itertools.count() if n not in taken), max(0, count)))

    async def _add(self, number: int) -> None:
        """Start a member and have it join."""
        member: M | None = None

        async def join(member: M) -> None:
            await self.join(member, number)

        try:
            member = await self._started(number)
            await self.admit(member, join)
        except BaseException as error:
            if self._starting.get(number) is asyncio.current_task():
                del self._starting[number]
            if member is not None:
                await member.close()
            if not isinstance(error, KitaeError):
                raise
            self._start_failed(number, error)
        else:
            self._complained = False
            self.note(f"{self.name_of(number)} has joined: {len(self._places)} of {self.size} serve")

    def _start_failed(self, number: int, error: KitaeError) -> None:
        self.refused += 1
        retry = self._replacement.retry
        if self._counts(error) and self._is_spent(number, self.name_of(number), str(error)):
            return
        if not self._complained:  # once, until one joins
            self._complained = True
            self.note(
                f"no further {self.what} could be started: the run goes on with {len(self._places)} of {self.size}, "
                f"and tries again every {retry:g} s: {error}"
            )
        self._not_before = now() + retry
        self._tasks.start(self._again_after(retry))

    async def _again_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._maintain()

    def _is_spent(self, number: int, name: str, why: str) -> bool:
        """Count a loss or a failed start; whether the place stays empty from now on."""
        most, within = self._replacement.most, self._replacement.within
        if most is None:
            return False
        times = self._failures.setdefault(number, [])
        times.append(now())
        recent = sum(now() - then < within for then in times)
        if recent <= most:
            return False
        told = f"{name} was lost {recent} times within {within:g} s, the last time: {why}"
        self._leave_empty(number, name, told if most else f"{name}: {why}")
        return True

    def _dies_alike(self, number: int, name: str, why: str) -> bool:
        """Whether three members in one place ended by one error, soon after each other: a fourth would too."""
        causes = self._causes.setdefault(number, [])
        causes.append((now(), cause_of(why)))
        last = [cause for then, cause in causes[-_ALIKE:] if now() - then < _SOON * _ALIKE]
        if len(last) < _ALIKE or len({*last}) > 1 or not last[0]:
            return False
        self._leave_empty(number, name, f"{name} was lost {_ALIKE} times by the same error: {why}")
        return True

    def _leave_empty(self, number: int, name: str, told: str) -> None:
        self._empty[number] = told
        self.note(f"{name} is not replaced: {self._empty[number]}")
        if not self._places and len(self._empty) >= self.size:
            self._failure = self.error(f"no {self.what} is left: {'; '.join(self._empty.values())}")
            self._wake()

    # Members go.

    async def leave(self, member: M) -> None:
        """Its work goes on elsewhere; then it is closed."""
        place = next((p for p in self._places if p.member is member), None)
        if place is None:
            raise self.error(f"{self._a} that leaves must be a member of the pool, got another")
        if len(self._places) == 1:
            raise self.error(f"the last {self.what} of a pool cannot leave")
        self._remove(place)
        await self._let_go(place)

    async def _let_go(self, place: Membership[M]) -> None:
        await self._farewells.start(self._part(place))
        self.note(f"{self._a} has left: {len(self._places)} of {self.size} serve")

    async def _part(self, place: Membership[M]) -> None:
        with suppress(WorkerLost):  # and its work with it, which goes on elsewhere too
            await self._drain(place)
        await place.member.close()

    def lose(self, member: M, why: str) -> None:
        """It is of no use any more: it is closed, and replaced."""
        for place in [p for p in self._places if p.member is member]:
            self._lose(place, why)

    def _lose(self, place: Membership[M], why: str) -> None:
        """Once for each member, whoever notices first."""
        if place not in self._places:
            return
        self._remove(place)
        self.losses += 1
        self._last_loss = why
        self._farewells.start(place.member.close())
        spent = self._is_spent(place.number, place.name, why) or self._dies_alike(place.number, place.name, why)
        if not spent:
            what_now = ", and starts another" if self._make is not None else ""
            self.note(f"{self._a} was lost: the run goes on with {len(self._places)} of {self.size}{what_now}: {why}")
        self._maintain()
        self._wake()

    def _remove(self, place: Membership[M]) -> None:
        self._before_change()
        self._before_leave(place.member)
        self._places.remove(place)
        self._homes = {key: home for key, home in self._homes.items() if home is not place}
        for session in [session for session, home in self._sessions.items() if home is place]:
            del self._sessions[session]

    def _wake(self) -> None:
        """All who wait for a member."""
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def _a(self) -> str:
        return f"{'an' if self.what[0] in 'aeiou' else 'a'} {self.what}"

    # What a subclass may do.

    async def _prepare(self, member: M) -> None:
        """Before a member joins."""

    def _before_change(self) -> None:
        """Before there is a member more, or one less."""

    async def _welcome(self, member: M) -> None:
        """When it has joined."""

    def _before_leave(self, member: M) -> None:
        """Before it is out."""

    def _counts(self, error: KitaeError) -> bool:
        """Whether a start that failed with this error is one too many at some time."""
        return True

    async def _drain(self, place: Membership[M]) -> None:
        """Have a member that leaves give up its work."""


async def _join_at_once(member: M, join: Join[M]) -> None:
    await join(member)
