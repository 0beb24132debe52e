r"""JSON Schema with a bound on the work of one check, and with the meaning that its patterns have in JavaScript.

    with limited_work():
        bounded(Draft202012Validator)(schema).is_valid(found)

Whatever the JSON is, a check ends after so many keywords (`TooMuchToCheck`), a pattern after so much time, and
`uniqueItems` looks at each item once. `$` is the end of a text and not a line break before it.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import regex

_MAX_KEYWORDS = 100_000
_MAX_SECONDS = 0.5  # of one pattern on one text
_left: ContextVar[list[int] | None] = ContextVar("keywords left", default=None)


class TooMuchToCheck(Exception):
    """The check would not end soon: the message says at what."""


@contextmanager
def limited_work() -> Iterator[None]:
    """The keywords that are checked in here are counted."""
    token = _left.set([_MAX_KEYWORDS])
    try:
        yield
    finally:
        _left.reset(token)


@lru_cache(maxsize=16)
def bounded(kind: Any) -> Any:
    """The class of validators with every keyword counted."""
    from jsonschema.validators import extend

    own = {"uniqueItems": _unique_items, "pattern": _pattern, "patternProperties": _pattern_properties,
           "additionalProperties": _additional_properties}  # fmt: skip
    known = {name: own.get(name, check) for name, check in kind.VALIDATORS.items()}
    return extend(kind, {name: _counted(check) for name, check in known.items()})


def _counted(check: Any) -> Any:
    def counted(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        left = _left.get()
        if left is not None:
            left[0] -= 1
            if left[0] < 0:
                raise TooMuchToCheck(f"more than {_MAX_KEYWORDS:,} keywords")
        yield from check(validator, value, instance, schema) or ()

    return counted


def _error(message: str) -> Any:
    from jsonschema.exceptions import ValidationError

    return ValidationError(message)


def _unique_items(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if wanted and validator.is_type(instance, "array") and len(set(map(_key, instance))) < len(instance):
        yield _error("the items are not unique")


def _key(value: Any) -> Any:
    """A key that is equal for equal JSON: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, bool):
        return "truth", value
    if isinstance(value, list):
        return "array", tuple(map(_key, value))
    if isinstance(value, dict):
        return "object", frozenset((name, _key(part)) for name, part in value.items())
    return value


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    if validator.is_type(instance, "string") and not _found(pattern, instance):
        yield _error(f"{instance[:100]!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Mapping[str, Any], instance: Any, schema: Any) -> Iterator[Any]:
    if validator.is_type(instance, "object"):
        for pattern, inner in patterns.items():
            for name, value in instance.items():
                if _found(pattern, name):
                    yield from validator.descend(value, inner, path=name, schema_path=pattern)


def _additional_properties(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if not validator.is_type(instance, "object"):
        return
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for name, value in instance.items():
        if name in known or any(_found(pattern, name) for pattern in patterns):
            continue
        if wanted is False:
            yield _error(f"Additional properties are not allowed, got {name[:100]!r}")
        elif validator.is_type(wanted, "object"):
            yield from validator.descend(value, wanted, path=name)


def _found(pattern: str, text: str) -> bool:
    try:
        return _compiled(pattern).search(text, timeout=_MAX_SECONDS) is not None
    except TimeoutError:
        raise TooMuchToCheck(f"the pattern {pattern!r}") from None


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> "regex.Pattern[str]":
    return regex.compile(
        re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]|(\$)", lambda m: r"\Z" if m[1] else m[0], pattern, flags=re.DOTALL)
    )
