"""Nodes of a Ray cluster that is started here, on this machine alone."""

import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from kitae.workers.ray.ray_session import LOOPBACK, episode_context

NODE_LABEL = "kitae-node"  # of nodes that are started here: their number
_STORE = 80 * 2**20  # bytes of Ray's object store on nodes that are started here: nothing goes through it
_SWEEPS = 25  # times that the folder of nodes is removed, until it is gone
_PAUSE = 0.2  # seconds between two of them


@dataclass(frozen=True)
class OwnNodes:
    """A cluster on this machine alone, reachable from it alone, without a token: Ray reads that when it is imported. It
    ends with this process, whatever happens to it."""

    nodes: Any
    folder: str

    @classmethod
    def start(cls, count: int) -> "OwnNodes":
        """Each node has the machine's cores; the first has its GPUs."""
        folder = tempfile.mkdtemp(prefix="kitae-ray-")
        os.mkdir(f"{folder}/ray")
        from ray.cluster_utils import Cluster

        own = cls(Cluster(shutdown_at_exit=True), folder)
        try:
            for number in range(count):
                own.add(number)
        except BaseException:
            own.close()
            raise
        return own

    @property
    def address(self) -> str:
        return str(self.nodes.address)

    def add(self, number: int, **settings: Any) -> Any:
        """One more node; settings: of Ray, in place of ours."""
        with episode_context(RAY_TMPDIR=self.folder, RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled"):
            return self.nodes.add_node(**{**_node(number), **settings})

    def remove(self, node: Any) -> None:
        """As if its machine had lost power."""
        self.nodes.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self.nodes.shutdown()
        for _ in range(_SWEEPS):  # what is ending still writes its last words
            shutil.rmtree(self.folder, ignore_errors=True)
            if not os.path.exists(self.folder):
                return
            time.sleep(_PAUSE)


def _node(number: int) -> dict[str, Any]:
    return {
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "num_gpus": _gpus() if number == 0 else 0,
        "object_store_memory": _STORE,
        "include_dashboard": False,
        "labels": {NODE_LABEL: str(number)},
        **({"node_ip_address": LOOPBACK} if sys.platform == "linux" else {}),
    }


def _gpus() -> int:
    from ray._private.accelerators import NvidiaGPUAcceleratorManager as Nvidia  # as Ray would count them

    visible = Nvidia.get_current_process_visible_accelerator_ids()
    return Nvidia.get_current_node_num_accelerators() if visible is None else len(visible)
