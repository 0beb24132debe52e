"""What the system says of a process: descendants, state, time used, how it ended, how many files it may open."""

import os
import re
import resource
import signal
import time
from contextlib import suppress
from pathlib import Path

KEPT = 64_000  # bytes of what a process wrote that are remembered
SHOWN = 4_000  # characters of them

_ERROR = re.compile(r"\b((?:\w+\.)*[A-Z]\w*(?:Error|Exception)): \S.*")
_NOTICED = {"EngineDeadError", "EngineGenerateError", "CancelledError", "BrokenPipeError", "ConnectionResetError"}


def describe(status: int | None) -> str:
    """A wait status in words."""
    if status is None:
        return "its template ended"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"killed by signal {number} ({signal.strsignal(number)})"
    return f"exit status {os.WEXITSTATUS(status)}"


def cause_of(words: str) -> str:
    """The line of what a process wrote that says why it ended; "": none does. One error follows from another, and the
    last ones are of those who noticed."""
    found = [match for match in _ERROR.finditer(words) if match[1].rpartition(".")[2] not in _NOTICED]
    return found[-1][0] if found else ""


def ending(words: str) -> str:
    """The end of what a process wrote, with its cause before it."""
    end, cause = words.strip()[-SHOWN:], cause_of(words)
    return f"{cause}\n…\n{end}" if cause and cause not in end else end


def family_of(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for parent in found:
        found += children_of(parent)
    return found


def children_of(pid: int) -> list[int]:
    """The processes that a process has started or adopted, zombies among them."""
    found: list[int] = []
    with suppress(OSError):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, children.read_text().split())
    return found


def state_of(pid: int) -> str:
    """The letter that Linux gives to the state of a process; "": there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except OSError:
        return ""


def processor_time(pid: int) -> float:
    """The processor time of a process in seconds, by the clock that Linux has for each: files in /proc count ticks."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


_ENOUGH = 16_384


def descriptors() -> int:
    """The limit, raised as far as that is allowed and makes sense: the usual 1,024 are few for a server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(_ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _ENOUGH if soft == resource.RLIM_INFINITY else soft
