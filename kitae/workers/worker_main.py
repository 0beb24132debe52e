"""What runs in a worker process: connects with the controller, then runs the module of its launch spec.

    python -c … MODULE PATHS…     MODULE: for who looks at processes; PATHS: of our imports

The order comes by the standard input: {"module", "setup", "cores", "parent", "connect"}. It may hold secrets, and
arguments are what everybody on the machine can read. connect: null, where the connection is the standard input; or the
address of the controller and the secret that it asks for before it listens.
"""

import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

from kitae.workers.base import LaunchSpec

BOOT = "import sys; sys.path[:] = sys.argv[2:]; from kitae.workers.worker_main import main; main()"

_PATIENCE = 60.0  # seconds to reach the controller
_SIZE = 8  # bytes of the length of an order


def pack_order(spec: LaunchSpec, parent: int, connect: Mapping[str, Any] | None = None) -> bytes:
    """What the process is sent first. parent: the process that starts it."""
    cores = None if spec.cores is None else list(spec.cores)
    order = {"module": spec.module, "setup": dict(spec.setup), "cores": cores, "parent": parent, "connect": connect}
    text = json.dumps(order).encode()
    return len(text).to_bytes(_SIZE, "big") + text


def main() -> None:
    order = json.loads(_read(int.from_bytes(_read(_SIZE), "big")))
    die_with(order["parent"])
    stream = _connect(order["connect"])
    if order["cores"] is not None:
        os.sched_setaffinity(0, order["cores"])  # before torch starts threads
    importlib.import_module(order["module"]).main(order["setup"], stream)


def _read(count: int) -> bytes:
    """So much of the standard input, and not a byte more: what follows is for the module."""
    found = b""
    while len(found) < count:
        chunk = os.read(0, count - len(found))
        if not chunk:  # who would have sent it is gone
            sys.exit(1)
        found += chunk
    return found


def _connect(where: dict[str, Any] | None) -> socket.socket:
    if where is not None:
        stream = socket.create_connection((where["host"], where["port"]), _PATIENCE)
        stream.settimeout(None)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.sendall(where["secret"].encode())
        return stream
    stream = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    return stream


def die_with(parent: int) -> None:
    """End when the thread that started us does, whatever we are doing."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it is gone already
        sys.exit(1)
