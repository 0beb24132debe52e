"""The verifier seam: a plain function from a response to a `Score`, run in a worker that can be killed."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

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
    """Something that a verifier's checks wait for, started and closed with the pool."""

    async def start(self) -> None:
        """`VerifierError` where it cannot serve."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Verifier:
    """A named score function.

    `on_timeout` says what it means when a check uses more processor time than its limit: "wrong" where only the
    response can be to blame (a symbolic bomb), "error" where the checker may be. `example` scores 1, for any params
    where it is made from them: the template checks it before the first job, which loads what the function needs and
    proves the params. `gold` says that a reference which is text or a number is itself a response that must score 1; a
    rule for responses is none. `repeatable`: see the decorator. `prepare` makes the verifier for given params, and
    checks what can be checked before the first response; for a verifier that does not depend on them it is None.
    `right_is_one`: a right response scores 1, so gold answers can be tried; the numbers of a reward model mean nothing
    by themselves. `companion` is what its checks ask; it runs as long as the pool does.
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
    """Declare that a check may be interrupted at any point and made again from its start.

    The function has no effects, and keeps nothing between calls that an exception could leave half done, but where
    `foreign` of `kitae.workers.interruptible_calls` says so. A check that takes longer than most is then put off
    until the others have their scores, at the cost of a moment instead of a process.
    """
    function.repeatable = True  # type: ignore[attr-defined]
    return function
