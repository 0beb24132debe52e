"""Who works in a run, started in this order: the trainer with what it has learned, then the engine with its weights.

`stack` is the caller's: with it ends what is started here.
"""

from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from kitae.config.root import RLConfig
from kitae.engines.base import Engine
from kitae.engines.start_engine import EngineOrder, start_engine
from kitae.models.facts import ModelFacts
from kitae.models.policy import Policy
from kitae.observe.observer import Observer
from kitae.rl.weight_sync import WeightSync
from kitae.run.weight_transport import open_weight_store
from kitae.store.columns import FOLDER
from kitae.trainer.base import Trainer
from kitae.trainer.learner import Learner
from kitae.trainer.start_trainer import make_learner, start_trainer
from kitae.weights.probe import probe_tolerance
from kitae.workers.base import Cluster

_NO_ENGINE = 10  # times `cluster.patience`: how long a run that has lost all engines waits for one


@dataclass(frozen=True, slots=True)
class Learning:
    """`Learning(policy, LocalTrainer(…), learner, ModelFacts.of(policy))`; policy: None where the trainer is not in
    this process."""

    policy: Policy | None
    trainer: Trainer
    learner: Learner
    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class Serving:
    """`Serving(order, NativeEngine(…), weights)`; order: what the engine was made from, for those that join it."""

    order: EngineOrder
    engine: Engine
    weights: WeightSync


async def start_learning(
    stack: AsyncExitStack, config: RLConfig, cluster: Cluster | None, state: Path | None, observer: Observer
) -> Learning:
    """state: of a checkpoint; None: the model as it is before the first step."""
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
    """An engine that has weights of its own has those of its model's folder until they are handed over. folder: of the
    run."""
    trainer, weight_store = learning.trainer, None
    if config.engine.kind != "native":
        weight_store = await open_weight_store(config, trainer, cluster, folder / "weights")
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
        records_experts=config.algorithm.routing == "engine",
    )
    engine = await start_engine(order)
    stack.push_async_callback(engine.close)
    await trainer.use_threads(torch.get_num_threads())  # an engine may have got some of the cores
    recompute = config.pipeline.in_flight == "recompute"
    weights = WeightSync(trainer, engine, recompute=recompute, tolerance=probe_tolerance(learning.facts.dtype))
    return Serving(order, engine, weights)
