"""The processes in which score functions run, so that one that hangs or crashes affects nothing else.

The template loads the verifier once; workers are forked from it (see `kitae.workers.templates.template`).

    setup  {"name", "params", "held"}      greeting  {"on_timeout", "repeatable", "grouped", "warnings"}
    job    {"allowance", "responses", "reference", "contexts"}      answer  {"scores", "seconds", "spoilt"}

The responses of a job answer one prompt. `seconds` is processor time. `allowance`, if given, is how much of it the
check may use now; the scores are null if that was not enough.

Covered: a score function may print, read stdin, raise, exit, crash, or return nonsense, and the answer is a true score
or an error. Not covered: malice. The function runs with the user's rights, on their files and network.
"""

import warnings
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from time import process_time
from typing import Any

from kitae.errors import KitaeWarning, VerifierError
from kitae.plugins import is_plugin
from kitae.verifiers.base import Verifier, user_verifier, verifier_of
from kitae.verifiers.given_functions import hold_files, is_given, load_given
from kitae.verifiers.score_calls import call_scores, check_params, try_example
from kitae.workers.interruptible_calls import CutShort, briefly, is_spoilt
from kitae.workers.templates.template_main import Answer, serve

_MAX_WORDS = 10_000  # characters of all warnings


def main() -> None:
    serve(load)


def load(setup: Mapping[str, Any]) -> tuple[Mapping[str, Any], Answer]:
    """Load the verifier and test it with its example. Returns the facts for the pool, and the function for jobs."""
    params = setup["params"]
    hold_files(setup["held"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", KitaeWarning)
        verifier = _named(setup["name"])
        check_params(verifier, params)
        if verifier.prepare is not None:
            verifier = verifier.prepare(params)
        if problem := try_example(verifier, params):
            raise VerifierError(f"verifier {verifier.name!r} {problem}")
    said = "\n".join(str(warning.message) for warning in caught if issubclass(warning.category, KitaeWarning))
    greeting = {
        "on_timeout": verifier.on_timeout,
        "repeatable": verifier.repeatable,
        "grouped": verifier.grouped,
        "warnings": said[:_MAX_WORDS].splitlines(),
    }
    return greeting, partial(_answer, verifier, params)


def _named(name: str) -> Verifier:
    if is_given(name):
        return verifier_of(name, load_given(name))
    if is_plugin(name):
        return user_verifier(name)
    from kitae.verifiers.verifier_registry import (
        resolve,  # two thirds of a start, which functions of the user's do without
    )

    return resolve(name)


def _answer(verifier: Verifier, params: dict[str, Any], job: Mapping[str, Any]) -> Mapping[str, Any]:
    began = process_time()
    check = partial(call_scores, verifier, job["responses"], job["reference"], job["contexts"], params)
    try:
        scores = [asdict(score) for score in (briefly(job["allowance"], check) if job["allowance"] else check())]
    except CutShort:
        scores = None
    return {"scores": scores, "seconds": process_time() - began, "spoilt": is_spoilt()}
