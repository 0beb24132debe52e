"""What the text of a response must be, as a request says it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

ConstraintKind = Literal["json_schema", "regex", "grammar", "choice"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a whole response must match, up to its stop token: `Constraint("regex", "[0-9]+")`.

    text: a JSON schema as JSON, a regular expression, a grammar in Lark's notation, or a JSON list of the texts to
    choose from. Kitae's own engines enforce it: only tokens that can still lead to a match are drawn. strict: an engine
    that cannot enforce it refuses the request; otherwise it samples freely, and the caller looks at the answer.
    """

    kind: ConstraintKind
    text: str
    strict: bool = True

    @staticmethod
    def schema(schema: Mapping[str, Any] | bool) -> "Constraint":
        """JSON that fits a schema; `{}` is any JSON."""
        return Constraint("json_schema", json.dumps(schema))

    @staticmethod
    def choice(texts: Sequence[str]) -> "Constraint":
        return Constraint("choice", json.dumps(list(texts)))
