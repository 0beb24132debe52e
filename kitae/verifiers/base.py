"""The verifier seam: a plain function from a response to a `Score`, run in a worker that can be killed."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from kitae.types import Score

TimeoutMeaning = Literal["wrong", "error"]


ScoreFunction = Callable[..., Score | float | Awaitable[Score]]
"""`score(response: str, reference, context, **params)`: `score("The answer is 12", "12", {})` → `Score(1.0)`.

`params` are the recipe's `verifier.params`. A bare number or bool stands for `Score(float(…))`. Reference and context
arrive as they survive a trip through JSON: tuples as lists, keys of mappings as strings. What only waits for a server
may be an `async def`.
"""


class VerifierWarning(UserWarning):
    """What a verifier says while it is loaded or warmed up; the pool shows it to the user."""


@dataclass(frozen=True, slots=True)
class Verifier:
    """A named score function.

    `on_timeout` says what a check that outlasts its limit means: "wrong" where only the response can be to blame
    (a symbolic bomb), "error" where the checker may be. `example` is a (response, reference) pair that scores 1: a
    worker checks it before its first job, which loads what the function needs and proves the params. `gold` says that a
    reference which is text or a number is itself a response that must score 1; a rule for responses is none.
    """

    name: str
    score: ScoreFunction
    on_timeout: TimeoutMeaning
    example: tuple[str, Any] | None = None
    gold: bool = True
