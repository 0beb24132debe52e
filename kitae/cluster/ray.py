"""Posts on the nodes of a Ray cluster. The only module that imports ray, and only when one is opened.

    RayCluster ── actor calls: start, news, kill ──► Keeper (an actor in a bundle of a placement group)
        ▲                                               │ starts, watches, dies with
        └───── one TCP connection, with a secret ────── the worker program (`kitae.cluster.worker`)

Ray finds places and says what became of them. What controller and worker tell each other goes past it.
"""

import asyncio
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from kitae.cluster.base import Duty, PostError
from kitae.cluster.config import ClusterConfig
from kitae.cluster.demand import Demand, Room, Supplier, hopeless, lone_room, pool_of, refusal, rooms_of
from kitae.cluster.doorway import Doorway, Streams
from kitae.cluster.process import PostProcess
from kitae.cluster.worker import pack_order
from kitae.errors import ConfigError

T = TypeVar("T")

NODE_LABEL = "kitae-node"  # of nodes that are started here: their number
_LOOPBACK = "127.0.0.2"  # Ray takes 127.0.0.1 for the address that others know the machine by
_STORE = 80 * 2**20  # bytes of Ray's object store on nodes that are started here: nothing goes through it
_KNOCK = 5.0  # seconds in which a running cluster must answer
_POLL = 0.2  # seconds between two looks at a place that is awaited
_SWEEPS = 25  # times that the folder of nodes is removed, until it is gone
_BEGIN = 120.0  # seconds for an actor to come up in a place that it has
_ARRIVAL = 60.0  # seconds from the start of a process to its connection
_PULSE = 0.5  # seconds between two lots of what a process writes
_UNAVAILABLE = 3  # times, a second apart, that a keeper may be out of reach before it is given up
_FAREWELL = 10.0  # seconds for a killed process to be gone

log = logging.getLogger("kitae")


def import_ray() -> Any:
    """With its habit turned off to start a cluster whenever it is used without one: after a `close`, say."""
    try:
        with _surroundings(RAY_ENABLE_AUTO_CONNECT="0"):
            import ray
    except ImportError:
        raise ConfigError("cluster.backend = 'ray' needs the package ray: pip install 'kitae[cluster]'") from None
    return ray


class RayCluster:
    """Implements `kitae.cluster.base.Cluster`. Made by `open`.

    The places of all processes in `counts` are found when it is opened; further ones when they are asked for, and both
    within `cluster.patience`. A place is used again when its process is gone. On a cluster that was started here a
    demand that cannot be met is refused at once: it does not grow.
    """

    remote = True

    def __init__(self, config: ClusterConfig, ray: Any, own: "OwnNodes | None") -> None:
        self.doorway = Doorway()
        self._config = config
        self._ray = ray
        self._own = own
        self._free: dict[str, list[_Seat]] = {}
        self._groups: set[Any] = set()
        self._posts: set[RayPost] = set()
        self._closed = False

    @classmethod
    async def open(cls, config: ClusterConfig, counts: Mapping[str, int]) -> "RayCluster":
        """`ConfigError`: there is no such cluster, or it has no place for all of `counts`, processes by pool."""
        ray = import_ray()
        deadline = asyncio.get_running_loop().time() + config.patience
        own = None if config.address else OwnNodes.start(config.nodes)
        cluster = cls(config, ray, own)
        try:
            _connect(ray, own.address if own else config.address)
            if own:  # what it took to start nodes is no wait for a place
                deadline = asyncio.get_running_loop().time() + config.patience
            await cluster.doorway.open(ray.util.get_node_ip_address())
            await cluster._find(rooms_of(config, counts), deadline)
        except PostError as error:
            await cluster.close()
            raise ConfigError(str(error)) from None
        except BaseException:
            await cluster.close()
            raise
        return cluster

    @property
    def host(self) -> str:
        return self.doorway.address[0]

    async def start(self, duty: Duty) -> "RayPost":
        if duty.descriptors:
            raise PostError(f"{duty.name} could not start: descriptors are for a post on this machine alone")
        deadline = asyncio.get_running_loop().time() + self._config.patience
        while True:
            try:
                return await self._start(duty)
            except self._ray.exceptions.RayError as error:
                if self._closed or asyncio.get_running_loop().time() > deadline:
                    raise PostError(f"{duty.name} could not start: {_first_line(error)}") from None
                await asyncio.sleep(1)  # its node may be gone without Ray's knowledge so far

    async def close(self) -> None:
        self._closed = True
        left = list(self._posts)
        for post in left:
            post.kill()
        for post in left:
            await post.wait()
            post.writer.transport.abort()
        self.doorway.close()
        if self._ray.is_initialized():
            for group in self._groups:
                with suppress(Exception):  # the cluster may be gone, and the group with it
                    self._ray.util.remove_placement_group(group)
            self._ray.shutdown()
        if self._own is not None:
            self._own.close()

    def machines(self) -> list[Supplier]:
        """The nodes that live, with what they have and what of it is free."""
        from ray._private.state import available_resources_per_node  # nothing public tells it by node

        free = available_resources_per_node()
        return [
            Supplier(
                f"{node['NodeManagerAddress']} [{node['NodeID'][:8]}]",
                _supply(node["Resources"]),
                _supply(free.get(node["NodeID"], {})),
                node["Labels"],
            )
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    # Places.

    async def _find(self, rooms: Sequence[Room], deadline: float) -> None:
        """Places for all rooms, or `PostError`: those that were found already stay until the cluster is closed."""
        if self._own:
            machines = self.machines()
            for room in rooms:
                if why := hopeless(room, machines):
                    raise PostError(refusal(room, machines, why))
        groups = [self._reserve(room) for room in rooms]
        for room, group in zip(rooms, groups, strict=True):
            await self._settle(room, group, deadline)
            for pool, bundles in room.seats.items():
                self._free.setdefault(pool, []).extend(_Seat(pool, group, bundle) for bundle in bundles)

    def _reserve(self, room: Room) -> Any:
        labels = dict(room.labels)
        if room.here:
            labels["ray.io/node-id"] = self._ray.get_runtime_context().get_node_id()
        group = self._ray.util.placement_group(
            [_resources(bundle) for bundle in room.bundles],
            strategy=room.place.replace("-", "_").upper(),
            bundle_label_selector=[labels] * len(room.bundles) if labels else None,
        )
        self._groups.add(group)
        return group

    async def _settle(self, room: Room, group: Any, deadline: float) -> None:
        """`group.ready` would be simpler, but waits for a process of Ray's, too, which takes long on a busy machine."""
        while self._table(group)["state"] != "CREATED":
            if asyncio.get_running_loop().time() > deadline:
                self._release(group)
                machines = self.machines()
                why = hopeless(room, machines) or f"too little of it is free, within {self._config.patience:g} s"
                raise PostError(refusal(room, machines, why))
            await asyncio.sleep(_POLL)

    def _table(self, group: Any) -> Mapping[str, Any]:
        if self._closed:
            raise PostError("the cluster is closed")
        found: Mapping[str, Any] = self._ray.util.placement_group_table(group)
        return found

    async def _take(self, duty: Duty) -> "_Seat":
        """A place on a node that lives: one that is free, or one more."""
        deadline = asyncio.get_running_loop().time() + self._config.patience
        free = self._free.setdefault(duty.pool, [])
        if not free:
            room = lone_room(self._config, duty.pool)
            await self._find([room], deadline)
            return replace(self._free[duty.pool].pop(), lone=True)
        seat = free.pop(next((i for i, seat in enumerate(free) if self._stands(seat)), 0))
        try:
            await self._await_place(duty, seat, deadline)
        except BaseException:
            self._give_back(seat)
            raise
        return seat

    async def _await_place(self, duty: Duty, seat: "_Seat", deadline: float) -> None:
        """Ray finds another node for a bundle whose node is gone."""
        while not self._stands(seat):
            if asyncio.get_running_loop().time() > deadline:
                asked = replace(lone_room(self._config, seat.pool), place=pool_of(self._config, seat.pool).place)
                why = f"no place for {duty.name}, whose node is gone, within {self._config.patience:g} s"
                raise PostError(refusal(asked, self.machines(), why))
            await asyncio.sleep(_POLL)

    def _stands(self, seat: "_Seat") -> bool:
        node = self._table(seat.group)["bundles_to_node_id"].get(seat.bundle)
        return any(each["NodeID"] == node and each["Alive"] for each in self._ray.nodes())

    def _give_back(self, seat: "_Seat") -> None:
        if seat.lone:
            self._release(seat.group)
        else:
            self._free[seat.pool].insert(0, seat)

    def _release(self, group: Any) -> None:
        self._groups.discard(group)
        with suppress(Exception):  # it is gone with the cluster
            self._ray.util.remove_placement_group(group)

    # Processes.

    async def _start(self, duty: Duty) -> "RayPost":
        seat = await self._take(duty)
        keeper = self._keeper(seat)
        try:
            post = await self._begin(duty, seat, keeper)
        except BaseException:
            self._dismiss(keeper)
            self._give_back(seat)
            raise
        self._posts.add(post)
        post.ended.add_done_callback(lambda _: self._forget(post, seat))
        return post

    def _keeper(self, seat: "_Seat") -> Any:
        asked = Demand.of(pool_of(self._config, seat.pool))
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            seat.group, seat.bundle, placement_group_capture_child_tasks=False
        )
        made = self._ray.remote(
            num_cpus=asked.cpus, num_gpus=asked.gpus, memory=asked.memory or None, scheduling_strategy=strategy
        )(Keeper)
        return made.remote()

    async def _begin(self, duty: Duty, seat: "_Seat", keeper: Any) -> "RayPost":
        threads = duty.threads or max(1, int(pool_of(self._config, seat.pool).cpus))
        record = {**asdict(replace(duty, threads=threads, cores=None)), "descriptors": ()}
        async with self.doorway.expect() as (where, arrival):
            try:
                begun = await _within(_BEGIN, keeper.start.remote(record, where, *_home()))
            except TimeoutError:
                raise PostError(f"{duty.name} could not start: no actor came up there for {_BEGIN:g} s") from None
            post = RayPost(self._ray, keeper, begun)
            try:
                post.reader, post.writer = await _arrival(arrival, post, duty.name)
            except BaseException:
                post.kill()
                raise
            return post

    def _forget(self, post: "RayPost", seat: "_Seat") -> None:
        self._posts.discard(post)
        self._dismiss(post.keeper)
        self._give_back(seat)

    def _dismiss(self, keeper: Any) -> None:
        with suppress(Exception):  # it is gone with its node or the cluster
            self._ray.kill(keeper)


@dataclass(frozen=True, slots=True)
class _Seat:
    """A place for one process; lone: its group is for it alone, and ends with it."""

    pool: str
    group: Any
    bundle: int
    lone: bool = False


@dataclass(frozen=True, slots=True)
class Begun:
    """`Begun(pid=4711, host="10.0.0.3", node="1a2b…")`: what a keeper says of the process that it has started."""

    pid: int
    host: str
    node: str


@dataclass(frozen=True, slots=True)
class Bulletin:
    """`Bulletin(heard=120, words="…", ended=None)`: of a process; ended: how it ended, if it has."""

    heard: int
    words: str
    ended: str | None


class Keeper:
    """The actor: starts one process beside it, tells what it writes and how it ends, and takes it along when it dies.

    Its methods are coroutines, so they run in one thread, whose end is the end of the process (see `die_with`).
    """

    _process: PostProcess

    async def start(
        self, record: Mapping[str, Any], where: Mapping[str, Any], home: str, paths: Sequence[str], folder: str
    ) -> Begun:
        """home: of the package that the controller uses; if it is here too, on the same machine or a shared disk, its
        paths and folder are used; else those of this node's own package."""
        import ray

        known = Path(home).is_dir()
        duty = Duty(**record)
        self._process = await PostProcess.launch(
            duty,
            asyncio.subprocess.PIPE,
            environment_of(os.environ, ray.get_gpu_ids()),
            paths if known else None,
            folder if known and Path(folder).is_dir() else None,
        )
        await self._process.order(pack_order(duty, os.getpid(), where))
        context = ray.get_runtime_context()
        return Begun(self._process.pid, ray.util.get_node_ip_address(), context.get_node_id())

    async def news(self, heard: int) -> Bulletin:
        """Once there are any: more than `heard` bytes were written, or it has ended."""
        process = self._process
        while not process.ended.done() and process.heard <= heard:
            await asyncio.wait({process.ended}, timeout=_PULSE)
        ended = process.ended.result() if process.ended.done() else None
        return Bulletin(process.heard, process.words, ended)

    async def kill(self) -> None:
        self._process.kill()


def environment_of(environment: Mapping[str, str], gpus: Sequence[Any]) -> dict[str, str]:
    """What a process gets of its keeper's environment: without Ray's own, which would make it a part of this cluster,
    and with the GPUs as the machine has them where Ray assigned none but hides all."""
    left = {key: value for key, value in environment.items() if not key.startswith("RAY_")}
    if not gpus and left.get("CUDA_VISIBLE_DEVICES") == "":
        del left["CUDA_VISIBLE_DEVICES"]
    return left


def _home() -> tuple[str, list[str], str]:
    """Where this process has its package, its imports and its files."""
    return str(Path(__file__).parent.parent), [os.path.abspath(path) for path in sys.path], os.getcwd()


class RayPost:
    """Implements `kitae.cluster.base.Post`."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def __init__(self, ray: Any, keeper: Any, begun: Begun) -> None:
        self.keeper = keeper
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
        """By its keeper, who ends all that it has started; and the keeper too, if that does not help."""
        with suppress(Exception):  # whatever is wrong with the keeper, it is ended next
            await _within(_FAREWELL, self.keeper.kill.remote())
        await asyncio.wait({self.ended}, timeout=_FAREWELL)
        if not self.ended.done():
            self._ray.kill(self.keeper)

    async def _follow(self) -> str:
        """How it ended, or that nobody can say."""
        missed = 0
        while self._news.ended is None:
            try:
                self._news = await _result(self.keeper.news.remote(self._news.heard))
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
        return f"its keeper on {self.where} is gone: {_first_line(error)}"

    def _node_lives(self) -> bool:
        return any(node["NodeID"] == self._node and node["Alive"] for node in self._ray.nodes())


@dataclass(frozen=True)
class OwnNodes:
    """A cluster on this machine alone, reachable from it alone, without a token: Ray reads that when it is imported. It
    ends with this process, whatever happens to it."""

    nodes: Any
    folder: str

    @classmethod
    def start(cls, count: int) -> "OwnNodes":
        """Each node has the machine's cores; the first has its GPUs."""
        folder = tempfile.mkdtemp(prefix="kitae-ray-")
        os.mkdir(f"{folder}/ray")
        from ray.cluster_utils import Cluster

        own = cls(Cluster(shutdown_at_exit=True), folder)
        try:
            for number in range(count):
                own.add(number)
        except BaseException:
            own.close()
            raise
        return own

    @property
    def address(self) -> str:
        return str(self.nodes.address)

    def add(self, number: int, **settings: Any) -> Any:
        """One more node; settings: of Ray, in place of ours."""
        with _surroundings(RAY_TMPDIR=self.folder, RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled"):
            return self.nodes.add_node(**{**_node(number), **settings})

    def remove(self, node: Any) -> None:
        """As if its machine had lost power."""
        self.nodes.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self.nodes.shutdown()
        for _ in range(_SWEEPS):  # what is ending still writes its last words
            shutil.rmtree(self.folder, ignore_errors=True)
            if not os.path.exists(self.folder):
                return
            time.sleep(_POLL)


def _node(number: int) -> dict[str, Any]:
    return {
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "num_gpus": _gpus() if number == 0 else 0,
        "object_store_memory": _STORE,
        "include_dashboard": False,
        "labels": {NODE_LABEL: str(number)},
        **({"node_ip_address": _LOOPBACK} if sys.platform == "linux" else {}),
    }


def _gpus() -> int:
    from ray._private.accelerators import NvidiaGPUAcceleratorManager as Nvidia  # as Ray would count them

    visible = Nvidia.get_current_process_visible_accelerator_ids()
    return Nvidia.get_current_node_num_accelerators() if visible is None else len(visible)


class _surroundings:
    """Variables of the environment, for a while; and the handler of SIGTERM as it was before."""

    def __init__(self, **given: str) -> None:
        self._given = given

    def __enter__(self) -> None:
        self._before = {key: os.environ.get(key) for key in self._given}
        self._handler = signal.getsignal(signal.SIGTERM)
        os.environ.update(self._given)

    def __exit__(self, *_: object) -> None:
        for key, value in self._before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
        if signal.getsignal(signal.SIGTERM) is not self._handler:
            signal.signal(signal.SIGTERM, self._handler)


def _connect(ray: Any, address: str) -> None:
    """Become a part of a cluster; Ray itself would try for minutes where there is none."""
    if ray.is_initialized():
        raise ConfigError("this process is a part of a Ray cluster already, and can be one of another no more")
    if "://" in address:
        raise ConfigError(
            f"cluster.address must be auto or HOST:PORT of a cluster that this machine is a node of, got {address!r}"
        )
    _knock(address)
    local = {"_node_ip_address": _LOOPBACK} if address.startswith(_LOOPBACK) else {}
    try:
        with _surroundings(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(
                address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False, **local
            )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"cluster.address: no Ray cluster at {address!r}: {_first_line(error)}") from None


def _knock(address: str) -> None:
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise ConfigError(f"cluster.address must be auto or HOST:PORT, got {address!r}")
    try:
        socket.create_connection((host, int(port)), _KNOCK).close()
    except OSError as error:
        raise ConfigError(f"cluster.address: no Ray cluster answers at {address!r}: {error}") from None


def _supply(resources: Mapping[str, float]) -> Demand:
    return Demand(*(resources.get(name, 0.0) for name in ("CPU", "GPU", "memory")))


def _resources(bundle: Demand) -> dict[str, float]:
    asked = {"CPU": bundle.cpus, "GPU": bundle.gpus, "memory": float(int(bundle.memory))}
    return {name: value for name, value in asked.items() if value}


async def _arrival(arrival: "asyncio.Future[Streams]", post: RayPost, name: str) -> Streams:
    """The connection of a process; `PostError` if it ends before, or takes too long."""
    awaited: set[asyncio.Future[Any]] = {arrival, post.ended}
    await asyncio.wait(awaited, timeout=_ARRIVAL, return_when=asyncio.FIRST_COMPLETED)
    if arrival.done():
        return arrival.result()
    words = f"; it wrote:\n{post.words}" if post.words else ""
    if post.ended.done():
        raise PostError(f"{name} could not start on {post.where}: {post.ended.result()}{words}")
    raise PostError(f"{name} on {post.where} did not connect with the controller within {_ARRIVAL:g} s{words}")


async def _result(reference: Awaitable[T]) -> T:
    return await reference


async def _within(seconds: float, reference: Awaitable[T]) -> T:
    return await asyncio.wait_for(_result(reference), seconds)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
