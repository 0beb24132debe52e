"""The programs that make a sandbox, bubblewrap and unshare, and their command lines."""

import functools
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from kitae.sandbox.boot import BOOT
from kitae.sandbox.sandbox_jobs import Limits

NOBODY = 65534
WORK = "/box"
_PATH = "/usr/local/bin:/usr/bin:/bin"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache")  # needed by programs in /usr to find each other
ENVIRONMENT = {"PATH": _PATH, "HOME": WORK, "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Backend:
    """A way to start a sandbox that works on this machine."""

    name: Literal["bwrap", "unshare", "none"]
    program: str = ""
    options: str = ""  # the program's help text, which shows what its version supports

    @classmethod
    def of(cls, name: Literal["bwrap", "unshare"], program: str) -> Self:
        result = subprocess.run([program, "--help"], capture_output=True, text=True, check=False)
        return cls(name, program, options=result.stdout + result.stderr)

    def command(self, limits: Limits, readable: Sequence[str], userns: int | None, filter_fd: int | None) -> list[str]:
        python = [os.path.realpath(sys.executable), "-I", "-S", "-c", BOOT]
        if self.name == "none":
            return python
        if self.name == "unshare":
            return _unshare_command(self.program, limits, readable) + python
        return [*_bwrap_command(self, limits, readable, userns, filter_fd), "--", *python]


def packages_path() -> str:
    """The folder of the packages that are installed beside Kitae."""
    return sysconfig.get_path("purelib")


def find_program(name: str) -> str | None:
    """The path of a program that exists inside a sandbox too."""
    found = shutil.which(name, path=_PATH)
    return None if found is None else os.path.join("/usr/bin" if found.startswith("/bin/") else "", found)


def python_folders() -> list[str]:
    """The folders that the running interpreter needs, without scripts, environments and caches that may lie beside
    them.

    A virtual environment needs no folder of its own: it uses those of the Python that it was made with.
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
    for name, value in ENVIRONMENT.items():
        command += ["--setenv", name, value]
    for path in _SYSTEM:
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind-try", path, path]
    command += ["--proc", "/proc", "--dev", "/dev"]
    for path in ("/dev/shm", "/tmp", WORK):  # before other folders, some of which may lie within these
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
umask 022
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
def user_namespace(owner: int) -> int | None:
    """For root: a user namespace that maps root and 65534 to themselves, and in which no further namespace can be made.

    None if the kernel refuses. Processes in it are counted apart from others of the same user. Each process that opens
    sandboxes has one of its own, even a fork (`owner` is its id): otherwise a fork bomb in one worker of a pool would
    use up the processes that honest programs in the others may start.
    """
    import ctypes

    clone_newuser = 0x10000000
    libc = ctypes.CDLL(None, use_errno=True)
    ready, tell_ready = os.pipe()
    go, tell_go = os.pipe()
    pid = os.fork()
    if pid == 0:  # the namespace needs a process until this one holds it open
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


def counts_privately(backend: Backend, userns: int | None) -> bool:
    """Whether RLIMIT_NPROC counts the processes of each user namespace apart, as Linux does since 5.14."""
    release = platform.release().split(".")
    modern = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in release[:2]) >= (5, 14)
    return backend.name != "none" and modern and (userns is not None or os.geteuid() != 0)


def tasks_of_user() -> int:
    """How many threads the sandbox's user already has, if these count against its limit."""
    uid = os.geteuid() or NOBODY
    total = 0
    for status in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if status.stat().st_uid == uid:
                total += len(os.listdir(status / "task"))
    return total
