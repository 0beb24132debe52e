"""Where untrusted code runs: in a process of its own, cut off from everything but the system's programs.

    session = open_session("auto", order)   starts the sandbox; inside, `inside.warden` reads its orders
    session.receive(5.0)                    its next report, or None if there is none for this many seconds
    session.close()                         ends it, and with it every process inside

Covered, with bubblewrap (`bwrap`): its own process, mount, network, IPC, host-name and cgroup namespaces; user 65534,
without capabilities and unable to gain any; /usr and the running Python, read-only, and nothing else of the disk: no
home, no /etc/shadow, no run folder; /tmp and the work folder in memory and of limited size; no network, not even
loopback to the host; an empty environment; a filter that refuses system calls which only attacks need (ptrace, mount,
new namespaces, keyrings, bpf, io_uring, memory outside all limits, exotic sockets); limits on memory and processor time
of each process and of all together, on the number of processes and of files, on the size of files and of output. The
use of all processes together is checked at least 20 times a second, so its limits can be exceeded for that long. Each
run of a program finds the folders empty. All processes die with the first one, which dies when its pipe is closed, and
so when this process dies. If the caller is root and the kernel has no user namespaces, user 65534 is the machine's own,
and its other processes count against the limit.

`unshare` is the fallback: the same namespaces, user and mounts, made by a shell script, but no filter. A program can
then make user namespaces of its own, which exposes more of the kernel to it, and sockets that network namespaces do not
cover: in a virtual machine, vsock may reach the host.

Not covered: holes in the kernel; memory of files, which comes on top of that of processes (three folders of `tmp_mb`);
time channels. `sandbox = "none"` covers nothing: it has the limits only, and those on the sum only for its first
process.
"""

import fcntl
import functools
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self, get_args

from kitae.errors import KitaeWarning, SandboxError
from kitae.sandbox.backends import (
    ENVIRONMENT,
    NOBODY,
    Backend,
    counts_privately,
    packages_path,
    python_folders,
    tasks_of_user,
    user_namespace,
)
from kitae.sandbox.boot import inside_code
from kitae.sandbox.inside.usage import Clock
from kitae.sandbox.sandbox_jobs import Limits, Order, complete_order, packed
from kitae.sandbox.seccomp import filter_fd

SandboxChoice = Literal["auto", "bwrap", "unshare", "none"]
INSTALL = "apt-get install bubblewrap (or dnf, pacman, zypper: the package is called bubblewrap everywhere)"
WARNING = 'sandbox = "none" runs code of the model with your rights, on your files and your network'

_START_LIMIT = 20.0  # seconds; a sandbox that is not ready by then never will be
_LOOK = 0.1  # seconds between two checks of the clock while a sandbox is silent
_PIPE_BYTES = 2**19
_MAX_REPORT = 2**27  # bytes of one part of a report


@dataclass(frozen=True, slots=True)
class Report:
    """`Report("failed", "AssertionError", b"")`."""

    status: str
    detail: str
    output: bytes


class Session:
    """A running sandbox and the two pipes to its warden. Use it with `with`, or call `close`."""

    def __init__(self, process: "subprocess.Popen[bytes]", folder: str | None) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._folder = process, folder
        self._orders, self._reports = process.stdin.fileno(), process.stdout.fileno()
        self._buffer = bytearray()
        for fd in (self._orders, self._reports):
            os.set_blocking(fd, False)
        with suppress(OSError):  # room for all of what runs inside: as many writes are as many turns of both processes
            fcntl.fcntl(self._orders, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def send(self, frame: bytes, timeout: float = _START_LIMIT) -> None:
        """Send a frame to the warden. Raises `EOFError` if the sandbox has ended, or takes nothing for that long."""
        data = memoryview(len(frame).to_bytes(8, "little") + frame)
        poll = select.poll()
        poll.register(self._orders, select.POLLOUT)
        while data:
            if not poll.poll(timeout * 1000):
                raise EOFError
            try:
                data = data[os.write(self._orders, data) :]
            except BlockingIOError:
                continue
            except OSError:
                raise EOFError from None

    def receive(self, timeout: float, clock: Clock | None = None) -> Report | None:
        """The next report; None after `timeout` seconds of silence. Raises `EOFError` if the sandbox has ended."""
        clock = clock or Clock()
        deadline = clock.read() + timeout
        parts = []
        for _ in range(3):
            head = self._take(8, deadline, clock)
            size = int.from_bytes(head or b"", "little")
            if size > _MAX_REPORT:
                raise EOFError
            part = None if head is None else self._take(size, deadline, clock)
            if part is None:
                return None
            parts.append(part)
        status, detail, output = parts
        return Report(status.decode(errors="replace"), detail.decode(errors="replace"), output)

    def last_words(self) -> str:
        """What the sandbox wrote to stderr before it ended: the reason why it could not start."""
        self._process.kill()
        _, words = self._process.communicate()
        return words.decode(errors="replace").strip()[-500:]

    def close(self) -> None:
        for pid in _children(self._process.pid):  # the first process inside; all others end with it
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        self._process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, size: int, deadline: float, clock: Clock) -> bytes | None:
        poll = select.poll()
        poll.register(self._reports, select.POLLIN)
        while len(self._buffer) < size:
            left = deadline - clock.read()
            if not poll.poll(max(0.0, min(_LOOK, left)) * 1000):
                if left <= 0:
                    return None
                continue
            part = os.read(self._reports, 2**20)
            if not part:
                raise EOFError
            self._buffer += part
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken


def open_session(choice: SandboxChoice, order: Order, limits: Limits, packages: bool = False) -> Session:
    """Start a sandbox and send its warden the order. Raises `SandboxError` if this machine has no sandbox."""
    return _open(find_backend(choice), order, limits, packages)


@functools.cache
def find_backend(choice: SandboxChoice) -> Backend:
    """The sandbox that works on this machine, tested once per process."""
    if choice not in get_args(SandboxChoice):
        raise SandboxError(f"sandbox must be one of {', '.join(get_args(SandboxChoice))}, got {choice!r}")
    if choice == "none":
        warnings.warn(WARNING, KitaeWarning, stacklevel=2)
        return Backend("none")
    problems = []
    for name in ("bwrap", "unshare") if choice == "auto" else (choice,):
        program = shutil.which(name)
        if program is None or sys.platform != "linux":
            problems.append(f"{name} is not installed")
            continue
        backend = Backend.of(name, program)
        problem = _try_out(backend)
        if not problem:
            return backend
        problems.append(f"{name} does not work here: {problem}")
    raise SandboxError(
        f"code must run in a sandbox, and there is none: {'; '.join(problems)}. Install one with {INSTALL}, allow user "
        'namespaces, or use an executor elsewhere; sandbox = "none" runs the code unprotected'
    )


def _open(backend: Backend, order: Order, limits: Limits, packages: bool) -> Session:
    userns = user_namespace(os.getpid()) if backend.name == "bwrap" and os.geteuid() == 0 else None
    seccomp = filter_fd() if backend.name == "bwrap" else None
    folder = tempfile.mkdtemp(prefix="kitae-code-") if backend.name == "none" else None
    libraries = [packages_path()] if packages else []
    try:
        process = subprocess.Popen(
            backend.command(limits, [*python_folders(), *libraries], userns, seccomp),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=ENVIRONMENT,
            cwd=folder,
            pass_fds=[fd for fd in (userns, seccomp) if fd is not None],
        )
    finally:
        if seccomp is not None:
            os.close(seccomp)
    session = Session(process, folder)
    extra = 0 if counts_privately(backend, userns) else tasks_of_user()
    limits = replace(limits, processes=limits.processes + extra)
    become_nobody = backend.name == "bwrap" and os.geteuid() == 0
    try:
        session.send(inside_code())
        session.send(packed(complete_order(order, limits, libraries, become_nobody)))
    except EOFError:
        pass  # `receive` will raise the same error, and its caller can ask for the last words
    except BaseException:
        session.close()
        raise
    return session


def _children(pid: int) -> list[int]:
    """The children of a process that was not waited for, so that none of these ids can belong to another process."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # some kernels do not list them; the closed pipes end the warden too
        return []


def _try_out(backend: Backend) -> str:
    """Run a line of Python in the sandbox. Returns "" if that works, else the reason why it does not."""
    order: Order = {
        "mode": "run",
        "files": {},
        "compile": None,
        "command": None,
        "variants": ["import os; print(os.getuid())"],
    }
    try:
        with _open(backend, order, Limits(), packages=False) as session:
            try:
                session.send(b"")
                reports = [session.receive(_START_LIMIT) for _ in ("ready", "loaded", "ended")]
            except EOFError:
                return session.last_words() or "it ends at once"
    except OSError as error:
        return str(error)
    last = reports[-1]
    if last is None:
        return f"it does not answer within {_START_LIMIT:g} s"
    if last.output.strip() != str(NOBODY).encode():
        return f"Python answers {last.output[:100]!r} {last.detail}"
    return ""
