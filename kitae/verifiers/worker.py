"""The processes in which score functions run, so that one that hangs or crashes takes nothing with it.

The template loads the verifier once; workers are forked from it (see `processes`). Template and pool exchange JSON, one
message per packet: the setup `{"name", "params"}`, answered by `{"on_timeout", "repeatable", "warnings"}` when the
verifier is loaded and warm, or by `{"error"}`; then "spawn" with two descriptors → `{"pid"}`, and `{"reap": pid}` →
`{"status"}`. A worker reads one JSON object per line and answers each with one: `{"id", "allowance", "response",
"reference", "context"}` → `{"id", "score", "seconds", "spoilt"}`. `seconds` is processor time; an `allowance` of it, if
any, is all that the check may use now: the score is null where that was not enough.

Covered: a score function may print, read stdin, raise, exit, crash, or return nonsense, and the answer is a true score
or an error. What it prints goes to the pool, line by line. Not covered: malice. The function runs with the rights of
the user, on their files and network. It must not leave threads running when it is loaded: a fork does not have them.
"""

import asyncio
import gc
import inspect
import io
import json
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from numbers import Real
from pathlib import Path
from time import process_time
from typing import Any, NoReturn

from kitae.errors import VerifierError
from kitae.types import Score
from kitae.verifiers import compose
from kitae.verifiers.base import ScoreFunction, Verifier, VerifierWarning
from kitae.verifiers.interrupts import Interrupted, briefly, is_spoilt
from kitae.verifiers.registry import check_params, resolve

MAX_CONTROL = 2**17  # bytes of a message between pool and template
_MAX_WORDS = 10_000  # characters of an error or of all warnings of a template
_MAX_DETAIL = 1_000  # characters of an explanation that travel back
_MAX_COMPONENTS, _MAX_NAME = 1_000, 200  # of a score; characters
_MAX_NUMBER = 1e15  # of a score: the squares of a group's rewards still have a finite sum in 32 bits


def main() -> None:
    """The template: serve the pool until it closes the connection, which its death does too."""
    control = _take_over_streams()
    _yield_to_parent()
    setup = json.loads(control.recv(MAX_CONTROL))
    params = setup["params"]
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", VerifierWarning)
            verifier = resolve(setup["name"])
            check_params(verifier, params)
            if verifier.name == "compose":
                verifier = compose.prepare(params)
            if problem := try_example(verifier, params):
                raise VerifierError(f"verifier {verifier.name!r} {problem}")
    except VerifierError as error:
        _send(control, {"error": str(error)[:_MAX_WORDS]})
        return
    said = "\n".join(str(warning.message) for warning in caught if issubclass(warning.category, VerifierWarning))
    meaning = {"on_timeout": verifier.on_timeout, "repeatable": verifier.repeatable}
    _send(control, {**meaning, "warnings": said[:_MAX_WORDS].splitlines()})
    _flush_streams(2)
    gc.collect()
    gc.freeze()  # what is loaded stays shared with the workers
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MAX_CONTROL, 2)
        if not message:
            return
        request = json.loads(message)
        if request == "spawn":
            if (pid := os.fork()) == 0:
                control.close()
                _work(verifier, params, *descriptors)
            os.setpgid(pid, pid)  # killed whole, from the moment that the pool knows of it
            for descriptor in descriptors:
                os.close(descriptor)
            _send(control, {"pid": pid})
        else:
            _, status = os.waitpid(request["reap"], 0)
            _send(control, {"status": status})


def _send(control: socket.socket, message: Mapping[str, Any]) -> None:
    control.send(json.dumps(message).encode())


def _work(verifier: Verifier, params: dict[str, Any], jobs: int, stderr: int) -> NoReturn:
    """A worker, from its fork to its end."""
    try:
        _yield_to_parent()
        _open_streams(stderr)
        stream = socket.socket(fileno=jobs)
        requests, replies = stream.makefile("rb"), stream.makefile("wb")
        me = os.getpid()
        for line in requests:
            job = json.loads(line)
            began = process_time()
            check = partial(judge, verifier.score, job["response"], job["reference"], job["context"], params)
            try:
                score = asdict(briefly(job["allowance"], check) if job["allowance"] else check())
            except Interrupted:
                score = None
            if os.getpid() != me:  # a function that forks returns twice
                break
            _flush_streams(stderr)
            reply = {"id": job["id"], "score": score, "seconds": process_time() - began, "spoilt": is_spoilt()}
            replies.write(json.dumps(reply).encode() + b"\n")  # ASCII: surrogates stay whole
            replies.flush()
    except BrokenPipeError:
        pass
    finally:
        os._exit(0)


def judge(function: ScoreFunction, response: str, reference: Any, context: Any, params: dict[str, Any]) -> Score:
    """Call a score function; whatever it does, the result is a finite score or an error that says what it did."""
    try:
        result: Any = function(response, reference, context, **params)
        return as_score(asyncio.run(result) if inspect.iscoroutine(result) else result)
    except Interrupted:
        raise
    except BaseException as error:  # SystemExit too: a score function must not end the worker
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        return _refused(f"{type(error).__name__}: {_words_of(error)}"[:_MAX_DETAIL] + f" ({where})")


def as_score(result: Any) -> Score:
    """What a score function returned, as a score that nothing later stumbles over: here every score passes."""
    if isinstance(result, Mapping):
        components = dict(result)
        key = next((key for key in ("score", "value") if key in components), None)
        if key is None:
            names = ", ".join(map(str, components)) or "none"
            return _refused(f"a dict of a score function must have the key 'score', got the keys {names}")
        result = Score(components.pop(key), {name: x for name, x in components.items() if _is_number(x)})
    if _is_number(result):
        result = Score(result)
    if not isinstance(result, Score):
        kind = type(result).__name__
        return _refused(f"a score function must return a Score, a float, a bool or a dict with 'score', got {kind}")
    outcome: str = result.outcome
    if outcome == "error":
        return _refused(str(result.detail) or "an error without a reason")
    if outcome != "scored":
        return _refused(f"the outcome of a score must be 'scored' or 'error', got {outcome!r}")
    if len(result.components) > _MAX_COMPONENTS or any(len(str(name)) > _MAX_NAME for name in result.components):
        rule = f"at most {_MAX_COMPONENTS} components with names of at most {_MAX_NAME} characters"
        return _refused(f"a score must have {rule}, got {len(result.components)}")
    for name, number in (("value", result.value), *result.components.items()):
        if not _is_number(number) or not abs(_plain(number)) <= _MAX_NUMBER:
            rule = f"must be a finite number, at most {_MAX_NUMBER:g} in size"
            return _refused(f"the {name} of a score {rule}, got {repr(_plain(number))[:100]}")
    components = {_text(name): float(_plain(number)) for name, number in result.components.items()}
    return Score(float(_plain(result.value)), components, detail=_text(result.detail))


def _refused(reason: str) -> Score:
    return Score.error(_text(reason, 2 * _MAX_DETAIL))


def _text(value: Any, longest: int = _MAX_DETAIL) -> str:
    """As text that every file and database takes: lone surrogates have no UTF-8."""
    return str(value)[:longest].encode("utf-8", "backslashreplace").decode()


def _is_number(value: Any) -> bool:
    """Also what numpy and torch take for one: their bools, and arrays without a dimension."""
    return isinstance(_plain(value), Real)


def _plain(value: Any) -> Any:
    return value.item() if getattr(value, "shape", None) == () else value


def _words_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as problem:
        return f"its message raised {type(problem).__name__}"


def try_example(verifier: Verifier, params: Mapping[str, Any]) -> str:
    """What is wrong with the score of the verifier's example under these params, if anything is."""
    example = verifier.example_for(params)
    if example is None:
        return ""
    score = judge(verifier.score, *example, {}, dict(params))
    fits = callable(verifier.example) or not params  # else the params may ask for more than the example has
    if score.valid and (score.value == 1 or not fits):
        return ""
    got = f"{score.value:g} {score.detail}".rstrip() if score.valid else score.detail
    return f"must score its example, got {got} for {example[0]!r} with params {dict(params)}"


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
    """End a check's last line, so that it is heard now; a check that closed its streams does not rob the next."""
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
