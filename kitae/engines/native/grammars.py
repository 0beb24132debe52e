"""Constraints of requests, enforced: which tokens can still lead to a text that matches.

A library (llguidance) compiles a constraint once and follows the text of each sequence; this part keeps what it
compiled, asks for the masks of all rows of a step together, in its threads and beside the model's pass, and decides
what ends an answer: a stop token may come where the text matches, and nowhere else.
"""

import importlib.util
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kitae.data.call_grammars import SPACES
from kitae.engines.constraint import Constraint
from kitae.errors import RequestError
from kitae.kept_sets import Words

_REMEMBERED = 64  # constraints that were compiled last
_LONGEST = 2**20  # characters of a constraint


@dataclass(slots=True, eq=False)
class Following:
    """A sequence on its way through a grammar. stops: the tokens that may end it where its text matches.

    over: nothing but a stop token can follow. fault: why no token can follow at all; the request fails.
    """

    grammars: "Grammars"
    matcher: Any
    stops: tuple[int, ...]
    fault: str = ""
    drafted: list[int] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return bool(self.matcher.is_stopped())

    def take(self, token: int) -> None:
        """The token that was drawn."""
        if token not in self.stops and not self.matcher.consume_token(token):
            self.fault = self.fault or f"its constraint cannot follow token {token}: {_said(self.matcher)}"

    def keep_valid(self, drafts: list[int]) -> list[int]:
        """The drafts before the first that the grammar does not allow."""
        valid = 0 if self.over else self.matcher.validate_tokens(drafts)
        return drafts[:valid]


class Grammars:
    """What one engine knows of constraints. `begin` may take a second at first; call it in a thread."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._compiled: OrderedDict[Constraint, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._words: Any = None  # the library's view of the tokenizer
        self._parallel: Any = None
        self._beside: ThreadPoolExecutor | None = None

    def begin(self, constraint: Constraint, stops: Sequence[int], prior: Sequence[int]) -> Following:
        """`RequestError` if the constraint means nothing, or prior tokens break it."""
        with self._lock:
            compiled = self._compiled.get(constraint)
            if compiled is None:
                compiled = self._compiled[constraint] = self._compile(constraint)
                if len(self._compiled) > _REMEMBERED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(constraint)
            found = Following(self, compiled.deep_copy(), tuple(stops))
        for token in prior:
            found.take(token)
        if found.fault:
            raise RequestError(found.fault)
        return found

    def masks(self, rows: Sequence[tuple[Following, int]]) -> Callable[[], list[Words]]:
        """Begin to find the masks of rows: each its sequence, and how many of its drafts come before; the rows of one
        sequence are neighbours. The function returned waits for them."""
        assert self._beside is not None, "somebody has begun"
        return self._beside.submit(self._masks, list(rows)).result

    def _masks(self, rows: Sequence[tuple[Following, int]]) -> list[Words]:
        from llguidance import numpy as library

        bits = np.zeros((len(rows), -(-self._vocabulary // 32)), np.int32)
        firsts = [i for i, (_, ahead) in enumerate(rows) if not ahead]
        spans = list(zip(firsts, [*firsts[1:], len(rows)], strict=True))
        alone = [(rows[a][0].matcher, a) for a, b in spans if b == a + 1]
        drafts = [(rows[a][0].matcher, a, rows[a][0].drafted[: b - a - 1]) for a, b in spans if b > a + 1]
        if alone:
            library.fill_next_token_bitmask_par(self._parallel, alone, bits)
        if drafts:
            library.fill_next_token_bitmask_par_with_draft_tokens(self._parallel, drafts, bits)
        found = list(bits.view(np.uint32))
        for row, (following, _) in zip(found, rows, strict=True):
            self._end(row, following)
        return found

    def _end(self, row: npt.NDArray[np.uint32], following: Following) -> None:
        """The library allows its own end of a text where the text matches; here that is the request's stop tokens."""
        ends = bool(_read(row, self._words.eos_token))
        for token in self._words.eos_tokens:
            row[token // 32] &= ~(np.uint32(1) << np.uint32(token % 32))
        for token in following.stops if ends else ():
            row[token // 32] |= np.uint32(1) << np.uint32(token % 32)
        if not row.any():
            if not ends:
                following.fault = f"no token can continue its constraint: {_said(following.matcher)}"
            row[:] = np.uint32(0xFFFFFFFF)  # something must be drawn before it ends

    def _compile(self, constraint: Constraint) -> Any:
        library = _library()
        if len(constraint.text) > _LONGEST:
            raise RequestError(f"a constraint must have at most {_LONGEST} characters, got {len(constraint.text)}")
        if self._words is None:
            self._words = _words(library, self._tokenizer, self._vocabulary)
            self._parallel, self._beside = library.LLExecutor(), ThreadPoolExecutor(1, "kitae-masks")
        try:
            matcher = library.LLMatcher(self._words, _grammar(library, constraint), log_level=0)
        except ValueError as error:
            raise RequestError(f"constraint {constraint.kind}: {error}") from None
        if matcher.is_error():
            raise RequestError(f"constraint {constraint.kind}: {_said(matcher)}")
        return matcher


def can_enforce() -> bool:
    """Whether the library is installed."""
    return importlib.util.find_spec("llguidance") is not None


def _grammar(library: Any, constraint: Constraint) -> str:
    match constraint.kind:
        case "json_schema":
            return str(library.LLMatcher.grammar_from_json_schema(constraint.text, overrides=SPACES))
        case "regex":
            return str(library.LLMatcher.grammar_from_regex(constraint.text))
        case "choice":
            texts = " | ".join(json.dumps(text) for text in json.loads(constraint.text))
            return str(library.LLMatcher.grammar_from_lark(f"start: {texts}"))
        case "grammar":
            return str(library.LLMatcher.grammar_from_lark(constraint.text))


def _words(library: Any, tokenizer: Any, vocabulary: int) -> Any:
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(tokenizer, n_vocab=vocabulary)
    except Exception as error:
        kind = type(tokenizer).__name__
        raise RequestError(f"constraints need a fast tokenizer with an end token, got {kind}: {error}") from None


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise RequestError("constraints on answers need llguidance: pip install 'kitae[constraints]'") from None
    return llguidance


def _read(row: npt.NDArray[np.uint32], token: int) -> int:
    return int(row[token // 32] >> np.uint32(token % 32)) & 1


def _said(matcher: Any) -> str:
    """The first line of what the library says."""
    return next(iter(str(matcher.get_error() or matcher.stop_reason()).splitlines()), "")
