"""The process of one rank of a stage: its shard of the model that the stage trains."""

import socket
from typing import TYPE_CHECKING, Any

from kitae.config.root import Root, StageConfig
from kitae.trainer.parallel.rank_process import run_rank

if TYPE_CHECKING:
    from kitae.trainer.parallel.mesh import Mesh
    from kitae.trainer.training_worker import Worker


def main(setup: dict[str, Any], stream: socket.socket) -> None:
    """In a worker process (`kitae.workers.worker_main`)."""
    run_rank(setup, stream, _make)


def _make(config: Root, mesh: "Mesh") -> "Worker":
    from kitae.offline.methods import make_method
    from kitae.trainer.build_worker import spread_worker

    assert isinstance(config, StageConfig)
    return spread_worker(make_method(config).make_objective(), config.training, mesh)
