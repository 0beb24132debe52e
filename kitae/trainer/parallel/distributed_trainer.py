"""A trainer in many processes: ranks in worker processes, each with a shard of the models, and their driver here.

What one process computes with all rows, the ranks compute with some rows each. Every call goes to all of them, in the
same order (`kitae.trainer.parallel.rank_process`). The trainer is lost with any of its ranks: what the others hold of
the weights is no use without it. Whoever drives the run goes on from the last checkpoint and the journal.
"""

import asyncio
import itertools
import logging
import os
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kitae.config.root import Root
from kitae.data.packing import pack
from kitae.errors import KitaeError, TrainerError, TrainerLost, WorkerLost, root_cause
from kitae.observe.meter import Totals
from kitae.trainer.base import Batch, Column, OutsideTeacher, annotate_with, annotated
from kitae.trainer.forward import split_rows, token_budget
from kitae.trainer.parallel.standing import hung, stragglers
from kitae.trainer.sample_wire import samples_to_wire, totals_of_wire
from kitae.types import Sample, SampleKey
from kitae.weights.base import Address, Manifest, Mode
from kitae.weights.from_shards import address_of, merged
from kitae.weights.process_group import host_store
from kitae.weights.published_version import ReadWriteLock, WeightStore
from kitae.workers.base import Cluster, LaunchSpec
from kitae.workers.connection import CallFailed, Deadlines, RemoteWorker
from kitae.workers.frames import Array, Frame

log = logging.getLogger("kitae")

POOL = "trainer"

_LIMITS = Deadlines(start=1800.0, answer=3600.0, silence=50.0, close=10.0)  # who is silent is named within a minute
_MEETING = 300.0  # seconds in which ranks must meet
_AFTERMATH = 2.0  # seconds in which the others may say what happened to them too
_meetings = itertools.count()


class RankedTrainer:
    """Implements `kitae.trainer.base.Trainer`. Nothing runs before `start`.

    module: whose `main` is a rank (`kitae.trainer.parallel.rank_process.run_rank`). teacher: one outside the ranks,
    which is asked while they compute.
    """

    def __init__(
        self,
        config: Root,
        module: str,
        cluster: Cluster,
        teacher: OutsideTeacher | None = None,
        *,
        threads: int = 1,
        limits: Deadlines = _LIMITS,
    ) -> None:
        c = config.cluster
        self._config = config
        self._module = module
        self._cluster = cluster
        self._teacher = teacher
        self._threads = threads
        self._limits = limits
        self._peers = c.tensor * c.sequence
        self._ranks: list[RemoteWorker] = []
        self._turn, self._saving = asyncio.Lock(), asyncio.Lock()
        self._weight_store: RankWeightStore | None = None
        self._slow: set[int] = set()  # ranks of which that was said
        self.updates = 0

    async def start(self) -> None:
        """All ranks, or none: `TrainerError` with what one of them refuses, `TrainerLost` where one ends instead."""
        if self._teacher is not None:
            await self._teacher.start()
        store = host_store(self._cluster.host, _MEETING)
        self._store = store  # where ranks meet: it lives as long as they do
        meeting = f"{os.getpid()}-{next(_meetings)}"
        size = self._config.cluster.ranks
        shared = {
            "config": self._config.given(), "host": self._cluster.host, "port": store.port, "meeting": meeting,
            "size": size, "threads": self._threads,
        }  # fmt: skip
        try:
            async with asyncio.TaskGroup() as tasks:
                starting = [tasks.create_task(self._start_rank({**shared, "rank": n})) for n in range(size)]
        except BaseExceptionGroup as problem:
            for task in starting:
                if not task.cancelled() and task.exception() is None:
                    await task.result().end()
            cause = root_cause(problem)
            if isinstance(cause, WorkerLost):
                raise TrainerLost(f"a rank of the trainer could not start: {cause}") from None
            raise cause from None
        self._ranks = [task.result() for task in starting]
        self.updates = self._ranks[0].greeting["updates"]

    async def _start_rank(self, setup: Mapping[str, Any]) -> RemoteWorker:
        name = f"rank {setup['rank']} of the trainer"
        environment = {} if self._cluster.remote else {"GLOO_SOCKET_IFNAME": "lo"}
        spec = LaunchSpec(name, self._module, setup, POOL, self._threads, environment=environment)
        number: int = setup["rank"]
        return await RemoteWorker.start(
            self._cluster, spec, self._limits, TrainerError, stalled=lambda _: self._hung(number)
        )

    def _hung(self, number: int) -> str:
        return hung(number, [rank.status for rank in self._ranks]) if self._ranks else ""

    @property
    def dtype(self) -> torch.dtype:
        """What the ranks say that they compute in: this process may be on a machine of another kind."""
        found: torch.dtype = getattr(torch, self._ranks[0].greeting["dtype"])
        return found

    @property
    def pids(self) -> list[int]:
        """Of the ranks."""
        return [rank.pid for rank in self._ranks]

    # What the driver asks.

    async def annotate(self, samples: Sequence[Sample], columns: Collection[Column]) -> list[Sample]:
        return await annotate_with(self._teacher, self._annotate, samples, columns)

    async def _annotate(self, samples: Sequence[Sample], columns: Collection[Column]) -> list[Sample]:
        if not columns:
            return list(samples)
        rows = self._pack(samples)
        found = await self._on_rows("annotate", rows, wanted=[column.name for column in columns])
        found_of = {s.key: s for s in samples}
        for column in columns:
            values = [found[n % self._data].arrays[f"{n // self._data}:{column.name}"] for n in range(len(rows))]
            for key, own_N in split_rows(rows, values).items():
                found_of[key] = annotated(found_of[key], column, own_N)
        return [found_of[s.key] for s in samples]

    async def forward_backward(self, batch: Batch) -> Totals:
        given = {"conditions": asdict(batch.conditions), "roles": [role.name for role in batch.roles]}
        before = [rank.status.get("work", 0) for rank in self._ranks]
        found = await self._on_rows("forward_backward", self._pack(batch.samples), batch.observed, **given)
        self._name_stragglers(before)
        return _totals(found[0])

    def _name_stragglers(self, before: Sequence[int]) -> None:
        """Once each. before: how often each rank had been found at work before the step."""
        slow = stragglers(before, [rank.status.get("work", 0) for rank in self._ranks])
        for number in slow.keys() - self._slow:
            where, ratio = self._ranks[number].process.where, slow[number]
            log.warning("rank %d on %s works %.1f times as long as most: they wait for it", number, where, ratio)
        self._slow |= slow.keys()

    async def optim_step(self) -> Totals:
        reply = await self._first("optim_step")
        self.updates = reply.header["updates"]
        return _totals(reply)

    async def finish_step(self, step: int) -> None:
        await self._first("finish_step", step=step)

    async def open_weight_store(self, transport: str, mode: Mode, settings: Mapping[str, Any]) -> WeightStore:
        replies = await self._every("open_weight_store", transport=transport, mode=mode, settings=dict(settings))
        self._weight_store = RankWeightStore(address_of([reply.header for reply in replies]))
        return self._weight_store

    async def publish(self, version: int, *, in_full: bool = False) -> Manifest | None:
        weight_store = self._weight_store
        if weight_store is None:
            return None
        async with weight_store.change():
            replies = await self._every("publish", version=version, in_full=in_full)
            weight_store.manifest = merged([Manifest.of(reply.header["manifest"]) for reply in replies])
        return weight_store.manifest

    async def probe(self) -> tuple[float, ...]:
        return tuple((await self._first("probe")).header["logprobs"])

    async def save(self, folder: Path) -> None:
        """The ranks compute again as soon as they have copied their state."""
        async with self._saving:
            await self._first("begin_save", folder=str(folder.absolute()))
            ranks = list(self._ranks)
            await self._gather(ranks, [asyncio.create_task(rank.call("end_save")) for rank in ranks])

    async def load(self, folder: Path) -> None:
        self.updates = (await self._first("load", folder=str(folder.absolute()))).header["updates"]

    async def export(self, folder: Path) -> None:
        await self._first("export", folder=str(folder.absolute()))

    async def use_threads(self, count: int) -> None:
        pass  # nothing is computed here

    async def close(self) -> None:
        if self._teacher is not None:
            await self._teacher.close()
        ranks, self._ranks = self._ranks, []
        if any(rank.gone for rank in ranks) or self._turn.locked():
            await asyncio.gather(*(rank.end() for rank in ranks))
        else:
            await asyncio.gather(*(rank.close() for rank in ranks))

    # How it is asked.

    @property
    def _data(self) -> int:
        """Ranks, or groups of them, with rows of their own."""
        return len(self._ranks) // self._peers

    def _pack(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """The samples of each row; as many rows as there are ranks with their own, or a multiple of that."""
        device = torch.device(self._ranks[0].greeting["device"])
        budget = token_budget(self._config.training, device, self.dtype)
        return pack(samples, budget, not self._config.model.plain, multiple=self._data)

    async def _on_rows(
        self, op: str, rows: Sequence[Sequence[Sample]], observed: Collection[SampleKey] = (), **fields: Any
    ) -> list[Frame]:
        """Each group of peers has every so-manieth row; the answers of the groups."""
        wired = [samples_to_wire(rows[place :: self._data], observed) for place in range(self._data)]
        calls = [wired[number // self._peers] for number in range(len(self._ranks))]
        found = await self._all(op, [({**header, **fields}, arrays) for header, arrays in calls])
        return found[:: self._peers]

    async def _first(self, op: str, **fields: Any) -> Frame:
        """The answer of the first rank, when all have answered."""
        return (await self._every(op, **fields))[0]

    async def _every(self, op: str, **fields: Any) -> list[Frame]:
        return await self._all(op, [(fields, {})] * len(self._ranks))

    async def _all(self, op: str, calls: Sequence[tuple[Mapping[str, Any], Mapping[str, Array]]]) -> list[Frame]:
        """Ask all ranks, one question at a time. Where one fails, the others wait for it in vain: all are ended."""
        if not self._ranks:
            raise TrainerError("the trainer is closed")
        asking = asyncio.create_task(self._exchange(op, calls))
        asking.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen, if by nobody else
        return await asyncio.shield(asking)  # who is cancelled does not wait, but the ranks go on together

    async def _exchange(self, op: str, calls: Sequence[tuple[Mapping[str, Any], Mapping[str, Array]]]) -> list[Frame]:
        async with self._turn:
            ranks = list(self._ranks)
            asked = [
                asyncio.create_task(rank.call(op, arrays, **fields))
                for rank, (fields, arrays) in zip(ranks, calls, strict=True)
            ]
            return await self._gather(ranks, asked)

    async def _gather(self, ranks: Sequence[RemoteWorker], asked: "Sequence[asyncio.Task[Frame]]") -> list[Frame]:
        done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_EXCEPTION)
        if all(task.exception() is None for task in done):
            return [task.result() for task in asked]
        if waiting:
            await asyncio.wait(waiting, timeout=_AFTERMATH)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        error = _worst(ranks, asked)
        await asyncio.gather(*(rank.end() for rank in ranks))
        raise error


class RankWeightStore:
    """Implements `kitae.weights.published_version.WeightStore` for publishers on ranks. manifest: that of the version
    that they published last.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self.manifest: Manifest | None = None
        self._lock = ReadWriteLock()

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[Manifest | None]:
        async with self._lock.read():
            yield self.manifest

    @asynccontextmanager
    async def change(self) -> AsyncIterator[None]:
        async with self._lock.write_async():
            yield


def _worst(ranks: Sequence[RemoteWorker], asked: "Sequence[asyncio.Task[Frame]]") -> KitaeError:
    """What went wrong first, of all that followed from it: an error of the run, a lost rank, or a failed one."""
    found = {n: task.exception() for n, task in enumerate(asked) if task.done() and not task.cancelled()}
    for error in found.values():
        if isinstance(error, KitaeError) and not isinstance(error, WorkerLost | CallFailed):
            return error
    for number, error in found.items():
        if isinstance(error, WorkerLost):
            return TrainerLost(f"rank {number} of the trainer was lost: {error}")
    number, error = next((n, e) for n, e in found.items() if e is not None)
    return TrainerLost(f"rank {number} of the trainer failed: {error}{ranks[number].last_words}")


def _totals(reply: Frame) -> Totals:
    return totals_of_wire(reply.header, reply.arrays)
