"""The process of one rank of a stage: its shard of the model that the stage trains."""

import socket
from typing import TYPE_CHECKING, Any

from kitae.config.root import Root, StageConfig
from kitae.trainer.rank import run_rank

if TYPE_CHECKING:
    from kitae.trainer.mesh import Mesh
    from kitae.trainer.worker import Worker


def main(setup: dict[str, Any], stream: socket.socket) -> None:
    """At a post (`kitae.cluster.worker`)."""
    run_rank(setup, stream, _make)


def _make(config: Root, mesh: "Mesh") -> "Worker":
    from kitae.stages.registry import make_method
    from kitae.trainer.assemble import spread_worker

    assert isinstance(config, StageConfig)
    return spread_worker(make_method(config).make_objective(), config.training, mesh)
