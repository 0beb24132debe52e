"""The way into a Ray cluster: Ray itself, without its habits; a connection with a cluster that runs; nodes on this
machine.
"""

import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from typing import Any

from kitae.errors import ConfigError

LOOPBACK = "127.0.0.2"  # Ray takes 127.0.0.1 for the address that others know the machine by
_KNOCK = 5.0  # seconds in which a running cluster must answer


def import_ray() -> Any:
    """With its habit turned off to start a cluster whenever it is used without one: after a `close`, say."""
    try:
        with environment_of_ray(RAY_ENABLE_AUTO_CONNECT="0"):
            import ray
    except ImportError:
        raise ConfigError("cluster.backend = 'ray' needs the package ray: pip install 'kitae[cluster]'") from None
    return ray


def connect(ray: Any, address: str) -> None:
    """Become a part of a cluster; Ray itself would try for minutes where there is none."""
    if ray.is_initialized():
        raise ConfigError("this process is a part of a Ray cluster already, and can be one of another no more")
    if "://" in address:
        raise ConfigError(
            f"cluster.address must be auto or HOST:PORT of a cluster that this machine is a node of, got {address!r}"
        )
    _knock(address)
    local = {"_node_ip_address": LOOPBACK} if address.startswith(LOOPBACK) else {}
    try:
        with environment_of_ray(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(
                address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False, **local
            )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"cluster.address: no Ray cluster at {address!r}: {first_line(error)}") from None


def _knock(address: str) -> None:
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise ConfigError(f"cluster.address must be auto or HOST:PORT, got {address!r}")
    try:
        socket.create_connection((host, int(port)), _KNOCK).close()
    except OSError as error:
        raise ConfigError(f"cluster.address: no Ray cluster answers at {address!r}: {error}") from None


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class environment_of_ray:
    """Variables of the environment, for a while; and the handler of SIGTERM as it was before."""

    def __init__(self, **given: str) -> None:
        self._given = given

    def __enter__(self) -> None:
        self._before = {key: os.environ.get(key) for key in self._given}
        self._handler = signal.getsignal(signal.SIGTERM)
        os.environ.update(self._given)

    def __exit__(self, *_: object) -> None:
        for key, value in self._before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
        if signal.getsignal(signal.SIGTERM) is not self._handler:
            signal.signal(signal.SIGTERM, self._handler)


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
        with environment_of_ray(RAY_TMPDIR=self.folder, RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled"):
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
