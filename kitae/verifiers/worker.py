"""The process in which score functions run, so that one that hangs or crashes takes nothing with it.

It reads one JSON object per line and answers each with one. The first, `{"id", "name", "params"}`, chooses the
verifier; the answer `{"id", "on_timeout"}` says that it is loaded and warm, `{"id", "error"}` that it cannot be. Each
other is a check, `{"id", "response", "reference", "context"}` → `{"id", "value", "components", "outcome", "detail"}`.

Covered: a score function may print, read stdin, raise, exit, crash, or return nonsense, and the answer is a true score
or an error. Not covered: malice. The function runs with the rights of the user, on their files and network.
"""

import asyncio
import inspect
import json
import os
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import IO, Any

from kitae.errors import VerifierError
from kitae.types import Score
from kitae.verifiers.base import ScoreFunction, Verifier
from kitae.verifiers.registry import check_params, resolve

_MAX_DETAIL = 1_000  # characters of an explanation that travel back


def main() -> None:
    """Serve until the parent closes our input, which its death does too."""
    requests, replies = _take_over_streams()
    _yield_to_parent()
    setup = json.loads(requests.readline())
    params = setup["params"]
    try:
        verifier = resolve(setup["name"])
        check_params(verifier, params)
        _warm_up(verifier, params)
    except VerifierError as error:
        _reply(replies, {"id": setup["id"], "error": str(error)})
        return
    _reply(replies, {"id": setup["id"], "on_timeout": verifier.on_timeout})
    for line in requests:
        job = json.loads(line)
        score = judge(verifier.score, job["response"], job["reference"], job["context"], params)
        _reply(replies, {"id": job["id"], **asdict(score)})


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
    if score.value != 1:
        reason = score.detail or f"{score.value:g}"
        raise VerifierError(
            f"verifier {verifier.name!r} must score its example {response!r} 1, got {reason} with params {params}"
        )


def _take_over_streams() -> tuple[IO[bytes], IO[bytes]]:
    """Keep the pipes to ourselves: what the score function prints goes to stderr, and its stdin is empty."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr  # it can print any text, even lone surrogates
    return requests, replies


def _yield_to_parent() -> None:
    """Die with the thread that started us, even in the middle of a check; and before it, when memory runs out."""
    if sys.platform != "linux":
        return
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    with suppress(OSError):  # some containers forbid it
        Path("/proc/self/oom_score_adj").write_text("1000")


def _reply(replies: IO[bytes], message: dict[str, Any]) -> None:
    replies.write(json.dumps(message).encode() + b"\n")  # ASCII: escapes keep lone surrogates whole
    replies.flush()
