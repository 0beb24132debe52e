"""From the settings to a running engine, or to servers of other people: the one place that knows every kind."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kitae.engines.base import Engine
from kitae.engines.config import EngineConfig
from kitae.engines.engine_pool import EnginePool
from kitae.engines.native.engine import NativeEngine
from kitae.engines.process.process_engine import ProcessEngine
from kitae.engines.servers.dialect import Dialect, Launch
from kitae.engines.servers.model_folder import WeightsFolder
from kitae.engines.servers.server import Server, open_given, open_started
from kitae.engines.servers.server_engine import LIMITS, ServerEngine
from kitae.engines.servers.sglang import SGLang
from kitae.engines.servers.vllm import VLLM
from kitae.errors import EngineError
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy, pick_device, pick_dtype
from kitae.models.policy import Policy
from kitae.weights.probe import probe_tolerance
from kitae.weights.published_version import EmptyWeightStore, WeightStore
from kitae.workers.base import Cluster
from kitae.workers.connection import Deadlines
from kitae.workers.gpus import GpuShares, visible_gpus
from kitae.workers.pool import Replacement
from kitae.workers.subprocesses import LocalCluster

POOL = "engines"
_ON_THIS_MACHINE = Replacement(retry=1.0, most=3, within=60.0)
"""What a process dies of here, its successor dies of too: it has no other machine."""


@dataclass(frozen=True, slots=True)
class EngineOrder:
    """What an engine is made from: `EngineOrder(config.model, config.engine, version=3, weight_store=publisher)`.

    model: what an engine with weights of its own loads, and serves until it is sent others. policy: what the native
    engine samples from. weight_store: the published weights, for engines that fetch them; None: nothing is ever
    published. cluster: finds a place for engines; None: they run on this machine, on cores that the trainer leaves.
    patience: seconds that requests wait for an engine when all are lost. columns: the folder in which engines on a
    cluster store what they sample. records_experts: whether engines record the experts of a mixture, for requests that
    ask for them; servers of other people do not.
    """

    model: ModelConfig
    config: EngineConfig
    version: int = 0
    policy: Policy | None = None
    weight_store: WeightStore | None = None
    cluster: Cluster | None = None
    patience: float = 300.0
    columns: Path | None = None
    records_experts: bool = False


async def start_engine(order: EngineOrder) -> Engine:
    """The caller closes it. An engine that is a pool replaces members that are lost."""
    return await KINDS[order.config.kind](order)


async def _native(order: EngineOrder) -> Engine:
    """In this process, on the policy's own weights."""
    assert order.policy is not None, "the native engine samples from a policy"
    return NativeEngine(order.policy, order.config, order.version, records_experts=order.records_experts)


async def _processes(order: EngineOrder) -> EnginePool:
    """In processes of their own."""
    on_cluster = order.cluster is not None
    shares = [[]] if on_cluster else _own_cores(order.model, order.config)
    cluster = order.cluster or LocalCluster(GpuShares(visible_gpus(), order.model.device, led=True))

    async def make(number: int) -> ProcessEngine:
        cores = shares[number % len(shares)]
        engine = ProcessEngine(
            order.model,
            order.config,
            order.weight_store or EmptyWeightStore(),
            threads=len(cores) or None,
            cores=cores or None,
            version=order.version,
            cluster=cluster,
            pool=POOL,
            name=f"engine {number}",
            columns=order.columns if on_cluster else None,
            records_experts=order.records_experts,
        )
        await engine.start()
        return engine

    replacement = None if on_cluster else _ON_THIS_MACHINE
    pool = EnginePool(make, order.config.count, version=order.version, patience=order.patience, replacement=replacement)
    await pool.start()
    return pool


async def _servers(order: EngineOrder) -> Engine:
    """Behind servers of other people, that run or are started here."""
    cores = _own_cores(order.model, order.config) if order.config.server else []
    return await start_servers(
        order.model, order.config, order.weight_store or EmptyWeightStore(), order.version, cores
    )


KINDS: dict[str, Callable[[EngineOrder], Awaitable[Engine]]] = {
    "native": _native,
    "process": _processes,
    "vllm": _servers,
    "sglang": _servers,
}


def _own_cores(model: ModelConfig, config: EngineConfig) -> list[list[int]]:
    """Those of each engine on this machine; the trainer computes with the others from now on."""
    available = sorted(os.sched_getaffinity(0)) if pick_device(model.device).type == "cpu" else []
    rest, shares = share_cores(available, config.count)
    if rest:
        torch.set_num_threads(len(rest))
    return shares


def share_cores(cores: Sequence[int], engines: int) -> tuple[list[int], list[list[int]]]:
    """The cores of the trainer and of each engine. All engines together get the last half of the cores, at least one
    each; one core is left for the trainer, and where there are too few, engines share theirs.

    Nothing is assigned (empty lists) where there are not two cores.
    """
    if len(cores) < 2:
        return [], [[]] * engines
    each = max(1, len(cores) // 2 // engines)
    used = min(each * engines, len(cores) - 1)
    rest, own = list(cores[: len(cores) - used]), cores[len(cores) - used :]
    each = min(each, used)
    return rest, [sorted(own[(i * each + j) % used] for j in range(each)) for i in range(engines)]


_STARTED = Replacement(retry=1.0, most=3, within=600.0)
_GIVEN = Replacement(most=0)  # a server that somebody else runs is gone for good


async def start_servers(
    model: ModelConfig,
    config: EngineConfig,
    weight_store: WeightStore,
    version: int,
    cores: Sequence[Sequence[int]] = (),
    limits: Deadlines = LIMITS,
) -> EnginePool:
    """A pool of servers, all of which have the weights of the model's folder, or what was published. cores: of each
    server that is started."""
    device = pick_device(model.device)
    dtype = str(pick_dtype(model.dtype, device)).removeprefix("torch.")
    own = model.model_copy(update={"device": "cpu", "dtype": dtype})
    copy = await asyncio.to_thread(load_policy, own)
    folder = await asyncio.to_thread(WeightsFolder, copy, weight_store.address, version, config.weights_folder)
    dialect: Dialect = VLLM(own=bool(config.server)) if config.kind == "vllm" else SGLang()
    launch = Launch(
        program=config.server,
        model=folder.start,
        dtype=dtype,
        context=copy.max_context,
        device=str(device),
        packages=folder.packages,
    )

    shares = GpuShares(visible_gpus(), model.device, led=True)
    gpus = [shares.environment(shares.take()) for _ in range(config.count)]

    async def open_server(number: int) -> Server:
        if not config.urls:
            placed = launch.on(cores[number % len(cores)] if cores else (), gpus[number % len(gpus)])
            return await open_started(dialect, placed, config, limits, f"{config.kind} {number}")
        if number >= len(config.urls):
            raise EngineError(f"engine.urls names {len(config.urls)} servers, and there is no other")
        return await open_given(dialect, config.urls[number], limits)

    async def make(number: int) -> ServerEngine:
        engine = ServerEngine(
            await open_server(number),
            weight_store,
            folder,
            decode=lambda tokens: str(copy.tokenizer.decode(tokens, skip_special_tokens=False)),
            vocabulary=copy.vocabulary,
            context=copy.max_context,
            tolerance=probe_tolerance(copy.dtype),
            limits=limits,
        )
        await engine.start()
        return engine

    pool = EnginePool(
        make,
        len(config.urls) or config.count,
        version=version,
        replacement=_GIVEN if config.urls else _STARTED,
        at_end=lambda: asyncio.to_thread(folder.close),
    )
    await pool.start()
    return pool
