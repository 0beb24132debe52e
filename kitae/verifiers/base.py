"""The verifier seam: a plain function from a response to a `Score`, run in a worker that can be killed."""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from kitae.errors import VerifierError
from kitae.plugins import load_function
from kitae.types import Score

TimeoutMeaning = Literal["wrong", "error"]
ScoredPair = tuple[str, Any]
"""A response and the reference that gives it a 1: `("It is 12", "12")`."""


ScoreFunction = Callable[..., Score | float | Mapping[str, Any] | Sequence[Any] | Awaitable[Any] | None]
"""`score(response: str, reference, context, **params)`: `score("The answer is 12", "12", {})` → `Score(1.0)`.

`params` are the recipe's `verifier.params`. A function may take fewer (`taking_three` has the rule). A
bare number or bool stands for `Score(float(…))`, and the dict `{"score": 1.0, "style": 0.5}` for
`Score(1.0, {"style": 0.5})`. None says that the function does not apply to this answer (`kitae.verifiers.score_calls`).
Reference and context arrive as they survive a trip through JSON: tuples as lists, keys of mappings as strings. What
waits for a server may be an `async def`. One that is marked `batched` gets lists, and returns a list.
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
    repeatable, batched: see the decorators.
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
    batched: bool = False

    @property
    def grouped(self) -> bool:
        """Whether the answers to a prompt are best brought together: to see them all, or to wait for all at once."""
        return self.batched or inspect.iscoroutinefunction(inspect.unwrap(self.score))

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


def batched(function: FunctionT) -> FunctionT:
    """Declare that a function judges all answers to a prompt in one call: `score(responses, references, contexts)`.

    The three are lists of one length, and so is what it returns. While a run trains, a call has the whole group of a
    prompt; elsewhere a call may have a single answer.
    """
    function.batched = True  # type: ignore[attr-defined]
    return function


def user_verifier(name: str) -> Verifier:
    """The verifier `path/to/file.py:function`. The file is executed: call this where it may do so."""
    return verifier_of(name, load_function(name, "verifier", ("response",), VerifierError))


def verifier_of(name: str, function: Callable[..., Any]) -> Verifier:
    """A function of a user's own as a verifier. Raises `VerifierError` where it cannot be called as one."""
    return Verifier(
        name,
        taking_three(name, function),
        on_timeout="error",
        repeatable=getattr(function, "repeatable", False),
        batched=getattr(function, "batched", False),
    )


def taking_three(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one of (response, reference, context), of which it may take fewer.

    It gets them by position, and an argument that is named like one of them gets that one. An argument of another name
    that has a default is an option: `lambda response, limit=80: …` keeps its limit.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        raise VerifierError(f"verifier {name!r} must have a signature, (response, reference, context)") from None
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return function
    taken = list[int]()
    for place, p in enumerate(parameters[: len(_THREE)]):
        if p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            break
        if (called := p.name.removesuffix("s")) not in _THREE and p.default is not p.empty:
            break
        taken.append(_THREE.index(called) if called in _THREE else place)
    if not taken:
        got = inspect.signature(function)
        raise VerifierError(f"verifier {name!r} must take ({', '.join(_THREE)}) or some of them, got {got}")
    if taken == [0, 1, 2]:
        return function
    if inspect.iscoroutinefunction(function):

        async def waiting(*given: Any, **params: Any) -> Any:
            return await function(*(given[place] for place in taken), **params)

        return _signed(waiting, parameters[len(taken) :])

    def scoring(*given: Any, **params: Any) -> Any:
        return function(*(given[place] for place in taken), **params)

    return _signed(scoring, parameters[len(taken) :])


_THREE = ("response", "reference", "context")


def _signed(function: Callable[..., Any], options: list[inspect.Parameter]) -> Callable[..., Any]:
    """With the signature from which params are checked."""
    given = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in _THREE]
    function.__signature__ = inspect.Signature([*given, *options])  # type: ignore[attr-defined]
    return function
