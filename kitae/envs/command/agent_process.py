"""The process that runs an agent program for one episode, and that ends with everything that the program started.

setup  {}                                                      greeting  {}
job    {"command": ["python", "agent.py"], "folder", "variables", "input", "keep", "guarded", "network"}
answer {"status": 0, "words": "the end of what it printed"}, or {"refused": "why it could not be started"}

network: {"port", "door", "token"} for a network of the program's own (`own_network`), or null.
guarded: the command is that of a sandbox, which gets the filter of system calls that look into other processes.
"""

import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from typing import IO, Any

from kitae.sandbox.own_network import enter_own_network, hand_over
from kitae.sandbox.seccomp import filter_fd
from kitae.workers.die_with_parent import tie
from kitae.workers.templates.template_main import Answer, serve

_PR_SET_PDEATHSIG = 1
_LAST_WORDS = 1.0  # seconds to read the remaining output


def main() -> None:
    serve(load)


def load(setup: Mapping[str, Any]) -> tuple[Mapping[str, Any], Answer]:
    return {}, run


def run(job: Mapping[str, Any]) -> Mapping[str, Any]:
    """Run the program to its end.

    It stays in this process's group, so both are killed together. Processes that it leaves behind are found by whatever
    kills this process, or by this process if the run itself is killed.
    """
    tie()
    command = job["command"]
    looks = filter_fd(only_looks=True) if job["guarded"] else None
    if looks is not None:
        command = [command[0], "--seccomp", str(looks), *command[1:]]
    elif job["guarded"]:
        return {"refused": "a program that holds a secret cannot be guarded on this processor"}
    try:
        if network := job["network"]:
            hand_over(enter_own_network(network["port"]), network["door"], network["token"])
        program = subprocess.Popen(
            command,
            cwd=job["folder"],
            env=job["variables"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            pass_fds=() if looks is None else (looks,),
            preexec_fn=_end_with_parent,  # noqa: PLW1509  this process has no other threads yet
        )
    except OSError as error:
        return {"refused": str(error)}
    finally:
        if looks is not None:
            os.close(looks)
    assert program.stdin is not None and program.stdout is not None
    words = bytearray()
    threading.Thread(target=_write, args=(program.stdin, job["input"].encode()), daemon=True).start()
    reading = threading.Thread(target=_read, args=(program.stdout, words, job["keep"]), daemon=True)
    reading.start()
    status = program.wait()
    reading.join(_LAST_WORDS)  # a process that it left behind may hold the pipe open
    return {"status": status, "words": bytes(words).decode("utf-8", "replace")}


def _read(pipe: IO[bytes], words: bytearray, keep: int) -> None:
    """Keep the end of the output, however long it is."""
    while part := pipe.read(2**16):
        words += part
        del words[:-keep]


def _write(pipe: IO[bytes], text: bytes) -> None:
    """Write the input; a program may exit without reading it."""
    try:
        pipe.write(text)
        pipe.close()
    except OSError:
        pass


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
