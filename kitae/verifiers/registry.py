"""Verifiers by name: the built-in ones, and any function in a file of the user's own.

Importing this module is cheap: what a verifier needs (sympy, for one) is imported by its first check.
"""

import difflib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from kitae.errors import VerifierError
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
    path, colon, function = name.rpartition(":")
    if not (colon and path.endswith(".py")):
        hint = _nearest(name, VERIFIERS)
        raise VerifierError(f"a verifier is one of {', '.join(VERIFIERS)} or file.py:function, got {name!r}{hint}")
    return _from_file(name, Path(path).expanduser(), function)


def check_params(verifier: Verifier, params: Mapping[str, Any]) -> None:
    """Refuse params that the score function does not take, or lacks."""
    signature = inspect.signature(verifier.score)
    try:
        signature.bind("", None, {}, **params)
    except TypeError as error:
        valid = [p.name for p in signature.parameters.values()][3:]
        takes = f"takes {', '.join(valid)}" if valid else "takes none"
        hint = next((h for key in params if key not in valid and (h := _nearest(key, valid))), "")
        raise VerifierError(f"params of verifier {verifier.name!r}: {error}; it {takes}{hint}") from None


def _from_file(name: str, path: Path, function: str) -> Verifier:
    module = _load(path)
    score = getattr(module, function, None)
    if not callable(score):
        own = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise VerifierError(f"verifier {name!r} needs a function {function!r} in {path}{_nearest(function, own)}")
    try:
        inspect.signature(score).bind_partial("", None, {})
    except (TypeError, ValueError):  # ValueError: a builtin without a signature
        raise VerifierError(
            f"verifier {name!r} must take (response, reference, context), got {function}{_signature(score)}"
        ) from None
    return Verifier(name, score, on_timeout="error")


def _load(path: Path) -> ModuleType:
    if not path.is_file():
        raise VerifierError(f"the file of a verifier must exist, got {str(path)!r}")
    spec = importlib.util.spec_from_file_location(f"kitae_user_{path.stem}", path.resolve())
    assert spec is not None and spec.loader is not None  # a .py file always has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise VerifierError(f"the file of a verifier must import, but {path} raised {error!r}") from error
    return module


def _signature(function: Any) -> str:
    try:
        return str(inspect.signature(function))
    except ValueError:
        return "(…)"


def _nearest(word: str, valid: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(valid), 1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
