"""From the settings to a running engine: the one place that knows every kind."""

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
from kitae.engines.servers.start_servers import start_servers
from kitae.models.config import ModelConfig
from kitae.models.load import pick_device
from kitae.models.policy import Policy
from kitae.weights.published_version import EmptyWeightStore, WeightStore
from kitae.workers.base import Cluster
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
