"""The first process of a bubblewrap box: it runs commands and handles files, as the pipe at its stdin asks.

    request   {"do": "run", "command", "seconds", "output", "folder"}   answer   {"status", "ended"} + the output
              {"do": "read", "path", "most"}                                     {} + the file
              {"do": "write", "path", "mode"} + the file                         {}
              {"do": "pack", "folders"}, {"do": "unpack"} + a tar file           {} + a tar file

A message is the length of its JSON, the length of its data (8 bytes each), the JSON, the data. {"refused"} says why
something cannot be done. This file is sent as text to the box's interpreter and imports nothing but Python's own.

Commands run with the same user as this process. They cannot kill it (it is the first of its processes), nor look into
it (it cannot be traced). While it waits it looks at the memory and the number of all processes, 20 times a second.
"""

import contextlib
import ctypes
import io
import json
import os
import resource
import select
import signal
import sys
import tarfile
import time
from typing import Any

LOOK = 0.05  # seconds between two looks at what the processes use
LAST = 0.2  # seconds to read what a command that has ended left in its pipe
PR_SET_DUMPABLE = 4


class Ends:
    """What a command wrote, without the middle where it is longer than `most` bytes: two thirds of them are its
    beginning."""

    def __init__(self, most: int) -> None:
        self._last = most // 3
        self._first = most - self._last
        self._head, self._tail, self._left_out = bytearray(), bytearray(), 0

    def add(self, part: bytes) -> None:
        room = self._first - len(self._head)
        self._head += part[:room]
        self._tail += part[room:]
        if (over := len(self._tail) - self._last) > 0:
            self._left_out += over
            del self._tail[:over]

    def told(self) -> bytes:
        middle = f"\n[… {self._left_out} bytes left out …]\n".encode() if self._left_out else b""
        return bytes(self._head + middle + self._tail)


class Runner:
    def __init__(self, memory_mb: int, disk_mb: int, processes: int) -> None:
        self.memory, self.disk, self.processes = memory_mb * 2**20, disk_mb * 2**20, processes
        self.broken = ""  # which limit was broken since the last command began
        self.statuses: dict[int, int] = {}

    def serve(self) -> None:
        while True:
            while not select.select([0], [], [], LOOK)[0]:
                self.look()
            lengths = take(16)
            order = json.loads(take(int.from_bytes(lengths[:8], "little")))
            data = take(int.from_bytes(lengths[8:], "little"))
            try:
                answer, found = getattr(self, f"do_{order.pop('do')}")(data, **order)
            except (OSError, ValueError, tarfile.TarError) as problem:
                answer, found = {"refused": str(problem)}, b""
            head = json.dumps(answer).encode()
            give(len(head).to_bytes(8, "little") + len(found).to_bytes(8, "little") + head + found)

    def do_run(
        self, data: bytes, command: str, seconds: float, output: int, folder: str
    ) -> tuple[dict[str, Any], bytes]:
        self.broken = ""
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            self.become(command, folder, write)
        os.close(write)
        os.set_blocking(read, False)
        said = Ends(output)
        deadline, ended, last, pause = time.monotonic() + seconds, "exited", None, 0.001
        while True:
            readable = select.select([read], [], [], LOOK)[0]
            part = os.read(read, 2**16) if readable else b""
            said.add(part)
            self.look()
            now = time.monotonic()
            if pid in self.statuses:
                last = last or now + LAST
                if (readable and not part) or now > last or not readable:
                    break
            elif now > deadline:
                ended = "timeout"
                for strayed in [*self.family(pid), pid]:
                    with contextlib.suppress(OSError):
                        os.kill(strayed, signal.SIGKILL)
                deadline = now + 1
            elif readable and not part:  # its pipe is closed, and it goes on, or is about to end
                time.sleep(pause)
                pause = min(2 * pause, LOOK)
        os.close(read)
        status = os.waitstatus_to_exitcode(self.statuses.pop(pid))
        ended = self.broken or ended
        return {"status": status if ended == "exited" else None, "ended": ended}, said.told()

    def become(self, command: str, folder: str, write: int) -> None:
        """In the child: the command."""
        try:
            os.setsid()
            nothing = os.open(os.devnull, os.O_RDWR)
            for here, there in ((nothing, 0), (write, 1), (write, 2)):
                os.dup2(here, there)
            os.closerange(3, 1024)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.disk, self.disk))
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")
            os.chdir(folder)
            shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
            os.execv(shell, [shell, "-c", command])
        except OSError as problem:
            os.write(2, f"{problem}\n".encode())
        finally:
            os._exit(127)

    def look(self) -> None:
        """Bury the dead, and kill all if they use too much."""
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                self.statuses[found[0]] = found[1]
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        used = 0
        for pid in pids:
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/statm") as file:
                fields = file.read().split()
                used += (int(fields[1]) - int(fields[2])) * resource.getpagesize()
        if len(pids) > self.processes or used > self.memory:
            self.broken = "processes" if len(pids) > self.processes else "memory"
            for _ in range(1000):  # a fork bomb goes on between two of them
                try:
                    os.kill(-1, signal.SIGKILL)
                except ProcessLookupError:
                    break
                with contextlib.suppress(ChildProcessError):
                    while (found := os.waitpid(-1, os.WNOHANG))[0]:
                        self.statuses[found[0]] = found[1]

    def family(self, pid: int) -> list[int]:
        """The processes that the command has started and that are in its session, or below it."""
        parents, sessions = dict[int, int](), dict[int, int]()
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
                    parents[int(name)], sessions[int(name)] = int(fields[1]), int(fields[3])
        found = {child for child, session in sessions.items() if session == pid}
        while more := {child for child, parent in parents.items() if parent in found} - found:
            found |= more
        return sorted(found - {1})

    def do_read(self, data: bytes, path: str, most: int) -> tuple[dict[str, Any], bytes]:
        if not os.path.isfile(path):  # a pipe or a device would never end
            raise FileNotFoundError(f"{path} is no file")
        with open(path, "rb") as file:
            found = file.read(most + 1)
        if len(found) > most:
            raise ValueError(f"{path} has more than {most} bytes")
        return {}, found

    def do_write(self, data: bytes, path: str, mode: int) -> tuple[dict[str, Any], bytes]:
        if os.path.exists(path) and not os.path.isfile(path):
            raise OSError(f"{path} is no file")
        os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
        os.chmod(path, mode)
        return {}, b""

    def do_pack(self, data: bytes, folders: list[str]) -> tuple[dict[str, Any], bytes]:
        """Nothing moves meanwhile: a link that takes a folder's place would put files where none of them was."""
        out, own = io.BytesIO(), os.stat("/").st_dev
        signal_all(signal.SIGSTOP)
        try:
            with tarfile.open(fileobj=out, mode="w") as tar:
                for folder in folders:
                    for place, names, files in os.walk(folder):
                        names[:] = [n for n in names if os.lstat(os.path.join(place, n)).st_dev == own]
                        links = [n for n in names if os.path.islink(os.path.join(place, n))]
                        for path in [place, *(os.path.join(place, n) for n in [*files, *links])]:
                            self.pack(tar, path, own)
        finally:
            signal_all(signal.SIGCONT)
        return {}, out.getvalue()

    def pack(self, tar: tarfile.TarFile, path: str, own: int) -> None:
        info = tar.gettarinfo(path)
        if path == "/" or info is None or os.lstat(path).st_dev != own:
            return
        if info.isreg():
            with open(path, "rb") as file:
                tar.addfile(info, file)
        elif info.isdir() or info.issym():
            tar.addfile(info)

    def do_unpack(self, data: bytes) -> tuple[dict[str, Any], bytes]:
        with tarfile.open(fileobj=io.BytesIO(data), ignore_zeros=True) as tar:  # one after the other
            for member in tar:
                if not os.path.lexists(f"/{member.name}") or member.isreg():
                    tar.extract(member, "/", filter="fully_trusted")  # all of it stays in this box
        return {}, b""


def signal_all(number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, number)


def take(size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            os._exit(0)
        data += part
    return bytes(data)


def give(data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(1, left) :]


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    os.environ.pop("LC_CTYPE", None)
    Runner(*map(int, sys.argv[1:4])).serve()
