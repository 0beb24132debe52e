"""What runs at the posts of these tests: answers calls, and ends as it is told to."""

import os
import socket
import subprocess
import sys
import time
from typing import Any

from kitae.workers.frames import pack_frame


def main(setup: dict[str, Any], stream: socket.socket) -> None:
    if "refuse" in setup:
        stream.sendall(pack_frame({"refused": setup["refuse"]}))
        return
    if "die" in setup:
        sys.exit(setup["die"])
    print(setup.get("say", ""), file=sys.stderr, flush=True)
    child = subprocess.Popen(["sleep", "600"]) if setup.get("child") else None
    facts = {"pid": os.getpid(), "child": child.pid if child else 0, "threads": os.environ.get("OMP_NUM_THREADS")}
    shown = {key: os.environ.get(key) for key in ("CUDA_VISIBLE_DEVICES", "OWN", "RAY_JOB_ID")}
    stream.sendall(pack_frame({"ready": True, "setup": len(setup.get("ballast", "")), **facts, "shown": shown}))
    if setup.get("linger"):
        time.sleep(600)
    while stream.recv(2**16):
        pass
