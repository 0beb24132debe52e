"""Verifiers by name: the built-in ones, and any function in a file of the user's own.

Importing this module is cheap: what a verifier needs (sympy, for one) is imported by its first check.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from kitae.errors import VerifierError
from kitae.plugins import is_plugin, load_function, nearest
from kitae.verifiers.base import Verifier
from kitae.verifiers.math import math
from kitae.verifiers.text import exact, number

VERIFIERS: dict[str, Verifier] = {
    verifier.name: verifier
    for verifier in (
        Verifier("exact", exact, on_timeout="wrong", example=("56, 34, 12\n", "56, 34, 12")),
        Verifier("number", number, on_timeout="wrong", example=("$1,234.00", "1234")),
        Verifier("math", math, on_timeout="wrong", example=(r"So it is $\boxed{\frac{x}{2}}$.", "0.5x")),
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
