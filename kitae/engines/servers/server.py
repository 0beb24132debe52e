"""One server of vLLM or SGLang, from the moment it can be reached to its end: started by Kitae, or by somebody else."""

import asyncio
import os
import shlex
import signal
import socket
from contextlib import suppress
from pathlib import Path

from kitae.engines.config import EngineConfig
from kitae.engines.servers.dialect import Dialect, Launch
from kitae.engines.servers.server_client import Line, LineLost, Refusal
from kitae.errors import EngineError
from kitae.workers.connection import Deadlines
from kitae.workers.die_with_parent import tethered
from kitae.workers.process_status import KEPT, describe, ending, family_of

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
        words = ending(self._words.decode(errors="replace"))
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
            self._words = (self._words + chunk)[-KEPT:]


class Server:
    """A server that was greeted, the connection with it and, where Kitae has started it, its program. `end` it when
    done. name: of this server alone: one in its place has another address."""

    def __init__(self, name: str, dialect: Dialect, line: Line, program: Program | None = None) -> None:
        self.name = name
        self.dialect = dialect
        self.line = line
        self.program = program

    @property
    def words(self) -> str:
        """The end of what it wrote, as the end of a sentence, where that is known."""
        return "" if self.program is None else self.program.words

    async def end(self) -> None:
        await self.line.close()
        if self.program is not None:
            await self.program.end()


async def open_given(dialect: Dialect, url: str, limits: Deadlines) -> Server:
    """A server that somebody else runs; `EngineError` if it cannot be used."""
    line = Line(url, limits.answer)
    try:
        await dialect.greet(line)
    except (LineLost, Refusal) as error:
        await line.close()
        raise EngineError(f"the {dialect.kind} server at {line.url} cannot be used: {error}") from None
    return Server(line.url, dialect, line)


async def open_started(dialect: Dialect, launch: Launch, config: EngineConfig, limits: Deadlines, name: str) -> Server:
    """A server that Kitae starts on this machine; `EngineError` if it does not come up."""
    port = _free_port()
    command = shlex.split(launch.program) + dialect.command(launch, config, port)
    program = await Program.start(command, {**dialect.environment(launch, config), **launch.gpus})
    line = Line(f"http://127.0.0.1:{port}", limits.answer)
    try:
        await _until_ready(program, line, dialect, limits)
        await dialect.greet(line)
        program.note_memory()
    except BaseException as error:
        await line.close()
        await program.end()
        if isinstance(error, LineLost | Refusal):
            what = f"the {dialect.kind} server that was started cannot be used: {error}"
            raise EngineError(what + program.words) from None
        raise
    return Server(f"{name} at {line.url}", dialect, line, program)


async def _until_ready(program: Program, line: Line, dialect: Dialect, limits: Deadlines) -> None:
    for _ in range(int(limits.start / _LOOK)):
        if program.ended:
            raise EngineError(
                f"the {dialect.kind} server ended before it was ready: {await program.wait()}{program.words}"
            )
        try:
            await line.get(dialect.alive)
            return
        except (LineLost, Refusal):
            await asyncio.sleep(_LOOK)
    raise EngineError(f"the {dialect.kind} server must be ready within {limits.start:g} s{program.words}")


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
