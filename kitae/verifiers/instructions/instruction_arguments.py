"""The keyword arguments of a check as given in the data, validated against the check's signature."""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, NewType

Check = Callable[..., bool]
"""`check(response, **arguments)`: whether the response follows the instruction. It raises only `BadArgument`."""

Relation = Literal["less than", "at least"]
Count = NewType("Count", int)
Position = NewType("Position", int)
Letter = NewType("Letter", str)


class BadArgument(ValueError):
    """An instruction cannot be checked: the data is at fault, not the response."""


def bind(check: Check, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments to call `check` with. Arguments that are None count as absent, as in the public data."""
    present = {name: value for name, value in given.items() if value is not None}
    wanted = _parameters(check)
    if unknown := sorted(present.keys() - wanted.keys()):
        raise BadArgument(f"takes {', '.join(wanted) or 'no arguments'}, got {', '.join(unknown)}")
    if missing := [name for name in wanted if name not in present]:
        raise BadArgument(f"needs {', '.join(missing)}")
    return {name: _convert(name, present[name], kind) for name, kind in wanted.items()}


@cache
def _parameters(check: Check) -> dict[str, Any]:
    parameters = list(inspect.signature(check).parameters.values())
    return {parameter.name: parameter.annotation for parameter in parameters[1:]}


def _convert(name: str, value: Any, kind: Any) -> Any:
    test, rule = _KINDS[kind]
    if not test(value):
        raise BadArgument(f"{name} must be {rule}, got {str(value)[:100]!r}")
    return int(value) if kind in (Count, Position) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def _is_count(value: Any) -> bool:
    return _is_number(value) and value == int(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


_KINDS: dict[Any, tuple[Callable[[Any], bool], str]] = {
    Count: (_is_count, "a whole number of at least 0"),
    Position: (lambda value: _is_count(value) and value >= 1, "a whole number of at least 1"),
    float: (_is_number, "a number of at least 0"),
    str: (_is_text, "a text that is not empty"),
    Letter: (lambda value: _is_text(value) and len(value) == 1, "one character"),
    list[str]: (
        lambda value: isinstance(value, list) and bool(value) and all(map(_is_text, value)),
        "a list of texts that is not empty",
    ),
    Relation: (lambda value: value in ("less than", "at least"), "'less than' or 'at least'"),
}
