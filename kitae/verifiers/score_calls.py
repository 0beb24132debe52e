"""Calls of score functions: params are checked before, results after, and every outcome is a score.

This is the one way in which a Python function judges answers, whether it comes with Kitae, from `file.py:function` or
from a cell of a notebook:

    call_scores(verifier, responses, reference, contexts, params) ──► a Score for each response

The responses answer one prompt and have its reference in common; each has a context of its own. A plain function is
called for each. An `async def` is called for each too, and all are awaited together. One that is `batched` is called
once, `function(responses, references, contexts, **params)`, and returns a list of as many results, in their order.

A result is a `Score`, a number, a bool, or a dict with "score"; or None: the function does not apply to that answer.
In a sum of several (`kitae.verifiers.compose`) it is left out then; where none applies, the answer has no score, which
is an error of that sample. So is whatever else a function returns or raises; a batched one that raises, or returns a
list of another length, leaves the whole batch without scores.
"""

import asyncio
import inspect
import traceback
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from kitae.errors import VerifierError
from kitae.plugins import nearest
from kitae.types import Score
from kitae.verifiers.base import ScoreFunction, Verifier
from kitae.workers.interruptible_calls import CutShort

_MAX_DETAIL = 1_000  # characters of an explanation
_MAX_COMPONENTS, _MAX_NAME = 1_000, 200  # of a score; characters
_MAX_NUMBER = 1e15  # of a score, so that the squares of a group's rewards have a finite sum in 32 bits


def check_params(verifier: Verifier, params: Mapping[str, Any]) -> None:
    """Raise if the score function does not take these params, or lacks one."""
    signature = inspect.signature(verifier.score)
    try:
        signature.bind("", None, {}, **params)
    except TypeError as error:
        valid = [p.name for p in signature.parameters.values()][3:]
        takes = f"takes {', '.join(valid)}" if valid else "takes none"
        hint = next((h for key in params if key not in valid and (h := nearest(key, valid))), "")
        rule = (
            "; response, reference and context are given, the rest is set by params" if "missing" in str(error) else ""
        )
        raise VerifierError(f"params of verifier {verifier.name!r}: {error}; it {takes}{hint}{rule}") from None

    for name, value in params.items():
        p = signature.parameters.get(name)
        if p is not None and isinstance(p.default, bool) and not isinstance(value, bool):
            raise VerifierError(f"{name} of verifier {verifier.name!r} must be true or false, got {value!r}")


def call_score(function: ScoreFunction, response: str, reference: Any, context: Any, params: dict[str, Any]) -> Score:
    """Call a function for one response. Whatever it does, the result is a finite score, or an error that says what
    happened."""
    return judged(_called(function, (response, reference, context), params))


def call_scores(
    verifier: Verifier, responses: Sequence[str], reference: Any, contexts: Sequence[Any], params: dict[str, Any]
) -> list[Score]:
    """A finite score for each response, or an error that says what happened."""
    return [judged(found) for found in applied(verifier, responses, reference, contexts, params)]


def applied(
    verifier: Verifier, responses: Sequence[str], reference: Any, contexts: Sequence[Any], params: dict[str, Any]
) -> list[Score | None]:
    """Like `call_scores`; None where the function does not apply to an answer."""
    function, each = verifier.score, list(zip(responses, contexts, strict=True))
    if verifier.batched:
        return _called_once(function, list(responses), reference, list(contexts), params)
    if not verifier.grouped or len(each) == 1:
        return [_called(function, (response, reference, context), params) for response, context in each]

    async def one(response: str, context: Any) -> Score | None:
        try:
            found: Any = function(response, reference, context, **params)
            return _read(await found)
        except CutShort:
            raise
        except BaseException as error:
            return _raised(error)

    async def all_together() -> list[Score | None]:
        return list(await asyncio.gather(*(one(response, context) for response, context in each)))

    return asyncio.run(all_together())


def judged(found: Score | None) -> Score:
    return _refused("no reward applies to this answer, got None") if found is None else found


def _called(function: ScoreFunction, given: tuple[Any, Any, Any], params: dict[str, Any]) -> Score | None:
    try:
        result: Any = function(*given, **params)
        return _read(asyncio.run(result) if inspect.iscoroutine(result) else result)
    except CutShort:
        raise
    except BaseException as error:  # SystemExit too: a score function must not end the worker
        return _raised(error)


def _called_once(
    function: ScoreFunction, responses: list[str], reference: Any, contexts: list[Any], params: dict[str, Any]
) -> list[Score | None]:
    count = len(responses)
    try:
        result: Any = function(responses, [reference] * count, contexts, **params)
        result = asyncio.run(result) if inspect.iscoroutine(result) else result
        if getattr(result, "ndim", 0) == 1:  # an array of numpy's or torch's
            result = result.tolist()
    except CutShort:
        raise
    except BaseException as error:
        return [_raised(error)] * count
    if not isinstance(result, list | tuple) or len(result) != count:
        got = f"{len(result)} of them" if isinstance(result, list | tuple) else type(result).__name__
        return [
            _refused(f"a batched function must return a list of {count} scores, one for each response, got {got}")
        ] * (count)
    return [_read(each) for each in result]


def _read(result: Any) -> Score | None:
    return None if result is None else as_score(result)


def _raised(error: BaseException) -> Score:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(frame.filename).name}:{frame.lineno}"
    return _refused(f"{type(error).__name__}: {_words_of(error)}"[:_MAX_DETAIL] + f" ({where})")


def as_score(result: Any) -> Score:
    """The result of a score function as a valid score that later code can rely on, or as an error."""
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
    """Text that every file and database accepts; lone surrogates cannot be encoded as UTF-8."""
    return str(value)[:longest].encode("utf-8", "backslashreplace").decode()


def _is_number(value: Any) -> bool:
    """Whether the value is a number, including numpy's and torch's bools and arrays without a dimension."""
    return isinstance(_plain(value), Real)


def _plain(value: Any) -> Any:
    return value.item() if getattr(value, "shape", None) == () else value


def _words_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as problem:
        return f"its message raised {type(problem).__name__}"


def try_example(verifier: Verifier, params: Mapping[str, Any]) -> str:
    """What is wrong with the score of the verifier's example under these params, or ""."""
    example = verifier.example_for(params)
    if example is None:
        return ""
    (score,) = call_scores(verifier, [example[0]], example[1], [{}], dict(params))
    fits = callable(verifier.example) or not params  # other params may require more than the example has
    if score.valid and (score.value == 1 or not fits):
        return ""
    got = f"{score.value:g} {score.detail}".rstrip() if score.valid else score.detail
    return f"must score its example, got {got} for {example[0]!r} with params {dict(params)}"
