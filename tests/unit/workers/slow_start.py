"""A worker that takes a while to be ready: it computes meanwhile, or does nothing."""

import socket
import time
from typing import Any

from kitae.workers import serve


def main(setup: dict[str, Any], stream: socket.socket) -> None:
    serve._WORKING = 0.1

    async def make(send: serve.Send) -> serve.Served:
        end = time.monotonic() + setup["seconds"]
        while time.monotonic() < end:
            if not setup["busy"]:
                time.sleep(0.1)
        return serve.Served()

    serve.serve(stream, make)
