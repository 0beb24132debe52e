"""A network of a program's own, in which nothing listens but the endpoint of its episode.

    taken = enter_own_network(8000)          in the process that starts the program, before it does
    hand_over(taken, "/tmp/…/door", token)   to the run, which answers there: see `Doorway`

`main` does both, in a process that then becomes the program: `python -c … PORT DOOR TOKEN PROGRAM ARGUMENT…`.

A socket belongs to the network in which it was made, whoever holds it. So the program's process makes a network with
nothing in it, listens there at the address that the program will be told, and gives the listening socket to the run,
which accepts from it like from its own. Nothing is copied on the way.
"""

import asyncio
import ctypes
import fcntl
import os
import socket
import struct
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from kitae.clients.addresses import listen

_HOST = "127.0.0.1"
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_LONGEST_TOKEN = 200  # bytes


def enter_own_network(port: int) -> socket.socket:
    """Leave the machine's network for an empty one, and listen there. Raises `OSError` if the kernel refuses."""
    user, group = os.geteuid(), os.getegid()
    _unshare(_CLONE_NEWNET if user == 0 else _CLONE_NEWUSER | _CLONE_NEWNET)
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket() as any_socket:
        loopback = struct.pack("16sH22x", b"lo", 0)
        flags = struct.unpack("16sH22x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, loopback))[1]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags | _IFF_UP))
    return listen(_HOST, port)


def _unshare(what: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(what):
        raise OSError(ctypes.get_errno(), f"no network of its own: {os.strerror(ctypes.get_errno())}")


def hand_over(taken: socket.socket, door: str, token: str) -> None:
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(door)
        socket.send_fds(line, [token.encode()], [taken.fileno()])
        line.recv(1)  # the run has it
    taken.close()


def main() -> None:
    port, door, token, *command = sys.argv[1:]
    hand_over(enter_own_network(int(port)), door, token)
    os.execvp(command[0], command)


class Doorway:
    """Where the run takes listening sockets: a file in a folder that only its user can enter.

    serve: answers on a socket. The server of each episode ends with `close`.
    """

    def __init__(self, serve: Callable[[socket.socket], Awaitable[asyncio.Server]]) -> None:
        self._serve = serve
        self._folder = tempfile.TemporaryDirectory(prefix="kitae-door-")
        self.path = os.path.join(self._folder.name, "door")
        self._servers: dict[str, asyncio.Server] = {}
        self._expected: set[str] = set()
        self._taking = set[asyncio.Task[None]]()
        self._line = socket.socket(socket.AF_UNIX)
        self._line.bind(self.path)
        self._line.listen(1024)
        self._line.setblocking(False)
        asyncio.get_running_loop().add_reader(self._line, self._knock)

    def expect(self, token: str) -> None:
        self._expected.add(token)

    def close(self, token: str) -> None:
        self._expected.discard(token)
        if server := self._servers.pop(token, None):
            server.close()

    def end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._line)
        self._line.close()
        for token in list(self._servers):
            self.close(token)
        self._folder.cleanup()

    def _knock(self) -> None:
        try:
            line, _ = self._line.accept()
        except OSError:
            return
        task = asyncio.create_task(self._take(line))
        self._taking.add(task)
        task.add_done_callback(self._taking.discard)

    async def _take(self, line: socket.socket) -> None:
        with line:
            line.settimeout(1.0)  # it is written as soon as the line is open
            try:
                said, descriptors, _, _ = socket.recv_fds(line, _LONGEST_TOKEN, 1)
            except OSError:
                return
            token = said.decode(errors="replace")
            for descriptor in descriptors:
                taken = socket.socket(fileno=descriptor)
                if token not in self._expected:
                    taken.close()
                    continue
                self._servers[token] = await self._serve(taken)
            try:
                line.send(b"1")
            except OSError:
                self.close(token)
