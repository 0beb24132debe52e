"""Inside a template and its workers: load once, fork on demand, answer jobs.

Template and owner exchange JSON, one message per packet: the setup, answered by a greeting when all is loaded and warm,
or by `{"error"}`; then "spawn" with two descriptors → `{"pid"}`, and `{"reap": pid}` → `{"status"}`. A worker reads one
JSON object per line and answers each with one: what it was loaded to answer, and the job's own `id`.

What a job prints goes to the owner, line by line; its stdin is empty. A job that forks and returns twice is answered
once. What is loaded must not leave threads running: a fork does not have them.

What a worker has started and left behind ends when the worker is reaped, however the worker ended.
"""

import gc
import io
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from kitae.errors import KitaeError
from kitae.workers.die_with_parent import adopt, sweep
from kitae.workers.process_status import children_of

MAX_CONTROL = 2**17  # bytes of a message between owner and template
_MAX_WORDS = 10_000  # characters of an error

Answer = Callable[[dict[str, Any]], Mapping[str, Any]]
"""From a job to its answer, both JSON objects."""


def serve(load: Callable[[dict[str, Any]], tuple[Mapping[str, Any], Answer]]) -> None:
    """The template: serve its owner until they close the connection, which their death does too.

    `load` makes the greeting and the function of the workers from the setup; a `KitaeError` says why it cannot.
    """
    control = _take_over_streams()
    _yield_to_parent()
    try:
        greeting, answer = load(json.loads(control.recv(MAX_CONTROL)))
    except KitaeError as error:
        _send(control, {"error": str(error)[:_MAX_WORDS]})
        return
    _send(control, greeting)
    _flush_streams(2)
    gc.collect()
    gc.freeze()  # what is loaded stays shared with the workers
    adopt()
    known = set(children_of(os.getpid()))
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MAX_CONTROL, 2)
        if not message:
            return
        request = json.loads(message)
        if request == "spawn":
            if (pid := os.fork()) == 0:
                control.close()
                _work(answer, *descriptors)
            os.setpgid(pid, pid)  # killed whole, from the moment that the owner knows of it
            known.add(pid)
            for descriptor in descriptors:
                os.close(descriptor)
            _send(control, {"pid": pid})
        else:
            _, status = os.waitpid(request["reap"], 0)
            known.discard(request["reap"])
            sweep(known)
            _send(control, {"status": status})


def _send(control: socket.socket, message: Mapping[str, Any]) -> None:
    control.send(json.dumps(message).encode())


def _work(answer: Answer, jobs: int, stderr: int) -> NoReturn:
    """A worker, from its fork to its end."""
    try:
        _yield_to_parent()
        _open_streams(stderr)
        stream = socket.socket(fileno=jobs)
        requests, replies = stream.makefile("rb"), stream.makefile("wb")
        me = os.getpid()
        for line in requests:
            job = json.loads(line)
            reply = {"id": job["id"], **answer(job)}
            if os.getpid() != me:  # a function that forks returns twice
                break
            _flush_streams(stderr)
            replies.write(json.dumps(reply).encode() + b"\n")  # ASCII: surrogates stay whole
            replies.flush()
    except BrokenPipeError:
        pass
    finally:
        os._exit(0)


def _take_over_streams() -> socket.socket:
    """Keep the connection to ourselves: what a score function prints goes to stderr, and its stdin is empty."""
    control = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    _open_streams(os.dup(2))
    return control


def _open_streams(descriptor: int) -> None:
    """Both streams lead to the descriptor, for us and for children, and take any text, even lone surrogates."""
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = sys.stderr = _Stream(os.fdopen(2, "wb", closefd=False))


def _flush_streams(descriptor: int) -> None:
    """End a check's last line, so that it is passed on now; a check that closed its streams does not rob the next."""
    try:
        for stream in {sys.stdout, sys.stderr}:
            if isinstance(stream, _Stream) and stream.line_is_open:
                stream.write("\n")
            stream.flush()
        os.fstat(1)
        os.fstat(2)
    except (OSError, ValueError, AttributeError):
        _open_streams(descriptor)


class _Stream(io.TextIOWrapper):
    """A stream of lines that knows whether the last one has ended."""

    line_is_open = False

    def __init__(self, raw: io.BufferedWriter) -> None:
        super().__init__(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)

    def write(self, text: str) -> int:
        self.line_is_open = not text.endswith("\n") if text else self.line_is_open
        return super().write(text)


def _yield_to_parent() -> None:
    """Die with the thread that started us, even in the middle of a check; and before it, when memory runs out."""
    if sys.platform != "linux":
        return
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    with suppress(OSError):  # some containers forbid it
        Path("/proc/self/oom_score_adj").write_text("1000")
