"""What runs at a post of verifiers: a `VerifierPool` that takes its checks from a socket.

    {"check": n, "response", "reference", "context"} ► {"done": n, "score"}      {"drop": n}: nobody waits for it now
    {"call": n, "op": "close"} ► {"re": n}                                       {"note": text}, {"tick"}: unasked

A response is a text, or says where one lies (`kitae.store.columns`). It ends when the connection does.
"""

import asyncio
import os
import socket
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kitae.errors import KitaeError
from kitae.store.columns import Filed, StoredText, column_files
from kitae.verifiers.pool import VerifierPool
from kitae.workers.frames import pack_frame, read_frame

_TICK = 1.0  # seconds


def main(setup: dict[str, Any], stream: socket.socket) -> None:
    """At a post (`kitae.workers.worker_main`)."""
    asyncio.run(_serve(setup, stream))
    os._exit(0)


async def _serve(setup: dict[str, Any], stream: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=stream)
    host = _Host(writer)
    pool = VerifierPool(setup["name"], setup["params"], setup["workers"], setup["timeout"], host.note)
    try:
        await pool.start()
    except KitaeError as error:
        host.send({"refused": str(error)})
        await writer.drain()
        return
    host.send({"ready": True})
    ticks = asyncio.create_task(host.tick(pool))
    try:
        while (frame := await read_frame(reader)) is not None:
            if host.take(pool, frame.header):
                break
    finally:
        ticks.cancel()
        host.drop_all()
        await pool.close()
        with suppress(ConnectionError):
            await writer.drain()


class _Host:
    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._checks: dict[int, asyncio.Task[None]] = {}

    def send(self, header: dict[str, Any]) -> None:
        self._writer.write(pack_frame(header))

    def note(self, text: str) -> None:
        self.send({"note": text})

    def take(self, pool: VerifierPool, header: dict[str, Any]) -> bool:
        """Whether it is to end."""
        match header:
            case {"check": number, "response": response, "reference": reference, "context": context}:
                task = asyncio.create_task(self._check(pool, number, response, reference, context))
                self._checks[number] = task
                task.add_done_callback(lambda _: self._checks.pop(number, None))
            case {"drop": number} if number in self._checks:
                self._checks[number].cancel()
            case {"call": number, "op": "close"}:
                self.send({"re": number})
                return True
        return False

    async def _check(self, pool: VerifierPool, number: int, response: Any, reference: Any, context: Any) -> None:
        score = await pool.score(_response(response), reference, context)
        self.send({"done": number, "score": asdict(score)})

    def drop_all(self) -> None:
        for task in list(self._checks.values()):
            task.cancel()

    async def tick(self, pool: VerifierPool) -> None:
        while True:
            await asyncio.sleep(_TICK)
            self.send({"tick": asdict(pool.stats)})


def _response(wired: Any) -> str | StoredText:
    """A text, or where it lies."""
    if isinstance(wired, str):
        return wired
    return StoredText(column_files(Path(wired["folder"])), Filed(*wired["filed"]))
