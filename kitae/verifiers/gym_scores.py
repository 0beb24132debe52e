"""The `gym` verifier: the scorer of a `reasoning-gym` data set, applied to the final answer of a response.

Some of those scorers call `eval`, or sympy's parser, which does, on the answer, so a model could run code with it. If a
data set's module contains such a call, it only gets answers that are a plain literal or plain arithmetic, by a list of
allowed nodes; everything else scores 0. Not covered: a scorer that evaluates through another module (none does in
version 0.1.25), and one that does not end, which the worker's deadline stops.
"""

import ast
import inspect
import re
import sys
import warnings
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from kitae.data.gym_prompts import Dataset, GymEntry, Origin, gym_dataset
from kitae.errors import DataError
from kitae.types import Score
from kitae.verifiers.plain_text import inside_tag

_SYMPY_RE = re.compile(r"\bsympy\b.*\b(?:parse_expr|sympify|parse_latex)\s*\(", re.DOTALL)
_EVAL_RE = re.compile(r"(?<![\w.])(?:eval|exec)\s*\(")
_FUNCTIONS = frozenset(("sin", "cos", "tan", "sec", "csc", "cot", "sinh", "cosh", "tanh", "exp", "log", "ln", "sqrt"))
_ARITHMETIC = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Call, ast.BinOp, ast.UnaryOp),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.BitXor, ast.UAdd, ast.USub),
)
_LITERAL = (  # names are JSON's true and null
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.List, ast.Tuple, ast.Set, ast.Dict),
    *(ast.UnaryOp, ast.UAdd, ast.USub),
)
_MAX_EVALUATED = 5_000  # characters


def gym(response: str, reference: Any, context: Mapping[str, Any], *, tag: str = "answer") -> Score:
    """What the data set itself says of the answer, from 0 to 1; some give a hundredth for trying.

    The answer is the inside of the last `<answer>` tag, or the whole response without one. `context["gym"]` is the
    entry's `Origin`, as `kitae.data.gym_prompts` writes it. The reference must be the entry's own answer:
    another one comes from another version of the package, and is an error.
    """
    try:
        origin = Origin.of(context)
        dataset, entry = gym_dataset(origin.dataset, origin.config, origin.seed), origin.entry()
    except DataError as error:
        return Score.error(str(error))
    if entry["answer"] != reference:
        return Score.error(
            f"entry {origin.index} of {origin.dataset!r} has another answer here: is reasoning-gym the same version?"
        )
    answer = inside_tag(response, tag)
    answer = response.strip() if answer is None else answer
    if answer != reference and not _harmless(answer, _evaluators(type(dataset).__module__)):
        return Score(0.0, detail="neither a literal nor arithmetic, which this data set would evaluate")
    value = _scored(dataset, entry, answer)
    if isinstance(value, float):
        return Score(value)
    probe = _scored(dataset, entry, reference if isinstance(reference, str) else "")
    if isinstance(probe, float):  # the scorer is sound: it is the answer that it cannot read
        return Score(0.0, detail=f"the scorer of {origin.dataset!r} cannot read it: {value}")
    return Score.error(f"the scorer of {origin.dataset!r} fails on its own answer: {probe}")


def _scored(dataset: Dataset, entry: GymEntry, answer: str) -> float | str:
    """The value of an answer, or what its scorer raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler, about the answer as a piece of Python
        try:
            return float(dataset.score_answer(answer, entry))
        except Exception as error:  # any: it is foreign code
            return repr(error)[:200]


@lru_cache(maxsize=256)
def _evaluators(module: str) -> frozenset[str]:
    """Which evaluators the module of a data set mentions: "eval", "sympy"; both where its source cannot be read."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, KeyError):
        return frozenset({"eval", "sympy"})
    found = {"eval": _EVAL_RE, "sympy": _SYMPY_RE}
    return frozenset(name for name, pattern in found.items() if pattern.search(source))


def _harmless(answer: str, evaluators: frozenset[str]) -> bool:
    if not evaluators:
        return True
    if len(answer) > _MAX_EVALUATED:
        return False
    try:
        tree = _parse(answer.strip())
    except (RecursionError, MemoryError):  # nested too deeply for a tree, but perhaps not for an evaluator
        return False
    if "sympy" in evaluators:  # it rewrites its text first, so what Python cannot parse may still run
        return tree is not None and all(map(_is_arithmetic, ast.walk(tree)))
    return tree is None or all(isinstance(node, _LITERAL) for node in ast.walk(tree))


def _parse(answer: str) -> ast.Expression | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(answer, mode="eval")
        except (SyntaxError, ValueError):
            return None


def _is_arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
    if isinstance(node, ast.Name):
        return node.id in _FUNCTIONS or node.id == "pi" or len(node.id) == 1
    return isinstance(node, _ARITHMETIC)
