"""Arguments of tool calls against the JSON schemas of the tools.

Covered: type, enum, const, required, properties, additionalProperties, items, anyOf, oneOf. Not covered: everything
else, `$ref` above all; what a schema says in such words is taken as kept, and left to the tool itself.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kitae.types import Tool

_DEEPEST = 16  # levels of a schema that are looked at
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int, float),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (Mapping,),
    "null": (type(None),),
}
_SHOWN = 60  # characters of a value that a message repeats


def function_of(tool: Tool) -> Mapping[str, Any]:
    """The inside of a tool: `{"name": "add", "parameters": {…}}`."""
    inside = tool.get("function", tool)
    return inside if isinstance(inside, Mapping) else {}


def parameters_of(tool: Tool) -> Mapping[str, Any]:
    found = function_of(tool).get("parameters")
    return found if isinstance(found, Mapping) else {}


def misfit(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """What is wrong with arguments, in words: `"the argument 'a' must be of type integer, got 'x'"`; empty: nothing."""
    known = schema.get("properties")
    known = known if isinstance(known, Mapping) else {}
    required = schema.get("required")
    required = [name for name in required if isinstance(name, str)] if isinstance(required, list | tuple) else []
    if missing := [name for name in required if name not in arguments]:
        return f"the argument {missing[0]!r} is missing; there must be {_listed(required)}"
    others = schema.get("additionalProperties", not known)
    for name, value in arguments.items():
        if name not in known:
            if others is False or (known and not others):
                return f"there is no argument {show(name)}; there are {_listed(known)}"
        elif problem := _unfit(value, known[name], 0):
            return f"the argument {name!r} {problem}"
    return ""


def fitted(text: str, schema: object) -> Any:
    """A value that was written as plain text, as the type that its schema wants, where it can be read so."""
    types = _types(schema)
    if not types or "string" in types:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = {"True": True, "False": False, "None": None}.get(text.strip(), text)
    return value if any(_is(value, kind) for kind in types) else text


def show(value: object) -> str:
    """A value as a message can repeat it."""
    try:
        text = repr(value[: _SHOWN + 1] if isinstance(value, str) else value)
    except RecursionError:
        text = f"{type(value).__name__} that is nested too deeply"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _unfit(value: Any, schema: object, depth: int) -> str:
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return ""
    types = _types(schema)
    if types and not any(_is(value, kind) for kind in types):
        return f"must be of type {' or '.join(types)}, got {show(value)}"
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, list | tuple) and not any(_same(value, choice) for choice in choices):
        return f"must be one of {', '.join(map(show, choices[:20]))}, got {show(value)}"
    for word in ("anyOf", "oneOf"):
        ways = schema.get(word)
        if isinstance(ways, list | tuple) and ways:
            problems = [_unfit(value, way, depth + 1) for way in ways]
            if all(problems):
                return problems[0]
    return _unfit_inside(value, schema, depth)


def _unfit_inside(value: Any, schema: Mapping[str, Any], depth: int) -> str:
    """What is wrong with the items of a list, or the entries of an object."""
    if isinstance(value, list | tuple):
        for number, item in enumerate(value):
            if problem := _unfit(item, schema.get("items"), depth + 1):
                return f"has an item {number} that {problem}"
    if isinstance(value, Mapping):
        known = schema.get("properties")
        required = schema.get("required")
        for name in required if isinstance(required, list | tuple) else ():
            if name not in value:
                return f"must have {name!r}"
        for name, inner in value.items():
            if isinstance(known, Mapping) and (problem := _unfit(inner, known.get(name), depth + 1)):
                return f"has {show(name)}, which {problem}"
    return ""


def _types(schema: object) -> list[str]:
    """The types that a schema allows by name; none: it does not say."""
    declared = schema.get("type") if isinstance(schema, Mapping) else None
    names = [declared] if isinstance(declared, str) else declared if isinstance(declared, list | tuple) else []
    known = [name for name in names if name in _TYPES]
    if len(known) < len(names):
        return []
    if known and isinstance(schema, Mapping) and schema.get("nullable") and "null" not in known:
        known.append("null")
    return known


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind])


def _same(value: Any, choice: Any) -> bool:
    return bool(value == choice) and isinstance(value, bool) == isinstance(choice, bool)


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(repr(name) for name in list(names)[:20])
