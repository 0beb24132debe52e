"""Chat messages as data files have them, checked: roles, texts, calls of tools and their results."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kitae.data.data_files import clip
from kitae.data.pictures import IMAGES, read_part
from kitae.errors import DataError
from kitae.plugins import nearest
from kitae.types import Message, Tool, ToolCall

SYSTEM = ("system", "developer")
ROLES = (*SYSTEM, "user", "assistant", "tool")


def read_messages(turns: object) -> tuple[Message, ...]:
    """`[{"role": "user", "content": "Hi"}, …]` as messages; at least one."""
    if not isinstance(turns, list | tuple) or not turns:
        raise DataError(f"a conversation must be a list of messages, got {clip(repr(turns))}")
    return tuple(map(read_message, turns))


def read_message(turn: object) -> Message:
    """One message in OpenAI's shape; an assistant's may call tools and say nothing."""
    if not isinstance(turn, Mapping):
        raise DataError(f"a message must be an object with role and content, got {clip(repr(turn))}")
    role, content = turn.get("role"), turn.get("content")
    if role not in ROLES:
        hint = "; data.format='sharegpt' reads messages with from and value" if "from" in turn else ""
        near = nearest(role, ROLES) if isinstance(role, str) else ""
        raise DataError(f"the role of a message must be one of {', '.join(ROLES)}, got {clip(repr(role))}{near}{hint}")
    calls = tuple(map(read_call, _list("tool_calls", turn.get("tool_calls"))))
    if calls and role != "assistant":
        raise DataError(f"only an assistant calls tools, got tool_calls in a message of {role!r}")
    parts = read_parts(content) if isinstance(content, list) else ()
    if content is None and calls:
        content = ""
    if not isinstance(content, str) and not parts:
        raise DataError(f"the content of a message must be text or a list of parts, got {clip(repr(content))}")
    if role == "assistant" and not calls and not _says(content, parts):
        raise DataError("a message of the assistant must say something or call a tool, got an empty one")
    return Message(
        str(role),
        content if isinstance(content, str) else "",
        calls,
        str(turn.get("tool_call_id") or ""),
        str(turn.get("name") or ""),
        parts,
    )


def read_call(call: object) -> ToolCall:
    """`{"id": "call_0", "function": {"name": "add", "arguments": "{\\"a\\": 1}"}}`, or its inside alone."""
    inside = call.get("function", call) if isinstance(call, Mapping) else None
    name = inside.get("name") if isinstance(inside, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(inside, Mapping) or not isinstance(name, str) or not name:
        raise DataError(f"a tool call must have a name and arguments, got {clip(repr(call))}")
    given = inside.get("arguments", inside.get("parameters"))
    arguments = from_json(f"the arguments of tool call {name!r}", given) if isinstance(given, str) else given
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise DataError(f"the arguments of tool call {name!r} must be an object, got {clip(repr(given))}")
    return ToolCall(name, _without_holes(arguments), str(call.get("id") or ""))


def read_tools(tools: object) -> tuple[Tool, ...]:
    """Tools as JSON schemas, also as JSON in a text, also without the `{"type": "function"}` around them."""
    given = from_json("tools", tools) if isinstance(tools, str) and tools.strip() else tools
    return tuple(map(_tool, _list("tools", given or None)))


def from_json(what: str, text: str) -> Any:
    try:
        return json.loads(text) if text.strip() else None
    except (json.JSONDecodeError, RecursionError) as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else "it is nested too deeply"
        raise DataError(f"{what} must be JSON, got {clip(repr(text))} ({why})") from None


def _tool(tool: object) -> Tool:
    inside = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(inside, Mapping) or not isinstance(inside.get("name"), str):
        raise DataError(f"a tool must be a JSON schema of a function with a name, got {clip(repr(tool))}")
    return {"type": "function", "function": _without_holes(inside)}


def _without_holes(value: Any) -> Any:
    """Parquet gives every object the keys of all others, empty: those were never said."""
    if isinstance(value, Mapping):
        return {key: _without_holes(inner) for key, inner in value.items() if inner is not None}
    return [_without_holes(inner) for inner in value] if isinstance(value, list) else value


def _list(what: str, value: object) -> Sequence[object]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise DataError(f"{what} must be a list, got {clip(repr(value))}")
    return value


def read_parts(content: Sequence[Any]) -> tuple[Mapping[str, Any], ...]:
    return tuple(map(_part, content))


def _part(part: object) -> Mapping[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind in IMAGES:
        return read_part(part)
    if not isinstance(part, Mapping) or kind != "text" or not isinstance(part.get("text"), str):
        raise DataError(
            "a part of a message must be text, {'type': 'text', 'text': …}, or a picture, "
            f"{{'type': 'image', 'image': …}}, got {clip(repr(part))}"
        )
    return {"type": "text", "text": part["text"]}


def _says(content: object, parts: Sequence[Mapping[str, Any]]) -> bool:
    return bool(content.strip()) if isinstance(content, str) else any(part.get("text", "").strip() for part in parts)
