"""Processes that programs start as `python -c CODE`, forked from one that has the imports done.

Imports take most of the time of a tiny run with ranks and engines of their own. What is forked is otherwise a process
like any other: a child of who asked for it, in a session of its own, with its descriptors, environment and folder, to
be killed and waited for. Left out: `PYTHONHASHSEED` comes too late, and `/proc` shows the command line of the server.
"""

import asyncio
import atexit
import ctypes
import fcntl
import gc
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import asdict, dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Self

IMPORTS = (
    "kitae.run.train_run", "kitae.cli.train", "kitae.trainer.parallel.rank_process", "kitae.offline.methods",
    "kitae.engines.process.engine_main", "kitae.engines.native.engine", "kitae.trainer.teacher.teacher_main",
    "kitae.verifiers.pool_process", "peft", "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3", "transformers.models.auto.modeling_auto", "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel", "torch.distributed.checkpoint", "matplotlib.pyplot", "warm_loading",
)  # fmt: skip
POSTS = ("from kitae.workers.worker_main import", "from kitae.trainer.teacher.teacher_main import")
VERIFIERS = ("from kitae.verifiers.child_main import", "from kitae.verifiers.reward_model_process import")
_LIMIT = 2**20  # bytes of an order
_FILES = 64  # descriptors of an order
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Order:
    """Order("print(input())", ("-c",), {"HOME": "/root"}, "/tmp", (0, 1, 2), parent=71): files get these numbers."""

    code: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str
    files: tuple[int, ...]
    parent: int


def context() -> ForkServerContext:
    """Of `multiprocessing`: makes processes with the imports of a run, as children of one that has them done."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload([*IMPORTS, "harness"])
    return found


@contextmanager
def as_rank(errors: Path) -> Iterator[None]:
    """In such a process: it talks to others on this machine, and its errors go to a file."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with errors.open("w") as stderr, redirect_stderr(stderr):
        try:
            yield
        except BaseException:
            traceback.print_exc()
            raise


class Child:
    """What the package needs of `asyncio.subprocess.Process`."""

    stdin = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.stdout: asyncio.StreamReader | None = None
        self.pipe: asyncio.ReadTransport | None = None
        self.returncode: int | None = None
        self._gone = asyncio.Event()
        self._handle = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._handle, self._end)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    async def wait(self) -> int:
        await self._gone.wait()
        await self._end_of_words()
        assert self.returncode is not None
        return self.returncode

    async def _end_of_words(self) -> None:
        """What it has written is read; if somebody else holds the pipe, no more than that."""
        for _ in range(10):
            if self.pipe is None or self.pipe.is_closing():
                return
            await asyncio.sleep(0.01)
        assert self.pipe is not None
        self.pipe.close()

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._handle)
        os.close(self._handle)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._gone.set()


class Server:
    """The process with the imports done, below this one."""

    def __init__(self, connection: socket.socket, end: Callable[[], None]) -> None:
        self._connection, self._end = connection, end
        self._lock = threading.Lock()
        assert connection.recv(_LIMIT), "what processes are forked from could not do its imports"

    @classmethod
    def started(cls) -> Self:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = context().Process(target=_serve, args=(theirs,), daemon=True)
            process.start()

        def end() -> None:
            process.kill()
            process.join()

        return cls(ours, end)

    @classmethod
    def forked(cls) -> Self:
        """From this process, which has the imports done, and no threads yet."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if (pid := os.fork()) == 0:
            try:
                ours.close()
                os.setsid()
                _serve(theirs)
            finally:
                os._exit(0)
        theirs.close()
        return cls(ours, lambda: (os.kill(pid, signal.SIGKILL), os.waitpid(pid, 0)))

    def instead_of(self, usual: Callable[..., Any], boots: tuple[str, ...]) -> Callable[..., Any]:
        """`asyncio.create_subprocess_exec` with programs that begin with these from here, and all others as usual."""

        async def start(*command: str, **options: Any) -> Any:
            ours = command[:2] == (sys.executable, "-c") and any(boot in command[2] for boot in boots)
            return await (self.start if ours else usual)(*command, **options)

        return start

    async def start(
        self,
        *command: str,
        stdin: int,
        stdout: int,
        stderr: int,
        start_new_session: bool,
        env: Mapping[str, str],
        pass_fds: tuple[int, ...] = (),
        cwd: str | None = None,
    ) -> Child:
        """As `asyncio.create_subprocess_exec`, as far as the package uses it for programs of its own."""
        assert command[:2] == (sys.executable, "-c") and start_new_session
        read, write = os.pipe() if stdout == subprocess.PIPE else (-1, stdout)
        errors = write if stderr == subprocess.STDOUT else stderr
        files = {0: stdin, 1: write, 2: errors, **{number: number for number in pass_fds}}
        order = Order(command[2], ("-c", *command[3:]), dict(env), cwd or os.getcwd(), tuple(files), os.getpid())
        child = Child(self._fork(order, list(files.values())))
        if read >= 0:
            os.close(write)
            try:
                child.stdout, child.pipe = await _reader(read)
            except BaseException:  # whoever wanted it has given up
                child.kill()
                raise
        return child

    def close(self) -> None:
        self._connection.close()
        self._end()

    def _fork(self, order: Order, files: list[int]) -> int:
        """While it is made this process adopts orphans: its parent there ends at once, and it becomes our child."""
        with self._lock:
            _adopt(True)
            try:
                socket.send_fds(self._connection, [json.dumps(asdict(order)).encode()], files)
                reply = self._connection.recv(_LIMIT)
                assert reply, "what processes are forked from has ended"
                return int(reply)
            finally:
                _adopt(False)


async def _reader(descriptor: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    reader = asyncio.StreamReader()
    pipe = os.fdopen(descriptor, "rb", buffering=0)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader, transport


def _adopt(whether: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(whether), 0, 0, 0)


def _serve(connection: socket.socket) -> None:
    with suppress(PermissionError):  # who stops or kills the group of a test does not mean this process
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # what is forked need not look through all that was imported
    connection.send(b"ready")
    while True:
        message, files, *_ = socket.recv_fds(connection, _LIMIT, _FILES)
        if not message:
            return
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child == 0:
                _run(Order(**json.loads(message)), files)
            os.write(write, str(child).encode())
            os._exit(0)
        os.close(write)  # so that the end of one that was killed is the end of what there is to read
        os.waitpid(between, 0)
        connection.send(os.read(read, 20) or b"-1")
        for descriptor in (read, *files):
            os.close(descriptor)


def _run(order: Order, files: list[int]) -> None:
    """Does not return."""
    status = 1
    try:
        while os.getppid() != order.parent:
            time.sleep(0.0005)
        os.setsid()
        _take(dict(zip(order.files, files, strict=True)))
        sys.stdin = os.fdopen(0, closefd=False)  # the one of the process that it was forked from is closed
        os.chdir(order.folder)
        os.environ.clear()
        os.environ.update(order.environment)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _use_threads(order.environment)
        sys.argv = list(order.argv)
        exec(order.code, {"__name__": "__main__"})
        status = 0
    except SystemExit as stop:
        status = _status_of(stop)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _status_of(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(stop.code, file=sys.stderr)
    return 1


def _take(files: dict[int, int]) -> None:
    """Descriptors by the numbers that they shall have; no others stay open."""
    above = max(files) + 1
    high = {number: fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for number, descriptor in files.items()}
    for number, descriptor in high.items():
        os.dup2(descriptor, number)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in files:
            with suppress(OSError):  # of the listing itself
                os.close(number)


def _use_threads(environment: Mapping[str, str]) -> None:
    """What OpenMP would have read at its start."""
    import torch

    if count := environment.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(count))
