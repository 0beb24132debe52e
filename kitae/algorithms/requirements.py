"""What a stage function declares: what it needs of a run, how it combines with others, which settings it refuses.

A function declares it with a decorator, a user's own function too:

    from kitae.algorithms.requirements import needs

    @needs("tokens", "values")
    def advantage(sequence, *, sharpness=1.0): ...

The rest of a run reads these declarations and never compares the name of a function.
"""

from collections.abc import Callable, Iterator, Mapping
from enum import Flag, auto
from functools import partial
from typing import Any, TypeVar

from kitae.errors import ConfigError
from kitae.plugins import nearest

F = TypeVar("F", bound=Callable[..., Any])
Rule = Callable[[Mapping[str, Any]], Iterator[str]]
"""Settings of a function → a complaint for each contradiction between them, which begins with the name of a setting."""


class Trait(Flag):
    """Needs come first; the others only forbid or permit combinations."""

    VALUES = auto()  # a critic's value of each loss token
    GREEDY = auto()  # the greedy response to the same prompt
    REFERENCE = auto()  # log-probs of the reference policy
    TEACHER = auto()  # log-probs of a teacher
    DIVERGENCE = auto()  # how far policy and teacher are apart at each token, over the whole vocabulary
    TOKENS = auto()  # an advantage on the token level: it gets one sequence, not a group
    TURNS = auto()  # an advantage on the turn level: one number for each turn of a sequence, or of a group
    MOVING = auto()  # the moving mean of the rewards of a role
    COVARIANCE = auto()  # the rank of each token by covariance

    PEERS = auto()  # compares samples of one prompt with each other
    BLIND = auto()  # an advantage that reads no shaped reward
    POSITIVE = auto()  # an advantage for rewards that are not negative
    SEQUENCE = auto()  # a ratio that is one number for the whole sequence
    MEAN = auto()  # of which the logarithm is a mean over its tokens
    SHARED = auto()  # a ratio or gate whose gradient is one for all tokens of a sequence
    BAND = auto()  # a gate that keeps the ratio between 1 - clip_low and 1 + clip_high
    SLOPE = auto()  # a gate whose gradient goes through the ratio
    SINGLE = auto()  # a gate that judges single tokens
    RATIOLESS = auto()  # a gate that reads no ratio
    UNWEIGHTED = auto()  # a gate whose gradient carries no ratio
    MISMATCH = auto()  # a correction that contains π / μ
    LIVE = auto()  # a correction that contains π_θ / π_old
    NEUTRAL = auto()  # does nothing, so it is combined with nothing
    COUNTS_TOKENS = auto()  # an aggregation in which a longer sequence weighs more
    IN_REWARD = auto()  # a KL estimator that gives the right gradient through the reward, and none in the loss


NEEDS = {
    "values": Trait.VALUES,
    "greedy": Trait.GREEDY,
    "reference": Trait.REFERENCE,
    "teacher": Trait.TEACHER,
    "divergence": Trait.DIVERGENCE,
    "tokens": Trait.TOKENS,
    "turns": Trait.TURNS,
    "covariance": Trait.COVARIANCE,
    "group": Trait.PEERS,
}
"""What `needs` takes: values of a critic; the reward of the greedy response; log-probs of the reference policy;
log-probs of a teacher; the divergence from a teacher; one sequence in place of a group; the turns of a group, or with
"tokens" those of one sequence; the rank of each token by covariance; at least two samples of each prompt."""


def needs(*names: str) -> Callable[[F], F]:
    """Declare what a stage function reads beside what every function of its stage gets."""
    found = Trait(0)
    for name in names:
        if name not in NEEDS:
            raise ConfigError(f"a stage function may need {', '.join(NEEDS)}, got {name!r}{nearest(name, NEEDS)}")
        found |= NEEDS[name]
    return has(found)


def has(traits: Trait) -> Callable[[F], F]:
    def declare(function: F) -> F:
        function.__dict__["traits"] = traits
        return function

    return declare


def refuses(rule: Rule) -> Callable[[F], F]:
    """Declare which settings of a stage function contradict each other, where a limit for each alone cannot say it."""

    def declare(function: F) -> F:
        function.__dict__["rule"] = rule
        return function

    return declare


def traits_of(function: Callable[..., Any]) -> Trait:
    found: Trait = _declared(function, "traits", Trait(0))
    return found


def rule_of(function: Callable[..., Any]) -> Rule | None:
    found: Rule | None = _declared(function, "rule", None)
    return found


def _declared(function: Callable[..., Any], what: str, default: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return vars(function).get(what, default) if hasattr(function, "__dict__") else default
