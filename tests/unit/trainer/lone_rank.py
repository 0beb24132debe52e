"""A rank that computes nothing: it does what its driver names, so that the driver can be seen to deal with it."""

import os
import signal
import socket
import time
from typing import Any

from kitae.workers.frames import pack_frame


def main(setup: dict[str, Any], stream: socket.socket) -> None:
    ways = dict(way.split(":") for way in os.environ["LONE_RANKS"].split(","))
    way = ways.get(str(setup["rank"]), "")
    if way == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "refuses":
        stream.sendall(pack_frame({"refused": "no such model"}))
        return
    stream.sendall(pack_frame({"ready": True, "device": "cpu", "dtype": "float32", "updates": 0}))
    stream.recv(2**16)  # the first call
    if way == "fails":
        stream.sendall(pack_frame({"re": 0, "error": "OSError: no memory", "kind": ""}))
    time.sleep(600)
