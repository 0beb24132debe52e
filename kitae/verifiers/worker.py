"""The processes in which score functions run, so that one that hangs or crashes takes nothing with it.

The template loads the verifier once; workers are forked from it (see `processes`). Template and pool exchange JSON, one
message per packet: the setup `{"name", "params"}`, answered by `{"on_timeout", "warnings"}` when the verifier is loaded
and warm, or by `{"error"}`; then "spawn" with two descriptors → `{"pid"}`, and `{"reap": pid}` → `{"status"}`. A worker
reads one JSON object per line and answers each with one: `{"id", "response", "reference", "context"}` → `{"id",
"value", "components", "outcome", "detail"}`.

Covered: a score function may print, read stdin, raise, exit, crash, or return nonsense, and the answer is a true score
or an error. Not covered: malice. The function runs with the rights of the user, on their files and network. It must not
leave threads running when it is loaded: a fork does not have them.
"""

import asyncio
import gc
import inspect
import json
import os
import signal
import socket
import sys
import traceback
import warnings
from contextlib import suppress
from dataclasses import asdict
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import Any, NoReturn

from kitae.errors import VerifierError
from kitae.types import Score
from kitae.verifiers import compose
from kitae.verifiers.base import ScoreFunction, Verifier, VerifierWarning
from kitae.verifiers.registry import check_params, resolve

_MAX_CONTROL = 2**16  # bytes of a message of the pool
_MAX_DETAIL = 1_000  # characters of an explanation that travel back


def main() -> None:
    """The template: serve the pool until it closes the connection, which its death does too."""
    control = _take_over_streams()
    _yield_to_parent()
    setup = json.loads(control.recv(_MAX_CONTROL))
    params = setup["params"]
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", VerifierWarning)
            verifier = resolve(setup["name"])
            check_params(verifier, params)
            if verifier.name == "compose":
                verifier = compose.prepare(params)
            _warm_up(verifier, params)
    except VerifierError as error:
        control.send(json.dumps({"error": str(error)}).encode()[:_MAX_CONTROL])
        return
    said = [str(warning.message) for warning in caught if issubclass(warning.category, VerifierWarning)]
    control.send(json.dumps({"on_timeout": verifier.on_timeout, "warnings": said}).encode())
    gc.collect()
    gc.freeze()  # what is loaded stays shared with the workers
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, _MAX_CONTROL, 2)
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
            control.send(json.dumps({"pid": pid}).encode())
        else:
            _, status = os.waitpid(request["reap"], 0)
            control.send(json.dumps({"status": status}).encode())


def _work(verifier: Verifier, params: dict[str, Any], jobs: int, stderr: int) -> NoReturn:
    """A worker, from its fork to its end."""
    try:
        _yield_to_parent()
        os.dup2(stderr, 2)
        os.dup2(2, 1)
        os.close(stderr)
        stream = socket.socket(fileno=jobs)
        requests, replies = stream.makefile("rb"), stream.makefile("wb")
        for line in requests:
            job = json.loads(line)
            score = judge(verifier.score, job["response"], job["reference"], job["context"], params)
            replies.write(
                json.dumps({"id": job["id"], **asdict(score)}).encode() + b"\n"
            )  # ASCII: surrogates stay whole
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
    except BaseException as error:  # SystemExit too: a score function must not end the worker
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        return Score.error(f"{type(error).__name__}: {error}"[:_MAX_DETAIL] + f" ({where})")


def as_score(result: Any) -> Score:
    if isinstance(result, Real):
        result = Score(float(result))
    if not isinstance(result, Score):
        return Score.error(f"a score function must return a Score, a float or a bool, got {type(result).__name__}")
    if not result.valid:
        return Score.error(str(result.detail)[:_MAX_DETAIL])
    numbers: dict[str, Any] = {"value": result.value, **result.components}
    for name, number in numbers.items():
        if not isinstance(number, Real) or not isfinite(number):
            return Score.error(f"the {name} of a score must be a finite number, got {number!r}"[:_MAX_DETAIL])
    components = {str(name): float(number) for name, number in result.components.items()}
    return Score(float(result.value), components, detail=str(result.detail)[:_MAX_DETAIL])


def _warm_up(verifier: Verifier, params: dict[str, Any]) -> None:
    if verifier.example is None:
        return
    response, reference = verifier.example
    score = judge(verifier.score, response, reference, {}, params)
    if not score.valid or (score.value != 1 and not params):  # params may ask for more than the example has
        reason = score.detail or f"{score.value:g}"
        raise VerifierError(
            f"verifier {verifier.name!r} must score its example {response!r} 1, got {reason} with params {params}"
        )


def _take_over_streams() -> socket.socket:
    """Keep the connection to ourselves: what a score function prints goes to stderr, and its stdin is empty."""
    control = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    sys.stdout = sys.stderr  # it can print any text, even lone surrogates
    return control


def _yield_to_parent() -> None:
    """Die with the thread that started us, even in the middle of a check; and before it, when memory runs out."""
    if sys.platform != "linux":
        return
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    with suppress(OSError):  # some containers forbid it
        Path("/proc/self/oom_score_adj").write_text("1000")
