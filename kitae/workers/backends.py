"""From the settings to a cluster: the one place that knows the back-ends."""

from collections.abc import Mapping

from kitae.workers.base import Cluster
from kitae.workers.config import ClusterConfig
from kitae.workers.gpus import GpuShares, visible_gpus
from kitae.workers.subprocesses import LocalCluster


async def open_cluster(config: ClusterConfig, counts: Mapping[str, int], device: str = "auto") -> Cluster | None:
    """Where the parts of a run find places; None: it is all one process. The caller closes it.

    counts: processes of each pool that must have a place from the start. device: `model.device`, on which GPUs depend.
    `ConfigError` where there is no such cluster, or it cannot give what is asked for.
    """
    if config.backend == "none":
        return None
    if config.backend == "local":
        return LocalCluster(GpuShares(visible_gpus(), device, led=config.ranks == 1))
    from kitae.workers.ray.ray_cluster import RayCluster

    return await RayCluster.open(config, counts, device)


def counts_of(config: ClusterConfig, engines: int) -> dict[str, int]:
    """How many processes each pool has from the start. On other machines, a trainer is always one of them.

    engines: Kitae's own in processes of their own.
    """
    return {
        "trainer": config.ranks if config.ranks > 1 or config.backend == "ray" else 0,
        "engines": engines,
        "verifiers": config.verifiers,
    }
