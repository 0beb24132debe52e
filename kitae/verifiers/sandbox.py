"""Where untrusted code runs: a process of its own, cut off from everything but the system's programs.

    session = open_session("auto", order)   starts the sandbox; inside, `runners.warden` reads its orders
    session.hear(5.0)                       its next report, or None when it has been silent for so long
    session.close()                         ends it, and with it every process inside

Covered, with bubblewrap (`bwrap`): own process, mount, network, IPC, host-name and cgroup namespaces; user 65534 and
no capabilities, none to be gained either; /usr and the running Python are there, read-only, and nothing else of the
disk: no home, no /etc/shadow, no run folder; /tmp and the work folder are in memory and of limited size; no network,
not even loopback to the host; an empty environment; a filter that refuses system calls which only attacks need
(ptrace, mount, new namespaces, keyrings, bpf, io_uring, memory outside all limits, exotic sockets); limits on memory
and processor time of each process and of all together, on the number of processes and of files, on the size of files
and of output. What all use together is looked at 20 times a second or more, so it can be passed for that long. Each run
of a program finds the folders empty. All processes die with the first one, and that one when we close its pipe, as our
own death does. Where the caller is root and the kernel has no user namespaces, user 65534 is the machine's own, and its
processes elsewhere count against the limit.

`unshare` is the fallback: the same namespaces, user and mounts, made by a shell script, without the filter. So there a
program can make user namespaces of its own, which opens more of the kernel to it, and sockets that no network namespace
holds: in a virtual machine, vsock may reach the host.

Not covered: holes in the kernel; memory of files, which comes on top of that of processes (three folders of `tmp_mb`);
time channels. `sandbox = "none"` covers nothing: it has the limits alone, and those of the sum for its first process.
"""

import functools
import importlib.util
import marshal
import os
import platform
import select
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

from kitae.errors import VerifierError
from kitae.verifiers.base import VerifierWarning
from kitae.verifiers.runners import MODULES
from kitae.verifiers.runners.meter import Clock

SandboxChoice = Literal["auto", "bwrap", "unshare", "none"]
INSTALL = "apt-get install bubblewrap (or dnf, pacman, zypper: the package is called bubblewrap everywhere)"
WARNING = 'sandbox = "none" runs code of the model with your rights, on your files and your network'

NOBODY = 65534
WORK = "/box"
_PATH = "/usr/local/bin:/usr/bin:/bin"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache")  # how programs in /usr find each other
_ENVIRONMENT = {"PATH": _PATH, "HOME": WORK, "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
_START_LIMIT = 20.0  # seconds; a sandbox that is not up by then never will be
_LOOK = 0.1  # seconds between two looks at the clock while a sandbox is silent
_MAX_REPORT = 2**27  # bytes of one part of a report
_BOOT = """
import marshal, os, sys
def read(n):
    data = b""
    while len(data) < n:
        part = os.read(0, n - len(data))
        if not part:
            os._exit(1)
        data += part
    return data
for name in ("kitae", "kitae.verifiers", "kitae.verifiers.runners"):
    sys.modules[name] = module = type(sys)(name)
    module.__path__ = []
for name, code in marshal.loads(read(int.from_bytes(read(8), "little"))):
    sys.modules[name] = module = type(sys)(name)
    exec(code, module.__dict__)
module.main()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a candidate may use; `Limits(time_limit=2.0)`.

    time_limit: seconds of processor time for a test, those of child processes included, and twice that on the clock.
    memory_mb: what all processes together have in memory; and for each of them address space, where
    `limit_address_space` says so, else data alone, since some runtimes reserve far more than they use. processes:
    threads count too. tmp_mb: all files in one folder together; file_mb: one of them; files: how many, with folders.
    """

    time_limit: float = 4.0
    memory_mb: int = 1024
    processes: int = 64
    output_mb: int = 16
    file_mb: int = 64
    tmp_mb: int = 128
    files: int = 8192
    stack_mb: int = 0
    limit_address_space: bool = True


@dataclass(frozen=True, slots=True)
class Report:
    """`Report("failed", "AssertionError", b"")`."""

    status: str
    detail: str
    output: bytes


@dataclass(frozen=True, slots=True)
class Backend:
    """A way to start a sandbox that works on this machine."""

    name: Literal["bwrap", "unshare", "none"]
    program: str = ""
    options: str = ""  # the help text of the program, which says what this version can do

    def command(self, limits: Limits, readable: Sequence[str], userns: int | None, filter_fd: int | None) -> list[str]:
        python = [os.path.realpath(sys.executable), "-I", "-S", "-c", _BOOT]
        if self.name == "none":
            return python
        if self.name == "unshare":
            return _unshare_command(self.program, limits, readable) + python
        return [*_bwrap_command(self, limits, readable, userns, filter_fd), "--", *python]


class Session:
    """A running sandbox and the two pipes to its warden. Use it with `with`, or call `close`."""

    def __init__(self, process: "subprocess.Popen[bytes]", folder: str | None) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._folder = process, folder
        self._orders, self._reports = process.stdin.fileno(), process.stdout.fileno()
        self._buffer = bytearray()
        for fd in (self._orders, self._reports):
            os.set_blocking(fd, False)

    def send(self, frame: bytes) -> None:
        """Hand a frame to the warden; an `EOFError` says that there is none."""
        data = memoryview(len(frame).to_bytes(8, "little") + frame)
        poll = select.poll()
        poll.register(self._orders, select.POLLOUT)
        while data:
            if not poll.poll(_START_LIMIT * 1000):
                raise EOFError
            try:
                data = data[os.write(self._orders, data) :]
            except BlockingIOError:
                continue
            except OSError:
                raise EOFError from None

    def hear(self, timeout: float, clock: Clock | None = None) -> Report | None:
        """The next report; None after `timeout` seconds of silence; `EOFError` where the sandbox has ended."""
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
        """What the sandbox wrote to stderr before it ended, which says why it could not start."""
        self._process.kill()
        _, words = self._process.communicate()
        return words.decode(errors="replace").strip()[-500:]

    def close(self) -> None:
        for pid in _children(self._process.pid):  # the first process inside, with which all others end
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


def open_session(choice: SandboxChoice, order: Mapping[str, Any], limits: Limits, packages: bool = False) -> Session:
    """Start a sandbox and give its warden the order; `VerifierError` where this machine has no sandbox."""
    return _open(find_backend(choice), order, limits, packages)


@functools.cache
def find_backend(choice: SandboxChoice) -> Backend:
    """The sandbox that this machine can offer, tried out once per process."""
    if choice not in get_args(SandboxChoice):
        raise VerifierError(f"sandbox must be one of {', '.join(get_args(SandboxChoice))}, got {choice!r}")
    if choice == "none":
        warnings.warn(WARNING, VerifierWarning, stacklevel=2)
        return Backend("none")
    problems = []
    for name in ("bwrap", "unshare") if choice == "auto" else (choice,):
        program = shutil.which(name)
        if program is None or sys.platform != "linux":
            problems.append(f"{name} is not installed")
            continue
        backend = Backend(name, program, _help(program))
        problem = _try_out(backend)
        if not problem:
            return backend
        problems.append(f"{name} does not work here: {problem}")
    raise VerifierError(
        f"code must run in a sandbox, and there is none: {'; '.join(problems)}. Install one with {INSTALL}, allow user "
        'namespaces, or use an executor elsewhere; sandbox = "none" runs the code unprotected'
    )


def complete_order(order: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    """An order with all that a warden wants to know."""
    return {
        **order,
        "become_nobody": False,
        "packages": [],
        "time_limit": limits.time_limit,
        "memory_mb": limits.memory_mb,
        "processes": limits.processes,
        "output_limit": limits.output_mb * 2**20,
        "file_mb": limits.file_mb,
        "files_limit": limits.files,
        "stack_mb": limits.stack_mb,
        "limit_address_space": limits.limit_address_space,
    }


def packages_path() -> str:
    """The folder of the packages that are installed beside Kitae."""
    return sysconfig.get_path("purelib")


def find_program(name: str) -> str | None:
    """The path of a program that is there inside a sandbox too."""
    found = shutil.which(name, path=_PATH)
    return None if found is None else os.path.join("/usr/bin" if found.startswith("/bin/") else "", found)


def _open(backend: Backend, order: Mapping[str, Any], limits: Limits, packages: bool) -> Session:
    userns = _user_namespace(os.getpid()) if backend.name == "bwrap" and os.geteuid() == 0 else None
    filter_fd = _filter_fd() if backend.name == "bwrap" else None
    folder = tempfile.mkdtemp(prefix="kitae-code-") if backend.name == "none" else None
    readable = [*_python_folders(), *([packages_path()] if packages else [])]
    try:
        process = subprocess.Popen(
            backend.command(limits, readable, userns, filter_fd),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_ENVIRONMENT,
            cwd=folder,
            pass_fds=[fd for fd in (userns, filter_fd) if fd is not None],
        )
    finally:
        if filter_fd is not None:
            os.close(filter_fd)
    session = Session(process, folder)
    extra = 0 if _counts_privately(backend, userns) else _tasks_of_user()
    full = complete_order(order, replace(limits, processes=limits.processes + extra)) | {
        "become_nobody": backend.name == "bwrap" and os.geteuid() == 0,
        "packages": [packages_path()] if packages else [],
    }
    try:
        session.send(_runner_code())
        session.send(marshal.dumps(full))
    except EOFError:
        pass  # `hear` will meet the same end, and its caller can ask for the last words
    except BaseException:
        session.close()
        raise
    return session


def _children(pid: int) -> list[int]:
    """The children of a process that has not been waited for, so that none of these ids can be anybody else's."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # some kernels do not list them; the pipes that close tell the warden too
        return []


def _try_out(backend: Backend) -> str:
    """Run a line of Python in the sandbox: empty where that works, else why it does not."""
    order: dict[str, Any] = {
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
                reports = [session.hear(_START_LIMIT) for _ in ("ready", "loaded", "ended")]
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


@functools.cache
def runner_sources() -> tuple[tuple[str, str], ...]:
    """What runs inside, as (module, source), in the order in which it loads."""
    found = []
    for module in MODULES:
        name = f"kitae.verifiers.runners.{module}"
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        found.append((name, spec.loader.get_source(name)))  # type: ignore[attr-defined]
    return tuple(found)


@functools.cache
def _runner_code() -> bytes:
    """Compiled here, for the same interpreter: it starts sooner, and does not show where it lies on the disk."""
    return marshal.dumps(
        [(name, compile(text, f"{name}.py", "exec", dont_inherit=True)) for name, text in runner_sources()]
    )


def _help(program: str) -> str:
    result = subprocess.run([program, "--help"], capture_output=True, text=True, check=False)
    return result.stdout + result.stderr


def _python_folders() -> list[str]:
    """What the running interpreter needs, without the scripts, environments and caches that may lie beside it.

    Of a virtual environment nothing: it borrows all of this from the Python that it was made with.
    """
    executable = os.path.realpath(sys.executable)
    prefixes = (sys.base_prefix, sys.base_exec_prefix)
    libraries = [os.path.join(prefix, name) for prefix in prefixes for name in ("lib", "lib64")]
    needed = [executable, *libraries, sysconfig.get_path("stdlib")]
    found: list[str] = []
    for path in map(os.path.realpath, needed):
        if os.path.exists(path) and not any(_is_inside(path, folder) for folder in [*_SYSTEM, *found]):
            found.append(path)
    return found


def _is_inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def _parents(paths: Sequence[str]) -> list[str]:
    parents = {str(parent) for path in paths for parent in Path(path).parents}
    return sorted(parents - {"/"} - {p for p in parents if any(_is_inside(p, s) for s in _SYSTEM)})


def _bwrap_command(
    backend: Backend, limits: Limits, readable: Sequence[str], userns: int | None, filter_fd: int | None
) -> list[str]:
    size = ["--size", str(limits.tmp_mb * 2**20)] if "--size" in backend.options else []
    command = [backend.program, "--new-session", "--die-with-parent", "--as-pid-1", "--cap-drop", "ALL"]
    if os.geteuid() == 0:
        # A user namespace that bwrap makes for root maps 65534 to root, which no process limit binds. So it gets one
        # in which 65534 is 65534, or none, and the warden changes its user itself before it reads any code.
        command += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        command += [] if userns is None else ["--userns", str(userns)]
    else:
        command += ["--unshare-all", "--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
        command += ["--disable-userns"] if "--disable-userns" in backend.options else []
    command += ["--hostname", "sandbox", "--clearenv"]
    for name, value in _ENVIRONMENT.items():
        command += ["--setenv", name, value]
    for path in _SYSTEM:
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind-try", path, path]
    command += ["--proc", "/proc", "--dev", "/dev"]
    for path in ("/dev/shm", "/tmp", WORK):  # before the rest, some of which may lie there
        command += [*size, "--perms", "1777", "--tmpfs", path]
    for path in [*_parents(readable), "/etc"]:
        command += ["--perms", "0755", "--dir", path]
    for path in readable:
        command += ["--ro-bind", path, path]
    for path in [*_SETTINGS, *map(str, Path("/etc").glob("java-*"))]:
        command += ["--ro-bind-try", path, path]
    command += ["--remount-ro", "/", "--chdir", WORK]
    return command if filter_fd is None else [*command, "--seccomp", str(filter_fd)]


_UNSHARE_SCRIPT = """
set -e
PATH=$PATH:/usr/sbin:/sbin
size=$1; outer=$2; shift 2
mount --make-rprivate /
mount -t tmpfs -o "size=$size,mode=755,nosuid,nodev" tmpfs /mnt
cd /mnt
mkdir -p proc tmp box dev/shm old
for path in tmp box dev/shm; do mount -t tmpfs -o "size=$size,mode=1777,nosuid,nodev" tmpfs "$path"; done
while [ "$1" != -- ]; do
    path=$1; shift
    if [ -L "$path" ]; then ln -s "$(readlink "$path")" ".$path"; continue; fi
    [ -e "$path" ] || continue
    if [ -d "$path" ]; then mkdir -p ".$path"; else mkdir -p "$(dirname ".$path")"; : > ".$path"; fi
    mount --bind "$path" ".$path"
    case $path in /dev/*) ;; *) mount -o remount,bind,ro,nosuid,nodev ".$path" ;; esac
done
shift
ln -s /proc/self/fd dev/fd
for i in 0 1 2; do ln -s "/proc/self/fd/$i" "dev/$(echo stdin stdout stderr | cut -d" " -f$((i + 1)))"; done
mount -t proc -o nosuid,nodev,noexec proc proc
pivot_root . old
umount -l /old
rmdir /old
mount -o remount,bind,ro,nosuid,nodev /
cd /box
if [ "$outer" = 0 ]; then
    exec setpriv --no-new-privs --bounding-set=-all --inh-caps=-all --reuid=65534 --regid=65534 --clear-groups "$@"
fi
exec unshare --user --map-user=65534 --map-group=65534 \
    setpriv --no-new-privs --bounding-set=-all --inh-caps=-all --ambient-caps=-all "$@"
"""


def _unshare_command(program: str, limits: Limits, readable: Sequence[str]) -> list[str]:
    uid = os.geteuid()
    command = [program, "--mount", "--pid", "--fork", "--kill-child", "--net", "--ipc", "--uts", "--cgroup"]
    command += [] if uid == 0 else ["--user", "--map-root-user"]
    devices = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
    paths = [*_SYSTEM, *readable, *_SETTINGS, *devices]
    return [*command, "sh", "-c", _UNSHARE_SCRIPT, "sh", str(limits.tmp_mb * 2**20), str(uid), *paths, "--"]


@functools.cache
def _user_namespace(owner: int) -> int | None:
    """For root: a user namespace that knows root and 65534 as what they are, and lets nobody make another one.

    None where the kernel refuses. Processes in it are counted apart from others of the same user. Each process that
    opens sandboxes has one of its own, even a fork (`owner` is its id): otherwise a fork bomb in one worker of a pool
    would use up what the honest programs in the others may start.
    """
    import ctypes

    clone_newuser = 0x10000000
    libc = ctypes.CDLL(None, use_errno=True)
    ready, tell_ready = os.pipe()
    go, tell_go = os.pipe()
    pid = os.fork()
    if pid == 0:  # the namespace needs a first process until we hold it open
        try:
            os.close(tell_go)
            os.write(tell_ready, b"1" if libc.unshare(clone_newuser) == 0 else b"0")
            os.read(go, 1)
            Path("/proc/sys/user/max_user_namespaces").write_text("0")
            os.write(tell_ready, b"1")
            os.read(go, 1)
        finally:
            os._exit(0)
    os.close(tell_ready)
    os.close(go)
    try:
        if os.read(ready, 1) != b"1":
            return None
        for kind in ("uid", "gid"):
            Path(f"/proc/{pid}/{kind}_map").write_text(f"0 0 1\n{NOBODY} {NOBODY} 1\n")
        os.write(tell_go, b"1")
        os.read(ready, 1)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY)
    except OSError:
        return None
    finally:
        os.close(tell_go)
        os.close(ready)
        os.waitpid(pid, 0)


def _counts_privately(backend: Backend, userns: int | None) -> bool:
    """Whether RLIMIT_NPROC counts the processes of one user namespace apart, as Linux does since 5.14."""
    release = platform.release().split(".")
    modern = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in release[:2]) >= (5, 14)
    return backend.name != "none" and modern and (userns is not None or os.geteuid() != 0)


def _tasks_of_user() -> int:
    """How many threads the user of the sandbox has already, where they count against its limit."""
    uid = os.geteuid() or NOBODY
    total = 0
    for status in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if status.stat().st_uid == uid:
                total += len(os.listdir(status / "task"))
    return total


# System calls: (x86-64, arm64). The first group would fail for want of rights or lead out of the limits; the second is
# answered as by a kernel that does not know it, so that libraries take their other way.
_REFUSED = (
    *((101, 117), (310, 270), (311, 271), (438, 438), (312, 272)),  # ptrace, process_vm_*, pidfd_getfd, kcmp
    *((272, 97), (308, 268), (165, 40), (166, 39), (155, 41), (161, 51)),  # unshare, setns, mount*, pivot_root, chroot
    *((428, 428), (429, 429), (430, 430), (432, 432), (442, 442)),  # the new mount calls
    *((248, 217), (249, 218), (250, 219), (321, 280), (298, 241), (323, 282)),  # keyrings, bpf, perf, userfaultfd
    *((246, 104), (175, 105), (313, 273), (304, 265), (300, 262)),  # kexec, modules, open_by_handle_at, fanotify
    *((29, 194), (64, 190), (68, 186), (240, 180)),  # shared memory, semaphores and queues outside all limits
)
_UNKNOWN = ((319, 279), (447, 447), (425, 425), (426, 426), (427, 427), (435, 435))  # memfd*, io_uring*, clone3
_CLONE, _SOCKET = (56, 220), (41, 198)
_NEW_NAMESPACES = 0x7E020000
_FAMILIES = (1, 2, 10)  # unix, IPv4, IPv6: not vsock, which no network namespace holds, nor kernel crypto, packets, …
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


@functools.cache
def _filter() -> bytes | None:
    """The seccomp program, in the kernel's BPF; None on other processors."""
    if platform.machine() not in _ARCHITECTURES:
        return None
    column, architecture = _ARCHITECTURES[platform.machine()]
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, refuse, unknown = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026

    def one(code: int, value: int, hit: int = 0, miss: int = 0) -> bytes:
        return struct.pack("HBBI", code, hit, miss, value)

    program = [one(load, 4), one(equal, architecture, 1, 0), one(give, kill), one(load, 0)]
    program += [one(at_least, 0x40000000, 0, 1), one(give, kill)]  # the x32 calls, numbered anew
    for calls, answer in ((_REFUSED, refuse), (_UNKNOWN, unknown)):
        for call in calls:
            program += [one(equal, call[column], 0, 1), one(give, answer)]
    first_argument = 16
    program += [one(equal, _CLONE[column], 0, 4), one(load, first_argument)]
    program += [one(any_bit, _NEW_NAMESPACES, 0, 1), one(give, refuse), one(give, allow)]
    program += [one(equal, _SOCKET[column], 0, 2 + len(_FAMILIES)), one(load, first_argument)]
    program += [one(equal, family, len(_FAMILIES) - i, 0) for i, family in enumerate(_FAMILIES)]
    program += [one(give, refuse), one(give, allow)]
    return b"".join(program)


def _filter_fd() -> int | None:
    """A file that holds the filter, open at its start; the caller closes it."""
    program = _filter()
    if program is None:
        return None
    fd = os.memfd_create("seccomp")
    os.write(fd, program)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
