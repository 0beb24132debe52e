r"""The `math` verifier: is the final answer of a response the same mathematics as the reference?

The answer is the last \boxed{} of the response; without one, what "the answer is" introduces, or the response itself
where it is a bare expression, or else what math-verify finds in the prose. Comparison is symbolic (math-verify, on
sympy), with floats equal to six decimals. There is no time limit in here: the worker's deadline is the only one, and
some expressions (9^9^9) need it.
"""

import logging
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from kitae.types import Score
from kitae.verifiers.text import marked_answers

_BRACE_RE = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_DELIMITER_RE = re.compile(r"\$|\\\(|\\\[")
_COMMAND_RE = re.compile(r"\\[A-Za-z]+(?:\{[A-Za-z ]*\})?")
_WORD_RE = re.compile(
    r"(?<![^\W\d_])(?!(?:sqrt|sin|cos|tan|log|exp)(?![^\W\d_]))[^\W\d_]{3,}"
    r"|[\u2e80-\ud7ff]"  # Chinese, Japanese and Korean, where one letter is a word
)
_MAX_ANSWER = 1_000  # characters; what is longer is no answer, and slow to parse
_TAIL = 4_000  # characters at the end of a response in which prose is searched for an answer


def math(response: str, reference: Any, context: Mapping[str, Any]) -> Score:
    """1 where the final answer equals the reference, which may be bare ("3/4"), in $…$ or in a \\boxed{}."""
    gold = str(reference).strip()
    want = _parse_reference(gold)
    if not want:
        return Score.error(f"the reference of 'math' must be an expression, got {gold[:100]!r}")
    if response.strip() == gold:
        return Score(1.0)
    got = _parse(_final_answer(response))
    if not got:
        return Score(0.0, detail="no answer in the response")
    from math_verify import verify

    return Score(float(verify(list(want), list(got), timeout_seconds=None)))


def last_boxed(text: str) -> str | None:
    r"""What is in the last complete \boxed{}: `"\boxed{1}, so \boxed{\frac{1}{2}}"` → `"\frac{1}{2}"`."""
    opened: list[tuple[int, bool]] = []
    start, end = -1, -1
    for brace in _BRACE_RE.finditer(text):
        if brace[0] == "}":
            inside, boxed = opened.pop() if opened else (-1, False)
            if boxed and inside > start:
                start, end = inside, brace.start()
        elif brace[0] == "{" or brace[0].startswith(r"\boxed"):
            opened.append((brace.end(), brace[0] != "{"))
    return text[start:end] if end >= 0 else None


def _final_answer(response: str) -> str:
    """The part of the response to parse, boxed where it is known to be one expression and nothing else."""
    boxed = last_boxed(response)
    if boxed is not None:
        return _box(boxed)
    tail = response[-_TAIL:].strip()
    marked = next(marked_answers(tail), "")
    return next((_box(text) for text in (marked, tail) if _is_bare(text)), tail)


def _is_bare(text: str) -> bool:
    """Is this an expression, rather than prose or LaTeX that math-verify can find by its delimiters?"""
    return bool(text) and not _DELIMITER_RE.search(text) and not _WORD_RE.search(_COMMAND_RE.sub(" ", text))


def _box(text: str) -> str:
    plain = text.strip().rstrip("*.").strip("* ")  # without Markdown's asterisks and the full stop
    return rf"\boxed{{{plain.replace('**', '^')}}}" if len(plain) <= _MAX_ANSWER else ""


@lru_cache(maxsize=256)
def _parse_reference(gold: str) -> tuple[Any, ...]:
    boxed = last_boxed(gold)
    if boxed is None and _DELIMITER_RE.search(gold):
        return _parse(gold)
    return _parse(_box(next(marked_answers(gold), gold) if boxed is None else boxed))


def _parse(text: str) -> tuple[Any, ...]:
    from math_verify import parse  # slow to import (sympy), and only the workers need it

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off
    return tuple(parse(text, parsing_timeout=None))
