"""A worker process with a `VerifierPool`, whose checks come from the controller (`kitae.verifiers.remote_pool`).

A response is a text, or says where a text lies (`kitae.store.columns`).
"""

import socket
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kitae.store.columns import Filed, StoredText, column_files
from kitae.verifiers.given_functions import from_text, held
from kitae.verifiers.pool import VerifierPool
from kitae.workers.frames import Frame
from kitae.workers.serve import Reply, Send, Served, serve


def main(setup: dict[str, Any], stream: socket.socket) -> None:
    """In a worker process (`kitae.workers.worker_main`)."""

    async def make(send: Send) -> VerifierWorker:
        host = VerifierWorker(setup, send)
        await host.pool.start()
        host.greeting = {"grouped": host.pool.grouped}
        return host

    serve(stream, make)


class VerifierWorker(Served):
    """Sends what the pool has to say to the user as events."""

    def __init__(self, setup: dict[str, Any], send: Send) -> None:
        def note(text: str) -> None:
            send({"event": "note", "text": text}, {})

        self.pool = VerifierPool(setup["name"], setup["params"], setup["workers"], setup["timeout"], note)
        self.concurrent = {"score": self._score}
        self._copies = ExitStack()
        self._copies.enter_context(held(from_text(setup["held"])))

    async def _score(self, frame: Frame) -> Reply:
        header = frame.header
        responses = [_response(each) for each in header["responses"]]
        scores = await self.pool.scores(responses, header["reference"], header["contexts"])
        return {"scores": [asdict(score) for score in scores]}, {}

    async def close(self) -> None:
        await self.pool.close()
        self._copies.close()


def _response(wired: Any) -> str | StoredText:
    """A text, or where it lies."""
    if isinstance(wired, str):
        return wired
    return StoredText(column_files(Path(wired["folder"])), Filed(*wired["filed"]))
