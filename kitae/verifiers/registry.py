"""Verifiers by name: the built-in ones, and any function in a file of the user's own.

Importing this module is cheap: what a verifier needs (sympy, for one) is imported by its first check.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from kitae.errors import VerifierError
from kitae.plugins import is_plugin, load_function, nearest
from kitae.verifiers.base import Verifier
from kitae.verifiers.code import code
from kitae.verifiers.compose import compose
from kitae.verifiers.executor import remote_code
from kitae.verifiers.gym import gym
from kitae.verifiers.instructions.verifier import instructions
from kitae.verifiers.judge import judge, reward_model
from kitae.verifiers.math import math
from kitae.verifiers.puzzles import countdown, knights_knaves
from kitae.verifiers.shape import json_schema, language, length, repetition, tags
from kitae.verifiers.text import choice, exact, f1, normalised, number, regex

_PROGRAM = (
    "```python\ndef double(x):\n    return 2 * x\n```",
    {"tests": {"kind": "asserts", "asserts": ["assert double(4) == 8"], "setup": ""}},
)
_PUZZLE = {"numbers": [3, 7, 25], "target": 46}

VERIFIERS: dict[str, Verifier] = {
    verifier.name: verifier
    for verifier in (
        Verifier("exact", exact, on_timeout="wrong", example=("56, 34, 12\n", "56, 34, 12")),
        Verifier("normalised", normalised, on_timeout="wrong", example=("The Eiffel Tower.", "eiffel tower")),
        Verifier("number", number, on_timeout="wrong", example=("$1,234.00", "1234")),
        Verifier("math", math, on_timeout="wrong", example=(r"So it is $\boxed{\int_0^1 x\,dx}$.", "1/2")),
        Verifier("code", code, on_timeout="error", example=_PROGRAM, gold=False),
        Verifier("remote_code", remote_code, on_timeout="error", gold=False),
        Verifier("f1", f1, on_timeout="wrong", example=("the cat sat", "A cat sat.")),
        Verifier("regex", regex, on_timeout="wrong", example=("Order 66", "[0-9]+"), gold=False),
        Verifier("choice", choice, on_timeout="wrong", example=("The answer is (B).", "B")),
        Verifier(
            "json_schema",
            json_schema,
            on_timeout="wrong",
            example=('So: {"age": 36}', '{"required": ["age"]}'),
            gold=False,
        ),
        Verifier(
            "instructions",
            instructions,
            on_timeout="wrong",
            example=("no commas here", {"instructions": [{"id": "punctuation:no_comma", "kwargs": {}}]}),
            gold=False,
        ),
        Verifier("tags", tags, on_timeout="wrong", example=("<think>2 + 2</think><answer>4</answer>", ""), gold=False),
        Verifier("length", length, on_timeout="wrong", example=("short", ""), gold=False),
        Verifier("repetition", repetition, on_timeout="wrong", example=("no word comes twice here", ""), gold=False),
        Verifier("language", language, on_timeout="wrong", example=("plain English", ""), gold=False),
        Verifier(
            "knights_knaves",
            knights_knaves,
            on_timeout="wrong",
            example=("Alice is a knight, Bob is a knave.", {"Alice": "knight", "Bob": "knave"}),
        ),
        Verifier("countdown", countdown, on_timeout="wrong", example=("25 + 3 × 7 = 46", _PUZZLE)),
        Verifier("gym", gym, on_timeout="wrong"),
        Verifier("judge", judge, on_timeout="error", gold=False),
        Verifier("reward_model", reward_model, on_timeout="error", gold=False),
        Verifier("compose", compose, on_timeout="error", gold=False),
    )
}


def resolve(name: str) -> Verifier:
    """The verifier called `name`: a key of `VERIFIERS`, or `path/to/file.py:function`.

    The file of the user is executed: call this where it may do so, as the workers of the pool do.
    """
    if name in VERIFIERS:
        return VERIFIERS[name]
    if not is_plugin(name):
        hint = nearest(name, VERIFIERS)
        raise VerifierError(f"a verifier is one of {', '.join(VERIFIERS)} or file.py:function, got {name!r}{hint}")
    score = load_function(name, "verifier", ("response", "reference", "context"), VerifierError)
    return Verifier(name, score, on_timeout="error")


def check_params(verifier: Verifier, params: Mapping[str, Any]) -> None:
    """Refuse params that the score function does not take, or lacks."""
    signature = inspect.signature(verifier.score)
    try:
        signature.bind("", None, {}, **params)
    except TypeError as error:
        valid = [p.name for p in signature.parameters.values()][3:]
        takes = f"takes {', '.join(valid)}" if valid else "takes none"
        hint = next((h for key in params if key not in valid and (h := nearest(key, valid))), "")
        raise VerifierError(f"params of verifier {verifier.name!r}: {error}; it {takes}{hint}") from None
