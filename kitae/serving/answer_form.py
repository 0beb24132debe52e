"""The form that a client asks an answer to have, as a constraint on the request to the engine.

All dialects of HTTP name it by these functions, so that a schema means the same whichever field it came by.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kitae.data import call_grammars
from kitae.data.chat import Chat
from kitae.data.data_files import clip
from kitae.engines.constraint import Constraint
from kitae.serving.refusals import Refused
from kitae.types import Tool


def of_tool_choice(chat: Chat, tools: Sequence[Tool], *, single: bool) -> Constraint | None:
    """A call of one of these tools, or of several, and nothing else, where the engine can see to that; None: nothing
    here says how the model writes them."""
    grammar = call_grammars.of_calls(chat.tokenizer, tools, single=single)
    return None if grammar is None else Constraint("grammar", grammar, strict=False)


def after_thoughts(chat: Chat, constraint: Constraint | None) -> Constraint | None:
    """A schema holds for what comes after the thoughts that the chat template has begun."""
    if constraint is None or constraint.kind != "json_schema":
        return constraint
    grammar = call_grammars.of_json(chat.tokenizer, json.loads(constraint.text))
    return constraint if grammar is None else Constraint("grammar", grammar)


def of_response_format(given: Any, field: str = "response_format") -> Constraint | None:
    """`{"type": "json_object"}`, or `{"type": "json_schema", "json_schema": {"schema": …}}`; None or text: any text."""
    match given:
        case None | {"type": "text" | None}:
            return None
        case {"type": "json_object"}:
            return Constraint.schema({"type": "object"})
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}} | {
            "type": "json_schema",
            "schema": dict(schema),
        }:
            return Constraint.schema(schema)
    raise Refused(
        f"{field} must be of type 'text', 'json_object' or 'json_schema' with a schema, got {clip(repr(given))}",
        param=field,
    )


def of_guide(field: str, given: Any) -> Constraint | None:
    """The value of a field of `GUIDES`: a schema, as JSON or its text; a pattern; texts to choose from; a grammar."""
    match field, given:
        case _, None:
            return None
        case "guided_json", dict():
            return Constraint.schema(given)
        case "guided_json", str():
            try:
                schema = json.loads(given)
            except ValueError as error:
                raise Refused(f"guided_json must be a JSON schema: {error}", param=field) from None
            return of_guide(field, schema)
        case "guided_choice", [_, *_] if all(isinstance(text, str) and text for text in given):
            return Constraint.choice(given)
        case "guided_regex", str():
            return Constraint("regex", given)
        case "guided_grammar", str():
            return Constraint("grammar", given)
    raise Refused(f"{field} must be {GUIDES[field]}, got {clip(repr(given))}", param=field)


GUIDES: Mapping[str, str] = {
    "guided_json": "a JSON schema",
    "guided_regex": "a regular expression",
    "guided_choice": "a list of texts that are not empty",
    "guided_grammar": "a grammar in Lark's notation",
}
"""Fields that other servers have for the same thing, and what each must be."""
