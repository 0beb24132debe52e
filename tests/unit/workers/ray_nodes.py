"""Settings of a cluster on the nodes that all tests share."""

from typing import Any

from kitae.workers.config import ClusterConfig


def ray_config(nodes: Any, patience: float = 30.0, **pool: Any) -> ClusterConfig:
    settings = {"backend": "ray", "address": nodes.address, "patience": patience}
    return ClusterConfig.model_validate({**settings, "pools": {"engines": pool}})
