"""The interface of a tool in an episode, and the environment in which the model calls tools."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kitae.data.messages import SYSTEM
from kitae.data.tool_arguments import function_of
from kitae.envs.base import Observation, Opening
from kitae.types import Message, Prompt, Tool, ToolCall, Turn


class ToolRefusal(Exception):
    """A tool cannot do what the model requested; the model reads the message."""


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """What a tool returns that says how good a call was: `ToolAnswer("42 hits", reward=0.1)`.

    reward: added to those of the turn's other calls; None: it gives none. state: the name of the state after it.
    """

    text: str
    reward: float | None = None
    state: str = ""


class EpisodeTool(Protocol):
    """A tool as one episode uses it.

    `call` receives arguments that fit the schema. It returns a text, or a `ToolAnswer`, or raises `ToolRefusal`; any
    other exception is a failure of the episode.
    """

    tool: Tool

    async def call(self, call: ToolCall) -> str | ToolAnswer: ...
    async def close(self) -> None: ...


class ToolEpisode:
    """An `Environment` with tools, which is done when the model answers without a call.

    A call that cannot be parsed, or that the tool refuses, is answered by an error message that the model reads. What a
    tool returns is cut to `output` characters, in its middle. After `calls` calls, further ones are refused. Scoring is
    left to the verifier, which judges the last turn; rewards that tools give for calls are added to its score.
    examples: shown before the prompt, after its system message.
    """

    judged = True

    def __init__(
        self,
        prompt: Prompt,
        tools: Sequence[EpisodeTool],
        output: int,
        examples: tuple[Message, ...] = (),
        calls: int | None = None,
    ) -> None:
        self._output = output
        self._calls, self._called = calls, 0
        begin = next((n for n, m in enumerate(prompt.messages) if m.role not in SYSTEM), 0)
        shown = (*prompt.messages[:begin], *examples, *prompt.messages[begin:])
        self._messages = shown if examples else prompt.messages
        self._tools_by_name = {str(function_of(tool.tool)["name"]): tool for tool in tools}

    async def start(self) -> Opening:
        return Opening(self._messages, tuple(tool.tool for tool in self._tools_by_name.values()))

    async def step(self, turn: Turn) -> Observation:
        if turn.problem:
            return Observation((Message("tool", f"Error: {turn.problem}"),))
        if not turn.calls:
            return Observation(done=True)
        answers = [await self._answer(call) for call in turn.calls]
        rewards = [answer.reward for answer in answers if answer.reward is not None]
        messages = tuple(
            Message("tool", shortened(readable(answer.text), self._output), call_id=call.id, name=call.name)
            for call, answer in zip(turn.calls, answers, strict=True)
        )
        state = ", ".join(answer.state for answer in answers if answer.state)
        return Observation(messages, reward=sum(rewards) if rewards else None, state=state)

    async def _answer(self, call: ToolCall) -> ToolAnswer:
        self._called += 1
        try:
            if self._calls is not None and self._called > self._calls:
                raise ToolRefusal(f"all {self._calls} calls of tools are used up; answer with what you know")
            found = await self._tools_by_name[call.name].call(call)
        except ToolRefusal as refusal:
            found = f"Error: {refusal}"
        return ToolAnswer(found) if isinstance(found, str) else found

    async def close(self) -> None:
        for tool in self._tools_by_name.values():
            await tool.close()


def describe(name: str, description: str, **arguments: str) -> Tool:
    """The schema of a tool whose arguments are all strings: `describe("search", "Find …", query="What to find.")`."""
    properties: dict[str, Any] = {key: {"type": "string", "description": said} for key, said in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def shortened(text: str, limit: int) -> str:
    """Both ends of a long text, and how many characters are left out between them."""
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 3, limit // 3
    return f"{text[:head]}\n[… {len(text) - head - tail} characters left out …]\n{text[len(text) - tail :]}"


def readable(text: str) -> str:
    """A text that can be stored and displayed: valid Unicode, without control characters except tabs and newlines."""
    return text.encode(errors="backslashreplace").decode().translate(_CONTROL)


_CONTROL = {c: f"\\x{c:02x}" for c in [*range(32), 127] if chr(c) not in "\t\n"}
