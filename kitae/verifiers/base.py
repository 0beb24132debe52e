"""The verifier seam: a plain function from a response to a `Score`, run in a worker that can be killed."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from kitae.errors import VerifierError
from kitae.plugins import load_function
from kitae.types import Score

TimeoutMeaning = Literal["wrong", "error"]
ScoredPair = tuple[str, Any]
"""A response and the reference that gives it a 1: `("It is 12", "12")`."""


ScoreFunction = Callable[..., Score | float | Mapping[str, Any] | Awaitable[Any]]
"""`score(response: str, reference, context, **params)`: `score("The answer is 12", "12", {})` → `Score(1.0)`.

`params` are the recipe's `verifier.params`. A bare number or bool stands for `Score(float(…))`, and the dict
`{"score": 1.0, "style": 0.5}` for `Score(1.0, {"style": 0.5})`. Reference and context arrive as they survive a trip
through JSON: tuples as lists, keys of mappings as strings. What only waits for a server may be an `async def`.
"""

FunctionT = TypeVar("FunctionT", bound=ScoreFunction)


class Companion(Protocol):
    """A service that a verifier's checks use, started and closed with the pool."""

    async def start(self) -> None:
        """Raises `VerifierError` if the service cannot work."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Verifier:
    """A named score function.

    on_timeout: the verdict on a check that uses more processor time than its limit: "wrong" if only the response can be
    the cause (a symbolic bomb), "error" if the checker may be.
    example: a pair that scores 1, under any params if it is made from them. The template process checks it before the
    first job, which loads what the function needs and tests the params.
    gold: whether a reference that is a text or a number is itself a response that must score 1; a rule for responses is
    not.
    repeatable: see the decorator.
    prepare: makes the verifier for given params, and checks what it can before the first response; None if it does not
    depend on them.
    right_is_one: whether a right response scores 1, so that gold answers can be tested; scores of a reward model have
    no such meaning.
    companion: the service that its checks use; it runs as long as the pool.
    """

    name: str
    score: ScoreFunction
    on_timeout: TimeoutMeaning
    example: ScoredPair | Callable[..., ScoredPair] | None = None
    gold: bool = True
    repeatable: bool = False
    prepare: "Callable[[Mapping[str, Any]], Verifier] | None" = None
    right_is_one: bool = True
    companion: "Companion | None" = None

    def example_for(self, params: Mapping[str, Any]) -> ScoredPair | None:
        return self.example(**params) if callable(self.example) else self.example


def repeatable(function: FunctionT) -> FunctionT:
    """Declare that a check may be interrupted at any point and repeated from its start.

    The function must have no effects, and must keep nothing between calls that an exception could leave half done,
    except under `foreign` of `kitae.workers.interruptible_calls`. A check that takes longer than most is then deferred
    until the others have their scores, which costs a moment instead of a process.
    """
    function.repeatable = True  # type: ignore[attr-defined]
    return function


def user_verifier(name: str) -> Verifier:
    """The verifier `path/to/file.py:function`. The file is executed: call this where it may do so."""
    score = load_function(name, "verifier", ("response", "reference", "context"), VerifierError)
    return Verifier(name, score, on_timeout="error", repeatable=getattr(score, "repeatable", False))
