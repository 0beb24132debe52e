"""Verifier pools at posts of a cluster, as one: checks are shared out among them by frames.

    score() ─► the host with the fewest checks ── score ─────────► done
                 ▲                │ the host is lost: killed, silent, its node gone
                 └── once more ◄──┘ and another host is started in its place

A check ends once: what a lost host would have said is never heard. Each host has its own workers, its own companion (a
reward model, say) and its own cache of what was judged.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from kitae.errors import KitaeError, VerifierError
from kitae.store.columns import StoredText
from kitae.types import LazyText, Prompt, Score
from kitae.verifiers.config import VerifierConfig
from kitae.verifiers.pool import PoolStats, gold_of
from kitae.workers.background_tasks import Chores
from kitae.workers.base import Cluster, Duty, Post
from kitae.workers.connection import Deadlines, Link, PostLost
from kitae.workers.frames import Frame, pack_frame

POOL = "verifiers"
_TRIES = 3  # hosts that a check may be lost with before it counts as impossible
_RETRY = 30.0  # seconds from a host that could not be started to the next try
_NOTHING: Mapping[str, Any] = MappingProxyType({})

log = logging.getLogger("kitae")


@dataclass(eq=False, slots=True)
class _Check:
    """`_Check(17, {"response": …}, future)`: lost: hosts that had it and are gone."""

    number: int
    job: Mapping[str, Any]
    future: "asyncio.Future[Score]"
    host: "_Hosted | None" = None
    lost: int = 0


class HostedPool:
    """The same face as `kitae.verifiers.pool.VerifierPool`, with `hosts` of them at posts of `cluster`.

        async with HostedPool(config.verifier, cluster, hosts=4, patience=30, note=note) as pool: …

    All hosts must come up with `start`. One that is lost later is replaced; without a place for it the others go on,
    and it is tried again every 30 s. With none left, checks wait for `patience` seconds and then end as errors, as does
    a check that was lost with 3 hosts: it may be what ended them.
    """

    def __init__(
        self,
        config: VerifierConfig,
        cluster: Cluster,
        hosts: int,
        patience: float = 30.0,
        note: Callable[[str], None] | None = None,
        limits: Deadlines | None = None,
    ) -> None:
        self.timeout = config.timeout
        self.stats = PoolStats()
        self._name = config.name
        self._setup = config.model_dump(include={"name", "params", "workers", "timeout"})
        self._cluster = cluster
        self._size = hosts
        self._patience = patience
        self._note = note or log.info
        self._limits = limits or Deadlines()
        self._hosts: list[_Hosted] = []
        self._checks: dict[int, _Check] = {}
        self._numbers = itertools.count()
        self._names = itertools.count()
        self._changed = asyncio.Event()
        self._chores = Chores()
        self._running = False

    def gold(self, prompt: Prompt) -> str | None:
        """A response to the prompt that must score 1, where one is known."""
        return gold_of(self._name, prompt)

    async def start(self) -> None:
        """`VerifierError` if the verifier cannot be loaded, refuses its params, or there is no place for a host."""
        found = await asyncio.gather(*(self._begin() for _ in range(self._size)), return_exceptions=True)
        self._hosts = [host for host in found if isinstance(host, _Hosted)]
        self._running = True
        errors = [error for error in found if isinstance(error, BaseException)]
        if errors:
            await self.close()
            raise errors[0]
        for host in [each for each in self._hosts if each.lost is not None]:
            self._on_loss(host)  # while the others were started

    async def score(self, response: str | LazyText, reference: Any, context: Mapping[str, Any] = _NOTHING) -> Score:
        if not self._running:
            raise VerifierError("a verifier pool scores between start() and close(), got a call outside")
        job = {"response": wired(response), "reference": reference, "context": dict(context)}
        check = _Check(next(self._numbers), job, asyncio.get_running_loop().create_future())
        self._checks[check.number] = check
        try:
            score = await self._carry_out(check)
        finally:
            del self._checks[check.number]
            if check.host is not None:
                check.host.load -= 1
                if not check.future.done():
                    check.host.send(pack_frame({"drop": check.number}))
        self.stats.checked += 1
        self.stats.errors += not score.valid
        return score

    async def close(self) -> None:
        self._running = False
        self._tell()
        await self._chores.end()
        for check in self._checks.values():
            _settle(check, Score.error("the verifier pool was closed"))
        hosts, self._hosts = self._hosts, []
        await asyncio.gather(*(host.close() for host in hosts))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # Checks.

    async def _carry_out(self, check: _Check) -> Score:
        if not self._hosts and (why := await self._wait()):
            return Score.error(why)
        try:
            self._issue(check)
        except (TypeError, ValueError, RecursionError) as error:
            return Score.error(f"reference and context must be JSON values: {error}")
        return await check.future

    async def _wait(self) -> str:
        """Until there is a host; why there is none."""
        try:
            async with asyncio.timeout(self._patience):
                while not self._hosts and self._running:
                    await self._changed.wait()
        except TimeoutError:
            return f"no verifier host is left, and none was found within {self._patience:g} s"
        return "" if self._running else "the verifier pool was closed"

    def _issue(self, check: _Check) -> None:
        packed = pack_frame({"check": check.number, **check.job})
        check.host = min(self._hosts, key=lambda host: host.load)
        check.host.load += 1
        check.host.send(packed)

    def _hear(self, frame: Frame) -> None:
        match frame.header:
            case {"done": number, "score": score} if number in self._checks:
                _settle(self._checks[number], Score(**score))
            case {"note": text}:
                self._note(text)
            case _:  # a sign of life, or the score of a check that nobody waits for
                pass

    # Hosts.

    async def _begin(self) -> "_Hosted":
        name = f"verifier host {next(self._names)}"
        duty = Duty(name, "kitae.verifiers.pool_process", self._setup, POOL)
        try:
            return await _Hosted.start(
                self._cluster, duty, self._limits, VerifierError, hear=self._hear, on_loss=self._on_loss
            )
        except PostLost as error:
            raise VerifierError(f"{name} could not start: {error}") from None

    def _on_loss(self, host: "_Hosted") -> None:
        if host not in self._hosts or not self._running:
            return
        self._hosts.remove(host)
        self.stats.restarts += 1
        self._note(f"a verifier host was lost, {len(self._hosts)} are left, and another is started: {host.obituary}")
        for check in [each for each in self._checks.values() if each.host is host and not each.future.done()]:
            check.host, check.lost = None, check.lost + 1
            if check.lost >= _TRIES:
                _settle(check, Score.error(f"its verifier host was lost {check.lost} times"))
            else:
                self._chores.have(self._again(check))
        self._chores.have(self._replace(host))

    async def _again(self, check: _Check) -> None:
        self.stats.retries += 1
        why = "" if self._hosts else await self._wait()
        if why:
            _settle(check, Score.error(why))
        elif not check.future.done():
            self._issue(check)

    async def _replace(self, lost: "_Hosted") -> None:
        await lost.end()
        while True:
            try:
                self._hosts.append(await self._begin())
                self._tell()
                return
            except KitaeError as error:
                self._note(f"no verifier host could be started; it is tried again in {_RETRY:g} s: {error}")
                await asyncio.sleep(_RETRY)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class _Hosted(Link):
    """`hear` is called with every frame that answers no call, `on_loss` once, when it is lost."""

    def __init__(
        self,
        post: Post,
        limits: Deadlines,
        error: type[KitaeError],
        hear: Callable[[Frame], None],
        on_loss: "Callable[[_Hosted], None]",
    ) -> None:
        super().__init__(post, limits, error)
        self.load = 0
        self._tell = hear
        self._report_loss = on_loss

    def _hear(self, frame: Frame) -> None:
        self._tell(frame)

    def _on_loss(self) -> None:
        self._report_loss(self)


def wired(response: str | LazyText) -> Any:
    """A text, or where it lies: the host reads it there."""
    if not isinstance(response, StoredText):
        return str(response)
    return {"folder": str(response.files.folder), "filed": response.filed.record}


def _settle(check: _Check, score: Score) -> None:
    with suppress(asyncio.InvalidStateError):
        check.future.set_result(score)
