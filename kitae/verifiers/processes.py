"""The processes of a pool: a template that has loaded the verifier, and the workers that are forked from it.

    pool ── setup ─────────► template: imports, loads, tries the example, once
    pool ── "spawn", pipes ► template ── fork ──► worker: answers jobs on its pipe, in milliseconds after the fork
    pool ── "reap", pid ───► template: waits for the worker that the pool has killed, and says how it ended

A worker costs a fork, not a start of the interpreter, so losing one is cheap. A dead worker stays a zombie until it is
reaped: its process id cannot become somebody else's while the pool may still send it a signal.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kitae.errors import VerifierError
from kitae.verifiers.worker import MAX_CONTROL

_START_LIMIT = 60.0  # seconds for the template to import what it needs
_ANSWER_LIMIT = 60.0  # seconds for the template to fork a worker, or to see one end that was killed
_SLICES = 10  # of a deadline
_INDULGENCE = 10  # times a deadline, at most, for a process that others keep from the processor
_MAX_REPLY = 2**24  # bytes
_LOOKS = 50  # times within a second that a silent worker is looked at
_STDERR_TAIL = 2_000  # bytes of stderr that are remembered
_MAX_LINE = 10_000  # bytes of a line that are told on
_LAST_WORDS = 0.1  # seconds for what a process that has ended left in its pipe
_BOOT = "import sys; sys.path[:] = sys.argv[1:]; from kitae.verifiers.worker import main; main()"  # our imports work
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}  # a core each; repeatable


class WorkerDied(Exception):
    """The process is gone or useless; the message says why."""


class OutOfTimeError(Exception):
    """A check was given up. `OutOfTimeError("computed")`: it used its limit of processor time, which is its own doing.

    "waited": for something else than the processor, for as long as its limit. "starved": it was ready to go on, or
    stopped by others, and did not get its time within many times the limit: the machine's doing.
    """

    @property
    def reason(self) -> str:
        return str(self)


async def within(seconds: float, task: "asyncio.Task[Any]") -> Any:
    """The result of a task; `TimeoutError` if it takes longer, in which case it is cancelled.

    The deadline is counted in slices, so that an event loop that was blocked (by a training step, say) is late for one
    slice of it and does not take its own delay for that of a process.
    """
    try:
        for _ in range(_SLICES):
            await asyncio.wait({task}, timeout=seconds / _SLICES)
            if task.done():
                return task.result()
        raise TimeoutError
    finally:
        task.cancel()


class Template:
    """`Template({"name": "math", "params": {}}, print)`: started at the first use, started again should it die.

    `hear` gets what it and its workers print, piece by piece.
    """

    def __init__(self, setup: Mapping[str, Any], hear: Callable[[bytes], None]) -> None:
        self.on_timeout = "error"
        self.repeatable = False
        self.warnings: list[str] = []
        self._hear = hear
        self._setup = setup
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._words: _Words | None = None
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        """Launch the process, unless it runs, and load the verifier there; `VerifierError` if that fails."""
        async with self._lock:
            if self._process is None or self._process.returncode is not None:
                await self._start()

    async def spawn(self) -> "Process":
        """A new worker, after a new start should the template be gone; `VerifierError` if that does not help."""
        try:
            try:
                await self.start()
                return await self._fork()
            except EOFError:
                await self.start()
                return await self._fork()
        except (OSError, EOFError) as error:
            reason = str(error) or "its template ended"
            raise VerifierError(f"a verifier worker could not be forked: {reason}") from None

    async def _fork(self) -> "Process":
        jobs, theirs = socket.socketpair()
        read, write = os.pipe()
        try:
            pid = int((await self._ask("spawn", theirs.fileno(), write))["pid"])
        except BaseException:
            jobs.close()  # a worker that was forked all the same ends with it
            os.close(read)
            raise
        finally:
            theirs.close()
            os.close(write)
        jobs.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=jobs, limit=_MAX_REPLY)
        return Process(self, pid, reader, writer, await _Words.of(read, self._hear))

    async def reap(self, pid: int) -> int | None:
        """How a worker that is dead or dying ended, as `waitpid` says it; None if the template is gone too."""
        try:
            return int((await self._ask({"reap": pid}))["status"])
        except EOFError:
            return None

    async def close(self) -> None:
        async with self._lock:
            await self._stop()

    async def _start(self) -> None:
        await self._stop()
        setup = _encode_setup(self._setup)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        read, write = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _BOOT, *sys.path),
                stdin=theirs.fileno(),
                stdout=write,
                stderr=write,
                start_new_session=True,  # deaf to Ctrl-C
                env=os.environ | _ENVIRONMENT,
            )
        except OSError as error:
            ours.close()
            os.close(read)
            raise VerifierError(f"a verifier worker could not start: {error}") from None
        finally:
            theirs.close()
            os.close(write)
        self._control, self._words = ours, await _Words.of(read, self._hear)
        try:
            ours.send(setup)
            ready = await within(_START_LIMIT, asyncio.create_task(self._receive()))
            problem = ready.get("error")
        except TimeoutError:
            problem = f"a verifier worker must start within {_START_LIMIT:g} s{self._words.last()}"
        except (EOFError, OSError):
            await self._words.rest()
            status = await self._process.wait()
            ended = describe(-status if status < 0 else status << 8)
            problem = f"a verifier worker could not start: {ended}{self._words.last()}"
        if problem:
            await self._stop()
            raise VerifierError(problem)
        self.on_timeout, self.repeatable, self.warnings = ready["on_timeout"], ready["repeatable"], ready["warnings"]

    async def _ask(self, request: Any, *descriptors: int) -> dict[str, Any]:
        """A question and its answer belong together, even if whoever asked is cancelled meanwhile."""
        return await asyncio.shield(asyncio.create_task(self._exchange(request, [os.dup(d) for d in descriptors])))

    async def _exchange(self, request: Any, descriptors: list[int]) -> dict[str, Any]:
        try:
            async with self._lock:
                if self._control is None:
                    raise EOFError
                try:
                    socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
                    reply: dict[str, Any] = await within(_ANSWER_LIMIT, asyncio.create_task(self._receive()))
                    return reply
                except (TimeoutError, OSError, EOFError):  # it hangs, or is gone
                    await self._stop()
                    raise EOFError from None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    async def _receive(self) -> dict[str, Any]:
        assert self._control is not None
        message = await asyncio.get_running_loop().sock_recv(self._control, MAX_CONTROL)
        if not message:
            raise EOFError
        reply: dict[str, Any] = json.loads(message)
        return reply

    async def _stop(self) -> None:
        """Kill it; workers that are left die with it."""
        process, control, words = self._process, self._control, self._words
        self._process = self._control = self._words = None
        if control is not None:
            control.close()
        if process is not None:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
            await process.wait()
        if words is not None:
            await words.close()


class Process:
    """One worker."""

    def __init__(
        self,
        template: Template,
        pid: int,
        replies: asyncio.StreamReader,
        requests: asyncio.StreamWriter,
        words: "_Words",
    ) -> None:
        self.pid = pid
        self._template = template
        self._replies, self._requests, self._words = replies, requests, words
        self._reaping: asyncio.Task[int | None] | None = None
        self.paused = False
        self._began = 0.0

    @property
    def ended(self) -> bool:
        return self._replies.at_eof()

    async def ask(self, message: bytes, message_id: int, seconds: float) -> dict[str, Any]:
        """The answer to a message; `OutOfTimeError` where that takes longer than it may.

        Looked at from time to time. What counts is the processor time that the process used, and time in which it
        waited by itself; both have the same limit. Time in which it was ready and others had the processor, or in which
        it was stopped or waited for memory from a disk, is the machine's, and has a limit many times as long; time in
        which the pool had it paused does not count at all.
        """
        task = asyncio.create_task(self._exchange(message, message_id))
        began = before = self._began = _used(self.pid)
        glance = seconds / _SLICES
        waited = passed = 0.0
        try:
            while True:
                await asyncio.wait({task}, timeout=glance)
                if task.done():
                    return task.result()
                used = _used(self.pid)
                before, ran = used, used - before
                if self.paused:
                    continue
                passed += glance
                waited += max(0.0, glance - ran) if _state(self.pid) == "S" else 0.0
                for reason, spent, limit in (
                    ("computed", used - began, seconds),
                    ("waited", waited, seconds),
                    ("starved", passed, seconds * _INDULGENCE),
                ):
                    if spent >= 0.99 * limit:
                        raise OutOfTimeError(reason)
        finally:
            task.cancel()

    async def _exchange(self, message: bytes, message_id: int) -> dict[str, Any]:
        """Send one message and wait for its answer; `EOFError` where the process has ended."""
        try:
            self._requests.write(message)
            await self._requests.drain()
            line = await self._replies.readline()
            if not line.endswith(b"\n"):
                raise EOFError
            reply: dict[str, Any] = json.loads(line)
        except ConnectionError:
            raise EOFError from None
        except ValueError:  # not JSON, or longer than the limit
            reply = {}
        if reply.pop("id", None) != message_id:  # or a fork of it answers too
            raise WorkerDied(f"it broke the protocol{self._words.last()}")
        return reply

    def owes(self, seconds: float) -> float:
        """What is left of so much processor time, where it is ready to use it and others have the processor; else 0."""
        return max(0.0, seconds - (_used(self.pid) - self._began)) if _state(self.pid) == "R" else 0.0

    def pause(self, paused: bool) -> None:
        """Leave the processor to others, with all that it has started, or go on. One that only waits need not."""
        family = _family(self.pid)
        if paused and not any(_state(pid) == "R" for pid in family):
            return
        self.paused = paused
        for pid in family:
            with suppress(OSError):
                os.kill(pid, signal.SIGSTOP if paused else signal.SIGCONT)

    async def post_mortem(self) -> str:
        """Why a worker that has ended, or closed its pipe, did so."""
        await self._words.rest()
        for _ in range(_LOOKS):
            if _state(self.pid) in ("Z", ""):
                return f"{describe(await self._reap())}{self._words.last()}"
            await asyncio.sleep(1 / _LOOKS)
        return f"it closed its pipe{self._words.last()}"

    async def kill(self) -> None:
        """End the process and the children it started, and let go of the pipes that any others may hold."""
        if self._reaping is None:  # afterwards its id may be somebody else's
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        await self._reap()
        self._requests.transport.abort()
        await self._words.close()

    async def _reap(self) -> int | None:
        if self._reaping is None:
            self._reaping = asyncio.create_task(self._template.reap(self.pid))
        return await asyncio.shield(self._reaping)


class _Words:
    """What a process writes to its stdout and stderr: told on as whole lines, and the end of it remembered."""

    def __init__(
        self, transport: asyncio.ReadTransport, reader: asyncio.StreamReader, hear: Callable[[bytes], None]
    ) -> None:
        self._transport = transport
        self._hear = hear
        self._tail = b""
        self._task = asyncio.create_task(self._read(reader))

    @classmethod
    async def of(cls, descriptor: int, hear: Callable[[bytes], None]) -> "_Words":
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", 0)
        )
        return cls(transport, reader, hear)

    async def rest(self) -> None:
        """Wait until all is read, a second at most: a child that escaped may hold the pipe open."""
        await asyncio.wait({self._task}, timeout=1)

    def last(self) -> str:
        words = self._tail.decode(errors="replace").strip()
        return f"; its stderr ends with:\n{words}" if words else ""

    async def close(self) -> None:
        """Hear what is left, and no more: a child that escaped may hold the pipe open and go on."""
        await asyncio.wait({self._task}, timeout=_LAST_WORDS)
        self._task.cancel()
        self._transport.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        line = b""
        while chunk := await reader.read(2**16):
            self._tail = (self._tail + chunk)[-_STDERR_TAIL:]
            whole, newline, rest = chunk.rpartition(b"\n")
            if newline:
                self._hear(line + whole)
            line = rest if newline else (line + rest)[:_MAX_LINE]
        if line:
            self._hear(line)


def _encode_setup(setup: Mapping[str, Any]) -> bytes:
    where = f"params of verifier {setup['name']!r}"
    try:
        found = json.dumps(setup).encode()
    except (TypeError, ValueError) as error:
        raise VerifierError(f"{where} must be JSON values, got {str(setup['params'])[:200]}: {error}") from None
    if len(found) > MAX_CONTROL:
        raise VerifierError(f"{where} must have at most {MAX_CONTROL} bytes as JSON, got {len(found)}")
    return found


def describe(status: int | None) -> str:
    """A wait status in words."""
    if status is None:
        return "its template ended"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"killed by signal {number} ({signal.strsignal(number)})"
    return f"exit status {os.WEXITSTATUS(status)}"


def _family(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for parent in found:
        with suppress(OSError):
            for children in Path(f"/proc/{parent}/task").glob("*/children"):
                found += map(int, children.read_text().split())
    return found


def _state(pid: int) -> str:
    """The letter that Linux gives to the state of a process; "": there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except OSError:
        return ""


def _used(pid: int) -> float:
    """The processor time of a process in seconds, by the clock that Linux has for each: files in /proc count ticks."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0
