"""The sandbox in which an agent program lives with all that it starts, for one episode.

Covered, with bubblewrap: processes of its own (it sees no other process, and none of its processes outlives it); no
capability; of the disk, the system's programs, the interpreters that the command needs, the program's folder and what
the recipe lists, all read-only, without the run folder and the data; an empty home and /tmp in memory, its own for each
episode. The network is that of the process that starts it: `own_network`, or the machine's.

A program that holds a secret of its episode (the right to post a reward, the reference) is guarded against what it
starts: there is no folder of processes in /proc, by which its memory, environment and open files could be read, and
system calls that look into other processes are refused.
"""

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from kitae.errors import ConfigError
from kitae.sandbox.session import INSTALL

ProgramSandbox = Literal["bwrap", "none"]
HOME = "/tmp/home"

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix", "/sys/devices")
_NAMES = ("/run/systemd/resolve", "/run/resolvconf", "/run/NetworkManager")  # where /etc/resolv.conf may lead
_PASSWORDS = ("/etc/shadow", "/etc/gshadow", "/etc/shadow-", "/etc/gshadow-")
_FACTS = ("cpuinfo", "meminfo", "stat", "version", "loadavg", "uptime", "filesystems")  # of the machine, in /proc
_ROOTS = ("sys", "fs", "acpi", "tty", "mtrr", "scsi", "sysrq-trigger")
_RUNS = ("*/journal.sqlite", "*/*/journal.sqlite")
_TOO_MUCH = (Path("/"), Path.home())  # never shown whole
_BINARIES = ("bin", "shims")  # folders of programs, whose libraries lie beside them


def sandboxed(
    command: Sequence[str],
    folder: Path,
    path: str,
    *,
    readable: Iterable[Path] = (),
    writable: Iterable[Path] = (),
    hidden: Iterable[Path] = (),
    guarded: bool = False,
    alone: bool = False,
    tmp_mb: int = 1024,
) -> list[str]:
    """The command line that runs `command` in a sandbox.

    path: where its program is looked for. hidden: what stays unseen even where it lies in a folder that is shown.
    alone: without any network.
    """
    words = [bwrap_program(), "--die-with-parent", "--new-session", "--unshare-user", "--unshare-pid", "--unshare-ipc"]
    words += ["--unshare-uts", "--unshare-cgroup-try", "--cap-drop", "ALL", *(["--unshare-net"] if alone else [])]
    user = os.geteuid() or 1000  # inside, root is nobody special
    words += ["--uid", str(user), "--gid", str(os.getegid() or user)]
    words += ["--size", str(tmp_mb * 2**20), "--tmpfs", "/tmp", "--dir", HOME]
    for name in _SYSTEM:
        words += ["--symlink", os.readlink(name), name] if os.path.islink(name) else ["--ro-bind-try", name, name]
    words += ["--dev", "/dev"]
    if guarded:
        words += ["--dir", "/proc", *_bound("--ro-bind-try", (Path("/proc", name) for name in _FACTS))]
    else:
        words += own_proc()
    folder, writable = folder.absolute(), list(writable)
    program = folder / command[0] if "/" in command[0] else Path(shutil.which(command[0], path=path) or command[0])
    named = [Path(word) for word in command[1:] if os.path.isabs(word) and Path(word) not in _TOO_MUCH]
    needed = [*map(Path, _NAMES), *_homes_of(Path(sys.executable)), *_homes_of(program), *named, *readable, folder]
    shown = list[Path]()
    for place in (seen for need in needed for seen in (need, _resolved(need))):
        if not any(place.is_relative_to(above) for above in (*map(Path, _SYSTEM), *shown)):
            shown.append(place)
    words += [*_bound("--ro-bind-try", shown), *_bound("--bind-try", writable)]
    for hole in _masked([*shown, *writable], [*map(Path, _PASSWORDS), *hidden], folder):
        words += ["--tmpfs", hole, "--remount-ro", hole] if os.path.isdir(hole) else ["--ro-bind", os.devnull, hole]
    return [*words, "--chdir", str(folder), "--", *command]


def own_proc() -> list[str]:
    """A /proc of the sandbox's own processes. What belongs to root there (settings of the kernel) is read-only: who is
    root outside owns it inside, too, and needs no capability to write it."""
    return ["--proc", "/proc", *_bound("--ro-bind-try", (Path("/proc", name) for name in _ROOTS))]


def places(paths: Sequence[str]) -> list[Path]:
    """What a recipe lists: `["~/.cache"]`."""
    return [Path(path).expanduser().absolute() for path in paths]


@functools.cache
def bwrap_program() -> str:
    """The path of bubblewrap, tried once; an error if it does not work here."""
    program = shutil.which("bwrap")
    problem = "bwrap is not installed"
    if program is not None:
        tried = [program, "--unshare-user", "--unshare-pid", "--ro-bind", "/", "/", "--proc", "/proc", "--", "true"]
        done = subprocess.run(tried, capture_output=True, text=True, check=False)
        if not done.returncode:
            return program
        problem = f"bwrap does not work here: {done.stderr.strip()[-300:]}"
    raise ConfigError(
        f"programs run in a sandbox, and there is none: {problem}. Install it with {INSTALL}, or set "
        'env.params.sandbox = "none": what the model writes then runs with your rights where the program runs it'
    )


def _bound(how: str, places: Iterable[Path]) -> list[str]:
    return [word for place in places for word in (how, str(place), str(place))]


@functools.cache
def _resolved(place: Path) -> Path:
    """Of what is shown, which stays where it is for as long as a run."""
    return place.resolve()


@functools.cache
def _homes_of(program: Path) -> list[Path]:
    """The folders that a program needs beside the system's: of itself, of what its link leads to, of the interpreter
    in its first line."""
    found = []
    for place in dict.fromkeys((Path(os.path.abspath(program)), program.resolve())):
        beside = place.parent.parent if place.parent.name in _BINARIES else place.parent
        found.append(next(shown for shown in (beside, place.parent, place) if shown not in _TOO_MUCH))
    try:
        with open(program, "rb") as file:
            first = file.readline(1000)
    except OSError:
        first = b""
    interpreter = first[2:].split()[:1] if first.startswith(b"#!") else []
    return found + [home for word in interpreter for home in _homes_of(Path(os.fsdecode(word)))]


def _masked(shown: Sequence[Path], hidden: Iterable[Path], folder: Path) -> list[str]:
    """Where in the sandbox hidden files and folders would be seen, also by way of links.

    A folder of runs that holds the program's own folder is shown without its runs.
    """
    wanted = set[Path]()
    for place in (place.resolve() for place in hidden):
        around = _resolved(folder).is_relative_to(place)
        wanted |= {found.parent for depth in _RUNS for found in place.glob(depth)} if around else {place}
    seen = [(place, _resolved(place)) for place in (*map(Path, _SYSTEM), *shown)]
    found = {
        str(name / place.relative_to(real)) for place in wanted for name, real in seen if place.is_relative_to(real)
    }
    return sorted(place for place in found if os.path.exists(place))
