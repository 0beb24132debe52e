"""The first process of a sandbox, which lives as long as one check or console. When it ends, the kernel ends all
others.

It reads orders from stdin and reports on stdout, pipes that no process of the candidate ever has: a candidate is a fork
that keeps only its own streams or its connection to the checker, and a program that the tests start gets neither. The
tests are read only after that fork, and no memory of this process can be read from inside (it is not dumpable), so a
candidate cannot find them.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import gc
import marshal
import os
import resource
import select
import sys

from kitae.sandbox.inside.candidate import compile_first, furnish, serve
from kitae.sandbox.inside.usage import SCRATCH, Clock, Usage
from kitae.sandbox.inside.wire import read_frame, write_frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from kitae.sandbox.sandbox_jobs import FullOrder

_NOBODY = 65534
_TICK = 0.02  # seconds between two checks of a silent program's clock
_SPARE = 20  # seconds of processor time that a checker may use beyond those of its candidate
_STDERR_TAIL = 500  # bytes
_LIFETIME = 3600  # seconds of processor time of a console, in all its cells
_MEBIBYTE = 2**20
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_orders, _reports = 0, 1  # descriptors; `main` moves them


def main(load: Callable[[str], object]) -> None:
    """load: the further modules of a mode."""
    global _orders, _reports
    _orders, _reports = os.dup(0), os.dup(1)  # no program that is started from here inherits these
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    order = marshal.loads(read_frame(_orders))
    _harden(order["become_nobody"])
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)  # numbers of any size are sent between checker and candidate
    sys.path[:] = [*sys.path, *order["packages"]]
    _report("ready", "")
    os.dup2(null, 2)
    if order["mode"] == "check":
        _check(order, load)
    elif order["mode"] == "console":
        load("console")
        _run_console(order)
    else:
        _run(order)
    os._exit(0)


def _harden(become_nobody: bool) -> None:
    """Give up root, become unreadable for others of the same user, and die with the process that started this one."""
    if become_nobody:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    import _ctypes  # ctypes itself would take 7 ms to import

    prctl = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type]
    for option, value in ((_PR_SET_DUMPABLE, 0), (_PR_SET_PDEATHSIG, _signal.SIGKILL)):
        if _ctypes.call_function(prctl, (option, int(value), 0, 0, 0)):
            raise OSError(f"prctl({option}) failed")
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)  # the only signal that Python code inside can send here


def _exit_when_orders_end() -> None:
    """Exit as soon as the pipe of orders is closed, in the middle of anything: its sender is gone.

    The signal at the parent's death is not enough. A bwrap that was started by root has given up all rights when it
    dies, and can no longer signal a process of another user.
    """
    import fcntl

    def look(*_: object) -> None:
        poll = select.poll()
        poll.register(_orders, select.POLLIN)
        if any(event & select.POLLHUP and not event & select.POLLIN for _, event in poll.poll(0)):
            os._exit(1)

    _signal.signal(_signal.SIGIO, look)
    fcntl.fcntl(_orders, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(_orders, fcntl.F_SETFL, fcntl.fcntl(_orders, fcntl.F_GETFL) | os.O_ASYNC)
    look()


def _report(status: str, detail: str, output: bytes = b"") -> None:
    for part in (status.encode(), detail.encode(errors="replace"), output):
        write_frame(_reports, part)


def _check(order: FullOrder, load: Callable[[str], object]) -> None:
    import _socket

    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)

    def candidate() -> None:
        line = os.dup(theirs.fileno())
        _keep_only(line)
        serve(3, order)

    pid = _fork(candidate, order)
    theirs.close()
    load("check")  # after the fork, beside the candidate
    from kitae.sandbox.inside.checker import check

    sys.stdin, sys.stdout = open(os.devnull), open(os.devnull, "w")  # noqa: SIM115 - for the tests: the real ones are pipes
    sys.stderr = sys.stdout
    # Programs that the tests start import nothing from folders that the candidate can write to.
    os.environ.update(PYTHONSAFEPATH="1", PYTHONNOUSERSITE="1")
    job = marshal.loads(read_frame(_orders))
    _exit_when_orders_end()
    _limit_memory(order["memory_mb"])
    _limit_processor(2 * order["time_limit"] * (len(job["tests"]) + 1) + _SPARE)
    check(ours.fileno(), Usage(pid, order["memory_mb"], order["files_limit"]), job, _report)
    _sweep(pid)


def _run(order: FullOrder) -> None:
    """Write the files, compile them, then run the program once for each further frame, which is its stdin.

    Each run has a new folder with the compiled program, and finds nothing that another run has written. The folder's
    name does not tell which run it is.
    """
    _note_initial_files()
    folder = _enter("build")
    for name, content in order["files"].items():
        with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(content)
    _exit_when_orders_end()
    if order["compile"]:
        status, detail, _ = _watch(_command(order["compile"]), b"", order | {"time_limit": order["compile_limit"]})
        if status != "ended":
            _report("unloadable", detail)
            return
    program = _read_files()
    _leave(folder)
    _report("loaded", "")
    while True:
        try:
            stdin = read_frame(_orders)
        except EOFError:
            return
        folder = _enter("run")
        _write_files(program)
        if order["command"]:
            result = _watch(_command(order["command"]), stdin, order)
        else:
            status, detail, output = _watch(_python(order), stdin, order)
            result = (status, _last_line(detail), output)
        _leave(folder)
        _report(*result)


def _run_console(order: FullOrder) -> None:
    """Run each further frame as a cell of a console. If a cell breaks a limit, the next one gets a new console."""
    _enter("work")
    _exit_when_orders_end()
    _report("loaded", "")
    console = None
    while True:
        try:
            code = read_frame(_orders)
        except EOFError:
            return
        console = console or _Console(order)
        status, detail, output = console.run(code)
        if status != "ended":
            console.end()
            console = None
        _report(status, detail, output)


class _Console:
    """A candidate that runs cells. Between cells it is stopped, with all processes that it started."""

    def __init__(self, order: FullOrder) -> None:
        import _socket

        from kitae.sandbox.inside.console import run_cells

        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
        self._out, out_end = os.pipe()
        null = os.open(os.devnull, os.O_RDONLY)

        def candidate() -> None:
            _keep_only(null, out_end, out_end, theirs.fileno())
            run_cells(3)

        self._pid = _fork(candidate, order | {"time_limit": _LIFETIME})
        theirs.close()
        os.close(out_end)
        os.close(null)
        self._line, self._order = ours.detach(), order
        self._usage = Usage(self._pid, order["memory_mb"], order["files_limit"])
        for fd in (self._line, self._out):
            os.set_blocking(fd, False)

    def run(self, code: bytes) -> tuple[str, str, bytes]:
        """How a cell ended ("ended" is normal, even with an exception), why, and the first part of its output."""
        from kitae.sandbox.inside.console import MARK

        while _take(self._line) or _take(self._out):
            pass  # anything sent between cells is no answer
        self._signal(_signal.SIGCONT)
        mark = os.urandom(MARK)
        try:
            write_frame(self._line, mark + code)
        except OSError:
            return "crashed", "the console is gone", b""
        taken = bytearray()
        status, detail = self._follow(taken, mark)
        self._signal(_signal.SIGSTOP)
        while data := _take(self._out):  # the rest of the output before it was stopped
            taken += data
        return status, detail, bytes(taken[: self._order["output_limit"]])

    def _follow(self, taken: bytearray, mark: bytes) -> tuple[str, str]:
        poll, clock, looked, order = select.poll(), Clock(), 0.0, self._order
        said = b""
        for fd in (self._line, self._out):
            poll.register(fd, select.POLLIN)
        self._usage.restart()
        while True:
            for fd, _ in poll.poll(_TICK * 1000):
                data = _take(fd)
                if fd == self._line:
                    if data == b"":
                        return "crashed", self._cause()
                    said = (said + (data or b""))[-_MEBIBYTE:]
                    if mark in said:
                        return "ended", ""
                    continue
                if data == b"":
                    poll.unregister(fd)
                taken += (data or b"")[: max(0, order["output_limit"] - len(taken))]
            wall, broken = clock.read(), ""
            if wall - looked > _TICK:
                looked, broken = wall, self._usage.look()
            if wall > 2 * order["time_limit"] or self._usage.seconds > order["time_limit"]:
                return "timeout", f"more than {order['time_limit']:g} s"
            if broken:
                return "crashed", broken

    def _cause(self) -> str:
        for _ in range(50):
            if (code := _exit_code(self._pid)) is not None:
                return f"killed by signal {-code}" if code < 0 else f"exit status {code}"
            select.poll().poll(_TICK * 1000)
        return "it closed its line"

    def end(self) -> None:
        _sweep(self._pid)
        os.close(self._line)
        os.close(self._out)

    def _signal(self, number: int) -> None:
        try:  # noqa: SIM105
            os.kill(-1 if os.getpid() == 1 else -self._pid, number)
        except OSError:
            pass


def _enter(name: str) -> str:
    """Make a folder to work in. Returns its path."""
    os.mkdir(name)
    os.chdir(name)
    return os.getcwd()


def _leave(folder: str) -> None:
    """Remove a folder that `_enter` made, and everything else that was written meanwhile.

    The latter are the contents of the sandbox's writable folders, if this is certainly a sandbox. If something cannot
    be removed, this process ends, because the next run would find it.
    """
    os.chdir(os.path.dirname(folder))
    if _is_folder(folder):  # the program may have removed or replaced it
        os.chmod(folder, 0o700)
        _empty(folder)
        os.rmdir(folder)
    for scratch, names in _initial_files.items():
        _empty(scratch, names)


def _note_initial_files() -> None:
    """Record the initial contents of the writable folders, as the running Python may lie there."""
    if os.getpid() == 1 and os.getuid() == _NOBODY:
        _initial_files.update({folder: os.listdir(folder) for folder in SCRATCH if os.path.ismount(folder)})


_initial_files: dict[str, list[str]] = {}


def _empty(top: str, keep: list[str] | tuple[()] = ()) -> None:
    """Remove the contents of a folder. Nested folders are moved up first, so that no path becomes too long."""
    queue = [name for name in os.listdir(top) if name not in keep]
    for name in queue:  # grows on the way
        path = f"{top}/{name}"
        if not _is_folder(path):
            os.unlink(path)
            continue
        os.chmod(path, 0o700)
        for inner in os.listdir(path):
            if not _is_folder(f"{path}/{inner}"):
                os.unlink(f"{path}/{inner}")
                continue
            os.chmod(f"{path}/{inner}", 0o700)
            queue.append(os.urandom(16).hex())
            os.rename(f"{path}/{inner}", f"{top}/{queue[-1]}")
        os.rmdir(path)


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _read_files() -> dict[str, tuple[int, bytes]]:
    """The files in the current folder and below, with their modes."""
    found = {}
    for path, _, files in os.walk("."):
        for name in files:
            file = f"{path}/{name}"
            if os.path.isfile(file) and not os.path.islink(file):
                with open(file, "rb") as opened:
                    found[file] = (os.stat(file).st_mode & 0o777, opened.read())
    return found


def _write_files(files: dict[str, tuple[int, bytes]]) -> None:
    for file, (mode, content) in files.items():
        os.makedirs(os.path.dirname(file), exist_ok=True)
        with open(file, "wb") as opened:
            opened.write(content)
        os.chmod(file, mode)


def _command(words: list[str]) -> Callable[[], None]:
    def program() -> None:
        os.execve(words[0], words, dict(os.environ))

    return program


def _python(order: FullOrder) -> Callable[[], None]:
    """A program that runs the code as a script in the fork itself, which saves the start of an interpreter."""

    def program() -> None:
        import __main__

        sys.argv[:] = ["main.py"]
        sys.stdin = open(0, encoding="utf-8", errors="surrogateescape")  # noqa: SIM115
        sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape")  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1)  # noqa: SIM115
        namespace = vars(__main__)
        namespace.clear()
        namespace.update(__name__="__main__", __builtins__=__builtins__, __file__="main.py", __doc__=None)
        furnish(namespace, order)
        exec(compile_first(order, "main.py"), namespace)

    return program


def _last_line(detail: str) -> str:
    """The relevant part of a traceback, which begins with frames of this module: `"exit status 1: KeyError: 3"`."""
    cause, colon, words = detail.partition(": ")
    return f"{cause}{colon}{words[words.rfind(chr(10)) + 1 :]}"


def _watch(program: Callable[[], None], stdin: bytes, order: FullOrder) -> tuple[str, str, bytes]:
    """Run a program to its end. Returns how it ended ("ended" is normal), why, and what it wrote to stdout."""
    out, out_end = os.pipe()
    err, err_end = os.pipe()
    source = _source(stdin)

    def child() -> None:
        _keep_only(source, out_end, err_end)
        program()

    pid = _fork(child, order)
    for fd in (source, out_end, err_end):
        os.close(fd)
    taken = {out: bytearray(), err: bytearray()}
    try:
        problem, detail, code = _follow(pid, taken, out, order)
    finally:
        _sweep(pid)
        os.close(out)
        os.close(err)
    last_words = bytes(taken[err][-_STDERR_TAIL:]).decode(errors="replace").strip()
    output = bytes(taken[out])
    if problem:
        return problem, detail, output
    if code:
        cause = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        return "crashed", f"{cause}: {last_words}" if last_words else cause, output
    return "ended", "", output


def _follow(pid: int, taken: dict[int, bytearray], out: int, order: FullOrder) -> tuple[str, str, int | None]:
    """Collect output until the program ends or breaks a limit. Returns how and why it was ended, or its exit code."""
    poll = select.poll()
    for fd in taken:
        os.set_blocking(fd, False)
        poll.register(fd, select.POLLIN)
    clock, open_fds, code = Clock(), set(taken), None
    usage, looked = Usage(pid, order["memory_mb"], order["files_limit"]), 0.0
    while True:
        ready = poll.poll(1 if code is not None or not open_fds else _TICK * 1000)
        for fd, _ in ready:
            data = _take(fd)
            if data == b"":
                poll.unregister(fd)
                open_fds.discard(fd)
            else:
                taken[fd] += data or b""
        if len(taken[out]) > order["output_limit"]:
            return "output", "too much output", None
        del taken[max(taken)][:-_STDERR_TAIL]
        if code is not None and not any(fd in open_fds for fd, _ in ready):
            return "", "", code  # it has ended and its output was read; its children may hold the pipes open
        if code is None:
            code = _exit_code(pid)
        wall, broken = clock.read(), ""
        if code is None and wall - looked > _TICK:
            looked, broken = wall, usage.look()
        if wall > 2 * order["time_limit"] or usage.seconds > order["time_limit"]:
            return "timeout", f"more than {order['time_limit']:g} s", None
        if broken:
            return "crashed", broken, None


def _take(fd: int) -> bytes | None:
    try:
        return os.read(fd, _MEBIBYTE)
    except BlockingIOError:
        return None


def _exit_code(pid: int) -> int | None:
    """The exit code of `pid` if it has ended; other ended processes are reaped on the way."""
    try:
        gone, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return -9
    return os.waitstatus_to_exitcode(status) if gone == pid else None


def _source(data: bytes) -> int:
    """A file descriptor of an unnamed file from which `data` can be read."""
    path = ".stdin"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    os.unlink(path)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _keep_only(*keep: int) -> None:
    """Close all descriptors but these. Three become stdin, stdout and stderr; a fourth, or a single one, becomes 3."""
    null = os.open("/dev/null", os.O_RDWR)
    streams = keep if len(keep) >= 3 else (null, null, null, *keep)
    high = [os.dup2(fd, 100 + i) for i, fd in enumerate(streams)]
    for i, fd in enumerate(high):
        os.dup2(fd, i)
    os.closerange(len(streams), 1024)


def _fork(body: Callable[[], None], order: FullOrder) -> int:
    """Start a candidate: a child process with limits, which exits through the interpreter as a script would."""
    gc.freeze()  # a collection in either process copies no page of what both have
    gc.enable()
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    _signal.signal(_signal.SIGIO, _signal.SIG_DFL)
    _limit(order)
    body()
    sys.exit(0)


def _limit(order: FullOrder) -> None:
    seconds = int(order["time_limit"]) + 2
    for kind, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_NPROC, order["processes"]),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_FSIZE, order["file_mb"] * _MEBIBYTE),
        (resource.RLIMIT_DATA, order["memory_mb"] * _MEBIBYTE),
    ):
        _lower(kind, limit)
    if order["stack_mb"]:
        _lower(resource.RLIMIT_STACK, order["stack_mb"] * _MEBIBYTE)
    if order["limit_address_space"]:
        _limit_memory(order["memory_mb"])


def _limit_memory(mebibytes: int) -> None:
    _lower(resource.RLIMIT_AS, mebibytes * _MEBIBYTE)


def _limit_processor(seconds: float) -> None:
    """Limit this process: the tests are trusted, but comparing what the candidate returns may take forever."""
    _lower(resource.RLIMIT_CPU, int(seconds))


def _lower(kind: int, limit: int) -> None:
    hard = resource.getrlimit(kind)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (limit, limit))


def _sweep(pid: int) -> None:
    """End the candidate and all its remaining processes."""
    # Process 1 ends all others in the sandbox; without a sandbox, it is the candidate's session that ends.
    everybody = -1
    try:  # noqa: SIM105 - contextlib takes longer to import than this whole module
        os.kill(everybody if os.getpid() == 1 else -pid, _signal.SIGKILL)
    except OSError:
        pass  # none is left
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        return
