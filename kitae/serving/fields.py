"""The body of a request, field by field: each is taken once, checked, and what nobody took is refused.

null means the same as a field that is not there, as OpenAI's clients have it.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from kitae.data.data_files import clip
from kitae.plugins import nearest
from kitae.serving.refusals import Refused


class Fields:
    """`fields = Fields({"n": 2}); fields.integer("n", 1, least=1); fields.finish()`."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._left = {name: value for name, value in body.items() if value is not None}
        self._known: set[str] = set()

    @staticmethod
    def read(body: bytes) -> "Fields":
        try:
            found = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise Refused(f"the body must be JSON: {clip(str(error))}") from None
        if not isinstance(found, dict):
            raise Refused(f"the body must be a JSON object, got {clip(repr(found))}")
        return Fields(found)

    def take(self, name: str) -> Any:
        """As it came; None: it is not there."""
        self._known.add(name)
        return self._left.pop(name, None)

    def integer(self, name: str, default: int, *, least: int, most: int | None = None) -> int:
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise Refused(f"{name} must be a whole number, got {clip(repr(value))}", param=name)
        return int(_within(name, value, least, most))

    def number(self, name: str, default: float, *, least: float, most: float | None = None) -> float:
        value = self.take(name)
        if value is None:
            return default
        if not is_number(value):
            raise Refused(f"{name} must be a number, got {clip(repr(value))}", param=name)
        return float(_within(name, value, least, most))

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise Refused(f"{name} must be true or false, got {clip(repr(value))}", param=name)
        return value

    def text(self, name: str) -> str:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise Refused(f"{name} must be a text, got {clip(repr(value))}", param=name)
        return value or ""

    def texts(self, name: str) -> tuple[str, ...]:
        """One text or a list of them; none of them empty."""
        value = self.take(name)
        found = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
            raise Refused(f"{name} must be a text or a list of texts, none of them empty, got {clip(repr(value))}",
                          param=name)  # fmt: skip
        return tuple(found)

    def section(self, name: str) -> "Fields":
        """An object in the object."""
        value = self.take(name)
        if value is not None and not isinstance(value, dict):
            raise Refused(f"{name} must be an object, got {clip(repr(value))}", param=name)
        return Fields(value or {})

    def without(self, name: str, neutral: Sequence[Any], why: str) -> None:
        """A field that this server cannot honour: only values that ask for nothing may come."""
        value = self.take(name)
        if value is not None and value not in neutral:
            shown = f", only {json.dumps(neutral[0])}" if neutral else ""
            raise Refused(f"{name} is not supported{shown}: {why}; got {clip(json.dumps(value))}", param=name)

    def ignore(self, *names: str) -> None:
        """Fields that change nothing about an answer."""
        for name in names:
            self.take(name)

    def finish(self) -> None:
        if self._left:
            name = next(iter(self._left))
            raise Refused(
                f"unknown field {name!r}{nearest(name, sorted(self._known))}", param=name, code="unknown_field"
            )


def is_number(value: Any) -> bool:
    """Whether it is one that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _within(name: str, value: float, least: float, most: float | None) -> float:
    if value < least or (most is not None and value > most):
        wanted = f"at least {least:g}" if most is None else f"from {least:g} to {most:g}"
        raise Refused(f"{name} must be {wanted}, got {value}", param=name)
    return value
