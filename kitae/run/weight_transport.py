"""From the settings to the way that weights take: from the trainer, wherever it is, to engines that have their own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kitae.config.root import RLConfig
from kitae.engines.start_engine import POOL
from kitae.trainer.base import Trainer
from kitae.weights.published_version import Board
from kitae.weights.relay_pool import RelayedBoard
from kitae.workers.base import Cluster
from kitae.workers.subprocesses import LocalCluster


@asynccontextmanager
async def opened_board(
    config: RLConfig, trainer: Trainer, cluster: Cluster | None, folder: Path
) -> AsyncIterator[Board]:
    """Where engines with weights of their own find them. folder: of the run, for what goes through files."""
    kind = config.cluster.transport
    if kind == "auto":
        kind = "http" if cluster is not None and cluster.remote else "memory"
    settings = {"folder": str(folder)} if kind == "file" else {}
    if kind in ("http", "relay", "broadcast"):
        settings["host"] = "127.0.0.1" if cluster is None else cluster.host
    board = await trainer.open_board(kind, config.engine.sync, settings)
    if kind != "relay":
        yield board
        return
    relayed = RelayedBoard(board, cluster or LocalCluster(), config.cluster.relays, folder, POOL)
    await relayed.start()
    try:
        yield relayed
    finally:
        await relayed.close()
