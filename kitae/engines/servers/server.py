"""One server, from the moment it can be reached to its end, and where servers come from.

A *seat* is a place for a server: one that Kitae starts, and starts again when it is lost, or one that somebody runs at
an address, which is gone for good then.
"""

import asyncio
import os
import shlex
import signal
import socket
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from kitae.engines.config import EngineConfig
from kitae.engines.servers.dialect import Dialect, Launch
from kitae.engines.servers.server_client import Line, LineLost, Refusal
from kitae.errors import EngineError
from kitae.workers.background_tasks import Chores
from kitae.workers.connection import Deadlines
from kitae.workers.die_with_parent import tethered
from kitae.workers.process_status import describe, family_of

_WORDS = 4_000  # bytes of what a server wrote that are remembered
_GRACE = 8.0  # seconds: vLLM leaves shared memory behind when it is killed
_SEGMENTS = "/dev/shm/psm_"
_LOOK = 0.5  # seconds between two looks whether it is ready


class Program:
    """The process of a server, on a tether: it ends with this process, and with it all that it has started."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._words = b""
        self._memory: set[Path] = set()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, command: list[str], environment: dict[str, str]) -> "Program":
        try:
            process = await asyncio.create_subprocess_exec(
                *tethered(command, _GRACE),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # deaf to Ctrl-C
                env={**os.environ, **environment},
            )
        except OSError as error:
            raise EngineError(f"the server could not be started: {error}") from None
        return cls(process)

    @property
    def words(self) -> str:
        """The end of what it wrote, as the end of a sentence."""
        words = self._words.decode(errors="replace").strip()
        return f"; its last words were:\n{words}" if words else ""

    @property
    def ended(self) -> bool:
        return self._process.returncode is not None

    def note_memory(self) -> None:
        """Which shared memory it has: of a process that is killed, it would stay."""
        self._memory = {path for pid in family_of(self._process.pid) for path in _mapped(pid)}

    async def wait(self) -> str:
        """How it ended."""
        status = await self._process.wait()
        await asyncio.wait({self._reading}, timeout=1)
        return describe(-status if status < 0 else status << 8)

    async def end(self) -> None:
        """End it, and all that it has started."""
        if not self.ended:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)  # the tether's order to end all below it
        await self._process.wait()
        for path in self._memory:
            path.unlink(missing_ok=True)
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while chunk := await self._process.stdout.read(2**16):
            self._words = (self._words + chunk)[-_WORDS:]


class Peer:
    """A server that was greeted.

    version: of the weights it serves. lost: why it is of no use any more. shut: what it tells waits, because it is
    paused for us, or its weights are not known to be good. broken: weights did not reach it whole. turn: who pauses,
    resumes, loads or probes. heard: something came from it since somebody looked.
    """

    def __init__(self, seat: "Seat", line: Line, program: Program | None) -> None:
        self.seat = seat
        self.line = line
        self.program = program
        self.version = -1
        self.lost: str | None = None
        self.shut = True
        self.broken = False
        self.paused = False
        self.heard = False
        self.turn = asyncio.Lock()
        self.sharing: Counter[str] = Counter()  # requests that it works on, by their share keys
        self._chores = Chores()  # that use the line

    @property
    def name(self) -> str:
        """Of this server alone: another one at its seat has another address."""
        return self.line.url if self.line.url == self.seat.name else f"{self.seat.name} at {self.line.url}"

    def have(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Done, unless the server's end comes first."""
        return self._chores.have(work)

    async def end(self) -> None:
        await self._chores.end()
        await self.line.close()
        if self.program is not None:
            await self.program.end()


class Seat(Protocol):
    """lasting: a server that is lost can be replaced by another, which begins with the weights of the start.

    `open` gives a server that answers, or raises `EngineError`.
    """

    name: str
    lasting: bool
    dialect: Dialect

    async def open(self) -> Peer: ...


class GivenSeat:
    """Implements `Seat` for a server that somebody else runs: `GivenSeat(SGLang(), "http://node7:30000", limits)`."""

    lasting = False

    def __init__(self, dialect: Dialect, url: str, limits: Deadlines) -> None:
        self.name = url.rstrip("/")
        self.dialect = dialect
        self._limits = limits

    async def open(self) -> Peer:
        line = Line(self.name, self._limits.answer)
        try:
            await self.dialect.greet(line)
        except (LineLost, Refusal) as error:
            await line.close()
            raise EngineError(f"the {self.dialect.kind} server at {self.name} cannot be used: {error}") from None
        return Peer(self, line, None)


class StartedSeat:
    """Implements `Seat` for a server that Kitae starts on this machine."""

    lasting = True

    def __init__(self, dialect: Dialect, launch: Launch, config: EngineConfig, limits: Deadlines, name: str) -> None:
        self.name = name
        self.dialect = dialect
        self._launch = launch
        self._config = config
        self._limits = limits

    async def open(self) -> Peer:
        port = _free_port()
        command = shlex.split(self._launch.program) + self.dialect.command(self._launch, self._config, port)
        program = await Program.start(command, self.dialect.environment(self._launch, self._config))
        line = Line(f"http://127.0.0.1:{port}", self._limits.answer)
        try:
            await self._until_ready(program, line)
            await self.dialect.greet(line)
            program.note_memory()
        except BaseException as error:
            await line.close()
            await program.end()
            if isinstance(error, LineLost | Refusal):
                what = f"the {self.dialect.kind} server that was started cannot be used: {error}"
                raise EngineError(what + program.words) from None
            raise
        return Peer(self, line, program)

    async def _until_ready(self, program: Program, line: Line) -> None:
        for _ in range(int(self._limits.start / _LOOK)):
            if program.ended:
                raise EngineError(
                    f"the {self.dialect.kind} server ended before it was ready: {await program.wait()}{program.words}"
                )
            try:
                await line.get(self.dialect.alive)
                return
            except (LineLost, Refusal):
                await asyncio.sleep(_LOOK)
        raise EngineError(
            f"the {self.dialect.kind} server must be ready within {self._limits.start:g} s{program.words}"
        )


def _mapped(pid: int) -> set[Path]:
    """The segments of Python's shared memory that a process has mapped."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {Path(line.split()[-1]) for line in lines if line.split()[-1].startswith(_SEGMENTS)}
    return set()


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
