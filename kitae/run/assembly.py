"""The parts of a run that compute: the trainer, then the engine with the trainer's weights.

The only module of `run`, `rl` and `offline` that knows concrete engines, trainers and transports. `stack` is the
caller's: what is started here is closed with it.

A run can have more or fewer engines while it goes on.

    wanted: as many as it began with, or `kitae scale RUN ENGINES`
    too few   an engine is started, loads what was handed over last, is probed, and joins
    too many  the last to join leaves: what it samples goes on elsewhere
    no place  the run goes on with the engines it has; another is tried every so often

Engines that are lost are too few: they are replaced in the same way (`kitae.workers.pool`).
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from kitae.config.root import RLConfig, StageConfig
from kitae.engines.base import Engine
from kitae.engines.engine_pool import EnginePool
from kitae.engines.start_engine import EngineOrder, start_engine
from kitae.models.facts import ModelFacts
from kitae.models.policy import Policy
from kitae.observe.observer import Observer
from kitae.offline.base import Method
from kitae.rl.proof_check import ProofCheck
from kitae.rl.weight_sync import WeightSync
from kitae.store.columns import FOLDER
from kitae.store.run_summary import asked_for
from kitae.trainer.base import Trainer
from kitae.trainer.learner import Learner
from kitae.trainer.start_trainer import make_learner, ranked_stage, start_trainer, supervised
from kitae.weights.probe import probe_tolerance
from kitae.weights.published_version import WeightStore
from kitae.workers.base import Cluster

_NO_ENGINE = 10  # times `cluster.patience`: how long a run that has lost all engines waits for one


@dataclass(frozen=True, slots=True)
class Learning:
    """What learns: `Learning(policy, LocalTrainer(…), learner, ModelFacts.of(policy))`. policy: None where the trainer
    is not in this process."""

    policy: Policy | None
    trainer: Trainer
    learner: Learner
    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class Serving:
    """What samples, how it gets new weights, and who judges its answers: `Serving(NativeEngine(…), weights)`."""

    engine: Engine
    weights: WeightSync
    proofs: ProofCheck | None = None


async def start_learning(
    stack: AsyncExitStack, config: RLConfig, cluster: Cluster | None, state: Path | None, observer: Observer
) -> Learning:
    """The trainer, loaded. state: of a checkpoint; None: the model as it is before the first step."""
    observer.note(f"loading {config.model.path}")
    policy, trainer = start_trainer(config, cluster, observer.note)
    stack.push_async_callback(trainer.close)
    await trainer.start()
    facts = ModelFacts.read(config.model) if policy is None else ModelFacts.of(policy)
    learner = make_learner(config, trainer)
    if state is not None:
        await learner.load(state)
    return Learning(policy, trainer, learner, facts)


async def start_serving(
    stack: AsyncExitStack, config: RLConfig, cluster: Cluster | None, learning: Learning, version: int, folder: Path
) -> Serving:
    """The engine, started. One with weights of its own has those of its model's folder until `serve_first_version`.
    folder: of the run."""
    trainer, weight_store = learning.trainer, None
    if config.engine.kind != "native":
        weight_store = await _open_weight_store(config, trainer, cluster, folder / "weights")
    patience = _NO_ENGINE * config.cluster.patience
    columns = folder.absolute() / FOLDER
    order = EngineOrder(
        config.model,
        config.engine,
        version,
        learning.policy,
        weight_store,
        cluster,
        patience,
        columns,
        records_experts=config.algorithm.experts.routing == "engine",
    )
    engine = await start_engine(order)
    stack.push_async_callback(engine.close)
    await trainer.use_threads(torch.get_num_threads())  # an engine may have got some of the cores
    recompute = config.pipeline.in_flight == "recompute"
    weights = WeightSync(trainer, engine, recompute=recompute, tolerance=probe_tolerance(trainer.dtype))
    return Serving(engine, weights, ProofCheck.of(config, learning.learner, learning.facts))


async def serve_first_version(
    stack: AsyncExitStack, serving: Serving, version: int, folder: Path, note: Callable[[str], None]
) -> None:
    """Hand the trainer's weights to an engine that has its own. From then on there are as many engines as
    it began with, or as are asked for in the folder of the run."""
    if not serving.engine.capabilities.shares_weights:
        await serving.weights.hand_over(version)
    await stack.enter_async_context(resized(serving.engine, serving.weights, folder, note))


async def start_offline_trainer(
    stack: AsyncExitStack, config: StageConfig, method: Method, cluster: Cluster | None, observer: Observer
) -> Trainer:
    """In this process, or in ranks of their own; on other machines there is always one rank at least."""
    observer.note(f"loading {config.model.path}")
    if cluster is not None and (cluster.remote or config.cluster.ranks > 1):
        trainer: Trainer = ranked_stage(config, "kitae.offline.methods", cluster)
    else:
        trainer = supervised(method.make_objective(), config.training)
    stack.push_async_callback(trainer.close)
    await trainer.start()
    return trainer


async def _open_weight_store(config: RLConfig, trainer: Trainer, cluster: Cluster | None, folder: Path) -> WeightStore:
    """Where engines with weights of their own find new versions. folder: of the run, for what goes through files."""
    kind = config.cluster.transport
    if kind == "auto":
        kind = "http" if cluster is not None and cluster.remote else "memory"
    settings = {"folder": str(folder)} if kind == "file" else {}
    if kind == "broadcast":
        settings["collectives"] = config.cluster.collectives
    if kind in ("http", "broadcast"):
        settings["host"] = "127.0.0.1" if cluster is None else cluster.host
    return await trainer.open_weight_store(kind, config.engine.sync, settings)


_LOOK = 1.0  # seconds between two looks at what is wanted


@asynccontextmanager
async def resized(
    engine: Engine, weights: WeightSync, folder: Path, note: Callable[[str], None]
) -> AsyncIterator[None]:
    """Keep the engine pool of a run at its size, or at what is asked for later in the run's folder. Any other engine
    stays as it is."""
    if not isinstance(engine, EnginePool):
        yield
        return
    engine.note, engine.admit = note, weights.admit
    following = asyncio.create_task(_follow(engine, folder, engine.size), name="elastic")
    try:
        yield
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _follow(pool: EnginePool, folder: Path, wanted: int) -> None:
    while True:
        pool.resize(asked_for(folder) or wanted)
        await asyncio.sleep(_LOOK)
