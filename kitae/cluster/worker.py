"""What runs at a post: connects with the controller, then does its duty.

    python -c … SETUP PATHS…     SETUP: {"module", "setup", "cores", "parent", "connect"}; PATHS: of our imports

connect: null, where the connection is the standard input; or the address of the controller and the secret that it asks
for before it listens.
"""

import importlib
import json
import os
import signal
import socket
import sys
from typing import Any

BOOT = "import sys; sys.path[:] = sys.argv[2:]; from kitae.cluster.worker import main; main()"

_PATIENCE = 60.0  # seconds to reach the controller


def main() -> None:
    order = json.loads(sys.argv[1])
    die_with(order["parent"])
    stream = _connect(order["connect"])
    if order["cores"] is not None:
        os.sched_setaffinity(0, order["cores"])  # before torch starts threads
    importlib.import_module(order["module"]).main(order["setup"], stream)


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
