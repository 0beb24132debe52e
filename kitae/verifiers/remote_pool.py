"""Verifier pools in worker processes of a cluster, as one pool.

    score() ──► the host with the fewest checks ──► score
                    ▲            │ the host is lost: killed, silent, its node gone
                    └── again ◄──┘

Each host has its own workers, its own companion (a reward model, say) and its own cache of what was judged. Who gets a
check, and who replaces a lost host, is decided in `kitae.workers.pool`.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Self

from kitae.errors import VerifierError, WorkerLost
from kitae.store.columns import StoredText
from kitae.types import LazyText, Prompt, Score
from kitae.verifiers.config import VerifierConfig
from kitae.verifiers.given_functions import copies_in_text
from kitae.verifiers.pool import PoolStats, gold_of
from kitae.workers.base import Cluster, LaunchSpec
from kitae.workers.connection import Deadlines, RemoteWorker
from kitae.workers.frames import Frame
from kitae.workers.pool import Replacement, WorkerPool

POOL = "verifiers"
_TRIES = 3  # hosts that a check may be lost with before it counts as impossible
_RETRY = 30.0  # seconds from a host that could not be started to the next try
_NOTHING: Mapping[str, Any] = MappingProxyType({})

log = logging.getLogger("kitae")


class VerifierHost:
    """A worker process with a verifier pool: a plain member, which is lost once."""

    def __init__(self, remote: RemoteWorker) -> None:
        self.remote = remote
        self.lost = remote.lost

    @property
    def grouped(self) -> bool:
        return bool(self.remote.greeting["grouped"])

    async def scores(self, job: Mapping[str, Any]) -> list[Score]:
        """`WorkerLost` where the host is lost over it."""
        reply = await self.remote.call("score", limit=math.inf, **job)
        return [Score(**each) for each in reply.header["scores"]]

    async def close(self) -> None:
        await self.remote.close()


class HostedPool(WorkerPool[VerifierHost]):
    """Has the methods of `kitae.verifiers.pool.VerifierPool`, with `hosts` of them in worker processes of `cluster`.

        async with HostedPool(config.verifier, cluster, hosts=4, patience=30, note=note) as pool: …

    All hosts must come up at the start. One that is lost later is replaced; without a place for it the others go on,
    and it is tried again every 30 s. With none left, checks wait for `patience` seconds and then end as errors, as does
    a check that was lost with 3 hosts: it may be what ended them.
    """

    what = "verifier host"
    whole = "verifier pool"
    error = VerifierError

    def __init__(
        self,
        config: VerifierConfig,
        cluster: Cluster,
        hosts: int,
        patience: float = 30.0,
        note: Callable[[str], None] | None = None,
        limits: Deadlines | None = None,
    ) -> None:
        replacement = Replacement(retry=_RETRY)
        super().__init__(self._begin, hosts, patience=patience, replacement=replacement, note=note or log.info)
        self.timeout = config.timeout
        self.grouped = False
        self._stats = PoolStats()
        self._verifier = config.name
        self._setup = {
            **config.model_dump(include={"name", "params", "workers", "timeout"}),
            "held": copies_in_text(config.name, config.params),
        }
        self._cluster = cluster
        self._limits = limits or Deadlines()

    @property
    def stats(self) -> PoolStats:
        return replace(self._stats, restarts=self.losses)

    def gold(self, prompt: Prompt) -> str | None:
        """A response to the prompt that must score 1, where one is known."""
        return gold_of(self._verifier, prompt)

    async def score(self, response: str | LazyText, reference: Any, context: Mapping[str, Any] = _NOTHING) -> Score:
        (score,) = await self.scores([response], reference, [context])
        return score

    async def scores(
        self, responses: Sequence[str | LazyText], reference: Any, contexts: Sequence[Mapping[str, Any]]
    ) -> list[Score]:
        """Of the answers to one prompt: together, if the verifier is `grouped`."""
        if not self.running:
            raise VerifierError("a verifier pool scores between start() and close(), got a call outside")
        each = [(wired(r), dict(c)) for r, c in zip(responses, contexts, strict=True)]
        batches = [each] if self.grouped else [[one] for one in each]
        scored = (
            self._scored({"responses": [r for r, _ in b], "reference": reference, "contexts": [c for _, c in b]})
            for b in batches
        )
        found = [score for scores in await asyncio.gather(*scored) for score in scores]
        self._stats.checked += len(found)
        self._stats.errors += sum(not score.valid for score in found)
        return found

    async def _scored(self, job: Mapping[str, Any]) -> list[Score]:
        count = len(job["responses"])
        for tried in range(_TRIES):
            self._stats.retries += tried > 0
            try:
                await self.some()
                with self.use() as host:
                    return await host.scores(job)
            except WorkerLost:
                continue
            except VerifierError as error:
                return [Score.error(str(error))] * count
            except (TypeError, ValueError, RecursionError) as error:
                return [Score.error(f"reference and context must be JSON values: {error}")] * count
        return [Score.error(f"its verifier host was lost {_TRIES} times")] * count

    async def _begin(self, number: int) -> VerifierHost:
        name = self.name_of(number)
        spec = LaunchSpec(name, "kitae.verifiers.pool_process", self._setup, POOL)
        try:
            remote = await RemoteWorker.start(self._cluster, spec, self._limits, VerifierError, self._on_event)
        except WorkerLost as error:
            raise VerifierError(f"{name} could not start: {error}") from None
        host = VerifierHost(remote)
        self.grouped = host.grouped  # as all of them say
        return host

    def _on_event(self, frame: Frame) -> None:
        self.note(frame.header["text"])

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def wired(response: str | LazyText) -> Any:
    """A text, or where it lies: the host reads it there."""
    if not isinstance(response, StoredText):
        return str(response)
    return {"folder": str(response.files.folder), "filed": response.filed.record}
