"""Worker processes on the nodes of a Ray cluster. This folder alone imports ray, and only when a cluster is opened.

    RayCluster ── actor calls: start, news, kill ──► LaunchActor (an actor in a bundle of a placement group)
        ▲                                               │ starts, watches, dies with
        └───── one TCP connection, with a secret ────── the worker program (`kitae.workers.worker_main`)

Ray finds places and says what became of them. What controller and worker send each other does not pass through it.
"""

import asyncio
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, TypeVar

from kitae.errors import ConfigError
from kitae.workers.base import LaunchError, LaunchSpec, end_processes
from kitae.workers.config import ClusterConfig
from kitae.workers.demand import Demand, Supplier, groups_of, pool_of, with_gpus
from kitae.workers.listener import Listener, Streams
from kitae.workers.ray.actor import Begun, Bulletin, LaunchActor, home
from kitae.workers.ray.placement import RayPlace, RayPlaces
from kitae.workers.ray.ray_session import OwnNodes, connect, first_line, import_ray

T = TypeVar("T")

_ARRIVAL = 60.0  # seconds from the start of a process to its connection
_UNAVAILABLE = 3  # times, a second apart, that an actor may be out of reach before it is given up
_FAREWELL = 10.0  # seconds for a killed process to be gone


class RayProcess:
    """Implements `kitae.workers.base.WorkerProcess`."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def __init__(self, ray: Any, actor: Any, begun: Begun) -> None:
        self.actor = actor
        self.pid = begun.pid
        self.where = f"node {begun.host} [{begun.node[:8]}]"
        self._ray = ray
        self._node = begun.node
        self._news = Bulletin(0, "", None)
        self._killing: asyncio.Task[None] | None = None
        self.ended = asyncio.create_task(self._follow())

    @property
    def words(self) -> str:
        return self._news.words

    def kill(self) -> None:
        if not self.ended.done() and self._killing is None:
            self._killing = asyncio.create_task(self._kill())

    async def wait(self) -> str:
        return await asyncio.shield(self.ended)

    async def _kill(self) -> None:
        """By its actor, who ends all that it has started; and the actor too, if that does not help."""
        with suppress(Exception):  # whatever is wrong with the actor, it is ended next
            await answer_within(_FAREWELL, self.actor.kill.remote())
        await asyncio.wait({self.ended}, timeout=_FAREWELL)
        if not self.ended.done():
            self._ray.kill(self.actor)

    async def _follow(self) -> str:
        """How it ended, or that nobody can say."""
        missed = 0
        while self._news.ended is None:
            try:
                self._news = await _result(self.actor.news.remote(self._news.heard))
                missed = 0
            except self._ray.exceptions.ActorUnavailableError:
                missed += 1
                if missed > _UNAVAILABLE or not self._node_lives():
                    return f"its {self.where} is gone or out of reach"
                await asyncio.sleep(1)
            except self._ray.exceptions.RayError as error:
                return self._obituary(error)
        return self._news.ended

    def _obituary(self, error: Exception) -> str:
        if not self._node_lives():
            return f"its {self.where} is gone or out of reach"
        return f"its actor on {self.where} is gone: {first_line(error)}"

    def _node_lives(self) -> bool:
        return any(node["NodeID"] == self._node and node["Alive"] for node in self._ray.nodes())


async def await_arrival(arrival: "asyncio.Future[Streams]", process: RayProcess, name: str) -> Streams:
    """The connection of a process; `LaunchError` if it ends before, or takes too long."""
    awaited: set[asyncio.Future[Any]] = {arrival, process.ended}
    await asyncio.wait(awaited, timeout=_ARRIVAL, return_when=asyncio.FIRST_COMPLETED)
    if arrival.done():
        return arrival.result()
    words = f"; it wrote:\n{process.words}" if process.words else ""
    if process.ended.done():
        raise LaunchError(f"{name} could not start on {process.where}: {process.ended.result()}{words}")
    raise LaunchError(f"{name} on {process.where} did not connect with the controller within {_ARRIVAL:g} s{words}")


async def _result(reference: Awaitable[T]) -> T:
    return await reference


async def answer_within(seconds: float, reference: Awaitable[T]) -> T:
    return await asyncio.wait_for(_result(reference), seconds)


_BEGIN = 120.0  # seconds for an actor to come up in a place that it has


class RayCluster:
    """Implements `kitae.workers.base.Cluster`. Made by `open`.

    The places of all processes in `counts` are found when it is opened; further ones when they are asked for, and both
    within `cluster.patience`. A place is used again when its process is gone. On a cluster that was started here a
    demand that cannot be met is refused at once: it does not grow.
    """

    remote = True

    def __init__(self, config: ClusterConfig, ray: Any, own: OwnNodes | None) -> None:
        self.listener = Listener()
        self._config = config
        self._ray = ray
        self._own = own
        self._places = RayPlaces(config, ray, fixed=own is not None)
        self._processes: set[RayProcess] = set()
        self._closed = False

    @classmethod
    async def open(cls, config: ClusterConfig, counts: Mapping[str, int], device: str = "auto") -> "RayCluster":
        """`ConfigError`: there is no such cluster, or it has no place for all of `counts`, processes by pool."""
        ray = import_ray()
        deadline = asyncio.get_running_loop().time() + config.patience
        own = None if config.address else OwnNodes.start(config.nodes)
        cluster = cls(config, ray, own)
        try:
            connect(ray, own.address if own else config.address)
            if own:  # what it took to start nodes is no wait for a place
                deadline = asyncio.get_running_loop().time() + config.patience
            await cluster.listener.open(ray.util.get_node_ip_address())
            settled = with_gpus(config, counts, device, cluster.machines(), fixed=own is not None)
            cluster._config = cluster._places.config = settled
            await cluster._places.find(groups_of(settled, counts), deadline)
        except LaunchError as error:
            await cluster.close()
            raise ConfigError(str(error)) from None
        except BaseException:
            await cluster.close()
            raise
        return cluster

    @property
    def host(self) -> str:
        return self.listener.address[0]

    def machines(self) -> list[Supplier]:
        """The nodes that live, with what they have and what of it is free."""
        return self._places.machines()

    async def start(self, spec: LaunchSpec) -> RayProcess:
        if spec.descriptors:
            raise LaunchError(f"{spec.name} could not start: descriptors are for a process on this machine alone")
        deadline = asyncio.get_running_loop().time() + self._config.patience
        while True:
            try:
                return await self._start(spec)
            except self._ray.exceptions.RayError as error:
                if self._closed or asyncio.get_running_loop().time() > deadline:
                    raise LaunchError(f"{spec.name} could not start: {first_line(error)}") from None
                await asyncio.sleep(1)  # its node may be gone without Ray's knowledge so far

    async def _start(self, spec: LaunchSpec) -> RayProcess:
        place = await self._places.take(spec)
        actor = self._actor(place)
        try:
            process = await self._begin(spec, place, actor)
        except BaseException:
            self._dismiss(actor)
            self._places.give_back(place)
            raise
        self._processes.add(process)
        process.ended.add_done_callback(lambda _: self._forget(process, place))
        return process

    def _actor(self, place: RayPlace) -> Any:
        asked = Demand.of(pool_of(self._config, place.pool))
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            place.group, place.bundle, placement_group_capture_child_tasks=False
        )
        made = self._ray.remote(
            num_cpus=asked.cpus, num_gpus=asked.gpus, memory=asked.memory or None, scheduling_strategy=strategy
        )(LaunchActor)
        return made.remote()

    async def _begin(self, spec: LaunchSpec, place: RayPlace, actor: Any) -> RayProcess:
        threads = spec.threads or max(1, int(pool_of(self._config, place.pool).cpus))
        record = {**asdict(replace(spec, threads=threads, cores=None)), "descriptors": ()}
        async with self.listener.expect() as (where, arrival):
            try:
                begun = await answer_within(_BEGIN, actor.start.remote(record, where, *home()))
            except TimeoutError:
                raise LaunchError(f"{spec.name} could not start: no actor came up there for {_BEGIN:g} s") from None
            process = RayProcess(self._ray, actor, begun)
            try:
                process.reader, process.writer = await await_arrival(arrival, process, spec.name)
            except BaseException:
                process.kill()
                raise
            return process

    def _forget(self, process: RayProcess, place: RayPlace) -> None:
        self._processes.discard(process)
        self._dismiss(process.actor)
        self._places.give_back(place)

    def _dismiss(self, actor: Any) -> None:
        """After the connection was closed there is nobody to ask, and Ray might start a cluster to do so."""
        if self._ray.is_initialized():
            with suppress(Exception):  # it is gone with its node or the cluster
                self._ray.kill(actor)

    async def close(self) -> None:
        self._closed = True
        self._places.close()
        await end_processes(self._processes)
        self.listener.close()
        if self._ray.is_initialized():
            self._places.release_all()
            self._ray.shutdown()
        if self._own is not None:
            self._own.close()
