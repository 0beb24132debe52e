"""The worker's end of the connection with the controller (`kitae.workers.connection` is the other one).

    {"call": 7, "op": "probe", …}  ►  {"re": 7, …}, or {"re": 7, "error": text, "kind": name of a `KitaeError`}
    {"cancel": 7}                     nobody waits for the reply of this call any more
                                   ◄  {"working": [s, bytes]}, every second, while it makes what it serves
                                   ◄  {"ready": true, …}, or {"refused": text}, which is the end
                                   ◄  {"event": name, …}, {"tick": true}: unasked; a tick is a sign of life

Every frame to the controller may have a "status". A worker ends when it is asked to, or when the connection does.
"""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from kitae.errors import KitaeError
from kitae.workers.background_tasks import BackgroundTasks
from kitae.workers.frames import Array, Frame, pack_frame, read_frame

TICK = 0.25  # seconds between two signs of life
_WORKING = 1.0  # seconds between two signs of work, before it is ready

Reply = tuple[Mapping[str, Any], Mapping[str, Array]]  # header and arrays of a frame
Call = Callable[[Frame], Awaitable[Reply]]
Send = Callable[[Mapping[str, Any], Mapping[str, Array]], None]

NOTHING: Reply = ({}, {})


class Served:
    """What a worker offers to the controller. A subclass sets what it has.

    greeting: sent when it is ready. ordered: calls that are carried out one after the other, in the order in which they
    come; while one is carried out, no other frame is read. concurrent: calls that run beside others; such a call is
    cancelled when nobody waits for its reply any more.
    """

    greeting: Mapping[str, Any] = {}
    ordered: Mapping[str, Call] = {}
    concurrent: Mapping[str, Call] = {}

    def status(self) -> Mapping[str, Any] | None:
        """The state of the worker, which every frame to the controller carries."""
        return None

    def tick(self) -> None:
        """Called before every sign of life."""

    async def close(self) -> None:
        """Called at the end, when concurrent calls have been cancelled."""


def serve(
    stream: socket.socket,
    make: Callable[[Send], Awaitable[Served]],
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Serve what `make` gives until the end, and end the process. A `KitaeError` of `make` refuses the launch. Anything
    may be sent as an event with what `make` is called with. around: entered while it serves."""
    if asyncio.run(_serve(stream, make, around)):
        os._exit(0)  # a clean exit of all that is loaded takes a second


@contextmanager
def _signs_of_work(stream: socket.socket) -> Iterator[None]:
    """Report to the controller how much processor time this process has used, and how much it has read: a model of any
    size may be loaded, as long as it goes on. A thread says so, since loading a model blocks the event loop."""
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(_WORKING):
            with suppress(OSError):
                stream.send(pack_frame({"working": [time.process_time(), bytes_read()]}))

    thread = threading.Thread(target=tell, name="signs of work", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def bytes_read() -> int:
    """From disks, where the system says so."""
    with suppress(OSError), open("/proc/self/io") as counts:
        return next((int(line.split()[1]) for line in counts if line.startswith("read_bytes")), 0)
    return 0


async def _serve(
    stream: socket.socket,
    make: Callable[[Send], Awaitable[Served]],
    around: Callable[[], AbstractContextManager[Any]],
) -> bool:
    """Whether it was ready."""
    reader, writer = await asyncio.open_connection(sock=stream)
    connection = _Connection(reader, writer)
    with suppress(ConnectionError):
        try:
            with _signs_of_work(stream):
                served = await make(connection.send)
        except KitaeError as error:
            connection.send({"refused": str(error)}, {})
            await writer.drain()
            return False
        with around():
            await connection.run(served)
        await writer.drain()
    return True


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._served = Served()
        self._tasks = BackgroundTasks()
        self._running: dict[int, asyncio.Task[None]] = {}  # concurrent calls

    def send(self, header: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        status = self._served.status()
        self._writer.write(pack_frame(header if status is None else {**header, "status": status}, arrays))

    async def run(self, served: Served) -> None:
        self._served = served
        self.send({"ready": True, **served.greeting}, {})
        ticks, last = self._tasks.start(self._tick()), None
        try:
            while (frame := await read_frame(self._reader)) is not None:
                if frame.header.get("op") == "close":
                    last = frame
                    break
                await self._take(frame)
        finally:
            ticks.cancel()
            await self._tasks.cancel()
            await served.close()
        if last is not None:
            self.send({"re": last.header["call"]}, {})

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            self._served.tick()
            self.send({"tick": True}, {})

    async def _take(self, frame: Frame) -> None:
        match frame.header:
            case {"cancel": number}:
                if number in self._running:
                    self._running[number].cancel()
            case {"call": number, "op": op} if op in self._served.concurrent:
                self._running[number] = self._tasks.start(self._answer(frame, self._served.concurrent[op]))
                self._running[number].add_done_callback(lambda _: self._running.pop(number))
                await asyncio.sleep(0)  # a call that comes next finds it begun
            case {"op": op}:
                await self._answer(frame, self._served.ordered[op])

    async def _answer(self, frame: Frame, call: Call) -> None:
        number = frame.header["call"]
        try:
            header, arrays = await call(frame)
        except KitaeError as error:
            self.send({"re": number, "error": str(error), "kind": type(error).__name__}, {})
        except Exception as error:
            self.send({"re": number, "error": f"{type(error).__name__}: {error}", "kind": ""}, {})
        else:
            self.send({"re": number, **header}, arrays)
