"""Tools of the user's own: a function, or a class of which each episode has an instance.

    def weather(city: str, days: int = 1) -> str:
        '''The weather of the next days.

        Args:
            city: The name of the place.
            days: How many.
        '''

The schema that the model reads is made of the type hints and the docstring. Of a class, every public method with a
docstring is a tool. It may have `reset`, which gets the columns of the row and may return a text that is added to the
question, and `get_reward`, which is asked when the model answers without a call; either may be `async def`.

What a function raises is an error that the model reads; what it returns is text, or is written as JSON, or is a
`ToolAnswer`, which gives the turn a reward. A function that does not wait runs in a thread, with the rights of the run;
one that takes longer than `env.seconds` is given up there.
"""

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import PydanticSchemaGenerationError, TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema

from kitae.envs.base import Observation, Opening
from kitae.envs.blocking_calls import in_thread
from kitae.envs.tools.base import EpisodeTool, ToolAnswer, ToolEpisode, ToolRefusal
from kitae.errors import ConfigError
from kitae.plugins import load_function
from kitae.types import Message, Prompt, Tool, ToolCall, Turn

_ARGUMENT = re.compile(r"\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_ENDS = ("returns:", "raises:", "yields:", "example:", "examples:", "note:", "notes:")
_OF_EPISODES = ("reset", "get_reward")


def load_tool(name: str) -> Callable[..., Any]:
    """The function or class `file.py:name`; its schemas are made here, so that what is wrong is said at once."""
    found = load_function(name, "tool", (), ConfigError)
    if inspect.isclass(found):
        if not methods_of(found):
            raise ConfigError(f"the tool {name!r} must have public methods with docstrings, got none")
        for method in methods_of(found):
            schema_of(getattr(found, method), name)
    else:
        schema_of(found, name)
    return found


def methods_of(kind: type) -> list[str]:
    """The names of the methods that are tools."""
    found = inspect.getmembers(kind, inspect.isfunction)
    return [name for name, f in found if not name.startswith("_") and name not in _OF_EPISODES and f.__doc__]


class OwnTool:
    """An `EpisodeTool` that is a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.tool = schema_of(function, getattr(function, "__name__", "tool"))

    async def call(self, call: ToolCall) -> str | ToolAnswer:
        try:
            found = await _done(self._function, **call.arguments)
        except Exception as problem:
            raise ToolRefusal(f"{type(problem).__name__}: {problem}") from None
        return found if isinstance(found, str | ToolAnswer) else json.dumps(found, default=str, ensure_ascii=False)

    async def close(self) -> None:
        pass


class OwnEpisode(ToolEpisode):
    """An episode with instances of the user's classes, made for it."""

    def __init__(
        self,
        prompt: Prompt,
        tools: Sequence[EpisodeTool],
        output: int,
        examples: tuple[Message, ...],
        calls: int | None,
        instances: Sequence[Any],
    ) -> None:
        super().__init__(prompt, tools, output, examples, calls)
        self._instances = instances
        self.judged = not any(hasattr(instance, "get_reward") for instance in instances)
        self._columns = {"prompt": [{"role": m.role, "content": m.content} for m in prompt.messages], **prompt.context}

    async def start(self) -> Opening:
        opening = await super().start()
        for instance in self._instances:
            if not hasattr(instance, "reset"):
                continue
            text = await _done(instance.reset, **_taken(instance.reset, self._columns))
            if text is not None:
                *before, last = opening.messages
                opening = replace(opening, messages=(*before, replace(last, content=f"{last.content}{text}")))
        return opening

    async def step(self, turn: Turn) -> Observation:
        seen = await super().step(turn)
        judges = [i for i in self._instances if hasattr(i, "get_reward")] if seen.done else []
        if not judges:
            return seen
        return replace(seen, reward=float(sum([await _done(judge.get_reward) for judge in judges])))


async def _done(function: Callable[..., Any], **arguments: Any) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return await in_thread(function, **arguments)


def _taken(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What the function takes of it: all, where it takes anything."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(given)
    return {p.name: given[p.name] for p in parameters if p.name in given}


def schema_of(function: Callable[..., Any], where: str) -> Tool:
    """The schema of a function: `{"type": "function", "function": {"name": "weather", …}}`."""
    name = getattr(function, "__name__", "")
    description, told = _described(inspect.getdoc(function) or "")
    if not description:
        raise ConfigError(f"the tool {name!r} of {where!r} must have a docstring, which the model reads, got none")
    hints = typing.get_type_hints(function)
    properties: dict[str, Any] = {}
    required = []
    for parameter in inspect.signature(function).parameters.values():
        key = parameter.name
        if key == "self":
            continue
        if key not in hints or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"the argument {key!r} of the tool {name!r} of {where!r} must have a type hint, got none")
        try:
            properties[key] = TypeAdapter(hints[key]).json_schema() | {"description": told.get(key, "")}
        except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema):
            raise ConfigError(
                f"the argument {key!r} of the tool {name!r} of {where!r} must be of a type that JSON has, got "
                f"{hints[key]}"
            ) from None
        if parameter.default is parameter.empty:
            required.append(key)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _described(text: str) -> tuple[str, dict[str, str]]:
    """What a docstring says of a function, and under `Args:` of each argument."""
    lines, told, last = text.splitlines(), dict[str, str](), ""
    begin = next((n for n, line in enumerate(lines) if line.strip().lower() in ("args:", "arguments:")), len(lines))
    for line in lines[begin + 1 :]:
        if line.strip().lower() in _ENDS:
            break
        if (found := _ARGUMENT.fullmatch(line)) is not None:
            last = found[1]
            told[last] = found[2].strip()
        elif line.strip() and last:
            told[last] = f"{told[last]} {line.strip()}"
    above = lines[:begin]
    end = next((n for n, line in enumerate(above) if line.strip().lower() in _ENDS), len(above))
    return "\n".join(above[:end]).strip(), told
