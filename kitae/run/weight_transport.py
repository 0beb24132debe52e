"""From the settings to the way that weights take: from the trainer, wherever it is, to engines that have their own."""

from pathlib import Path

from kitae.config.root import RLConfig
from kitae.trainer.base import Trainer
from kitae.weights.published_version import WeightStore
from kitae.workers.base import Cluster


async def open_weight_store(config: RLConfig, trainer: Trainer, cluster: Cluster | None, folder: Path) -> WeightStore:
    """Where engines with weights of their own find them. folder: of the run, for what goes through files."""
    kind = config.cluster.transport
    if kind == "auto":
        kind = "http" if cluster is not None and cluster.remote else "memory"
    settings = {"folder": str(folder)} if kind == "file" else {}
    if kind in ("http", "broadcast"):
        settings["host"] = "127.0.0.1" if cluster is None else cluster.host
    return await trainer.open_weight_store(kind, config.engine.sync, settings)
