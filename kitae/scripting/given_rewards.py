"""Rewards that were given from Python, as settings of the verifier and copies for its workers."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kitae.errors import ConfigError
from kitae.verifiers.given_functions import GivenFunction, GivenName, given, given_name, label_of, names_in

Reward = Callable[..., Any] | str | tuple[Callable[..., Any] | str, float] | Mapping[str, Any]
"""A function, the name of a verifier or `file.py:function`; either with a weight; or a part of `compose` in full."""


@dataclass(frozen=True, slots=True)
class GivenRewards:
    """`GivenRewards({"name": "train.py:accuracy@3f9c2e71a0b4"}, (GivenFunction(…),))`: a section, and what it needs."""

    verifier: Mapping[str, Any]
    functions: tuple[GivenFunction, ...]

    @property
    def in_trl(self) -> bool:
        """Whether a function is called as TRL calls it."""
        parts = self.verifier.get("params", {}).get("parts", [self.verifier])
        return any(part["name"] == "trl" for part in parts)


def read_rewards(reward: Reward | Sequence[Reward]) -> GivenRewards:
    """One reward as it is; several as a weighted sum, in which each is logged under its name."""
    if isinstance(reward, str):
        return GivenRewards({"name": reward}, ())
    if callable(reward):
        if as_in_trl(reward):
            return _trl([reward], [1.0])
        _check(reward)
        found = given(reward)
        return GivenRewards({"name": str(found.name)}, (found,))
    several = [reward] if isinstance(reward, Mapping) or _is_weighted(reward) else list(_sequence(reward))
    weighted: list[tuple[Any, Any]] = [each if _is_weighted(each) else (each, 1.0) for each in several]  # type: ignore[misc]
    if all(callable(each) and as_in_trl(each) for each, _ in weighted):
        return _trl([each for each, _ in weighted], [float(weight) for _, weight in weighted])
    parts, functions, labels = list[dict[str, Any]](), list[GivenFunction](), set[str]()
    for each in several:
        part, function = _part(each)
        functions += [function] if function else []
        label = part.setdefault("label", _label(part["name"]))
        number = 2
        while part["label"] in labels:
            part["label"], number = f"{label}_{number}", number + 1
        labels.add(part["label"])
        parts.append(part)
    return GivenRewards({"name": "compose", "params": {"parts": parts}}, tuple(functions))


def as_in_trl(function: Callable[..., Any]) -> bool:
    """Whether a function takes lists of completions, as TRL calls it."""
    try:
        return "completions" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _trl(functions: Sequence[Callable[..., Any]], weights: Sequence[float]) -> GivenRewards:
    found = tuple(map(given, functions))
    params = {"function": [str(each.name) for each in found], "weights": list(weights)}
    return GivenRewards({"name": "trl", "params": params}, found)


def given_again(
    verifier: str, params: Mapping[str, Any], reward: Reward | Sequence[Reward]
) -> tuple[GivenFunction, ...]:
    """The functions of a run, given again to go on with it: each must be what the run began with. They keep the names
    that the run has for them."""
    again = read_rewards(reward).functions
    by_mark = {each.name.mark: each for each in again}
    found = list[GivenFunction]()
    for name in names_in(verifier, params):
        known = given_name(name)
        assert known is not None
        if known.mark not in by_mark:
            raise ConfigError(_other(known, again))
        found.append(GivenFunction(known, by_mark[known.mark].copy))
    if not found:
        raise ConfigError(
            f"reward is for a run whose rewards were functions given from Python, got one with {verifier!r}"
        )
    return tuple(found)


def _other(known: GivenName, again: Sequence[GivenFunction]) -> str:
    if any(each.name.label == known.label for each in again):
        return (
            f"the reward {known.label!r} is not what the run began with: its code, or a value that it captures, was "
            "changed since (or this is another version of Python). Restore it, or begin a new run from this one's model"
        )
    got = ", ".join(repr(each.name.label) for each in again) or "none"
    return f"reward must have {known.label!r}, with which the run began, got {got}"


def _sequence(reward: Any) -> Sequence[Any]:
    if not isinstance(reward, Sequence) or not reward:
        raise ConfigError(
            "reward must be a function, the name of a verifier, or a list of these, each alone or with a weight, got "
            f"{reward!r}"
        )
    return reward


def _is_weighted(reward: Any) -> bool:
    return isinstance(reward, tuple) and len(reward) == 2 and _is_number(reward[1])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _part(each: Any) -> tuple[dict[str, Any], GivenFunction | None]:
    if isinstance(each, Mapping):
        name = each.get("name")
        made, function = _part(name) if callable(name) else (dict[str, Any](), None)
        return {**each, **made}, function
    if _is_weighted(each):
        part, function = _part(each[0])
        return {**part, "weight": float(each[1])}, function
    if isinstance(each, str):
        return {"name": each}, None
    if not callable(each):
        raise ConfigError(
            f"a reward must be a function or the name of a verifier, alone or with a weight, got {each!r}"
        )
    function = given(each)
    if as_in_trl(each):
        return {"name": "trl", "label": function.name.label, "params": {"function": str(function.name)}}, function
    _check(each)
    return {"name": str(function.name)}, function


def _label(name: str) -> str:
    known = given_name(name)
    return known.label if known is not None else label_of(name.rpartition(":")[2])


def _check(function: Callable[..., Any]) -> None:
    from kitae.errors import VerifierError
    from kitae.verifiers.base import verifier_of

    try:
        verifier_of(getattr(function, "__name__", type(function).__name__), function)
    except VerifierError as error:
        raise ConfigError(str(error)) from None
