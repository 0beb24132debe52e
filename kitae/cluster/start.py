"""From the settings to a cluster: the one place that knows every back-end."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kitae.cluster.base import Cluster
from kitae.cluster.local import LocalCluster
from kitae.config.root import Root


@asynccontextmanager
async def open_cluster(config: Root) -> AsyncIterator[Cluster | None]:
    """None: there is none, the run is in this process."""
    if config.cluster.backend == "none":
        yield None
        return
    cluster = LocalCluster()
    try:
        yield cluster
    finally:
        await cluster.close()
