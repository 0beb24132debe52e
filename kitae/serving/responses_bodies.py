"""The bodies of OpenAI's Responses API, as models, and what they are as chats.

Items of the model that follow each other (a message, calls of functions) are one message of a chat. Reasoning of
earlier turns is left out, as chat templates leave it out. What asks for anything else is refused by its name.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from kitae.serving.request_bodies import Ignored, Json, RequestBody, only

_ENCRYPTED = "reasoning.encrypted_content"  # asks for nothing here: reasoning is told as text, and not read again


class TextPart(RequestBody):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Ignored = None
    logprobs: Ignored = None


class RefusalPart(RequestBody):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


ContentPart = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
Content = Annotated[list[ContentPart], Field(fail_fast=True), BeforeValidator(_as_parts)]


class _Item(RequestBody):
    id: Ignored = None
    status: Ignored = None


class MessageItem(_Item):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: Ignored = None


class CallItem(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class OutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: Content


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: Ignored = None
    content: Ignored = None
    encrypted_content: Ignored = None


Item = Annotated[MessageItem | CallItem | OutputItem | ReasoningItem, Field(discriminator="type")]


def _as_items(given: Any) -> Any:
    """A text is a message of the user; an item that says no type is a message."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list):
        return items
    return [{"type": "message", **item} if isinstance(item, Mapping) else item for item in items]


class FunctionTool(RequestBody):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(RequestBody):
    format: dict[str, Any] | None = None
    verbosity: Annotated[Any, only(["medium"], "the model decides how much it says")] = None


class Reasoning(RequestBody):
    effort: Annotated[Any, only(["none"], "the model decides how long it thinks")] = None
    summary: Annotated[Any, only([], "reasoning is told as it is")] = None
    generate_summary: Annotated[Any, only([], "reasoning is told as it is")] = None


_UNKEPT = "this server keeps answers alone"


class ResponsesBody(RequestBody):
    """The body of `POST /v1/responses`. seed, stop, top_k, min_p, return_token_ids, control_tokens are Kitae's own."""

    model: str = ""
    input: Annotated[list[Item], BeforeValidator(_as_items)] = Field([], fail_fast=True)
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    stream: bool = False
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, ge=0, le=1)
    tools: list[FunctionTool] = Field([], fail_fast=True)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: Reasoning | None = None
    metadata: dict[str, Any] = Field({})
    include: Annotated[Any, only([[], [_ENCRYPTED]], "nothing else can be told")] = None
    seed: int | None = None
    stop: Any = None
    top_k: int = Field(0, ge=-1, le=2**31 - 1)
    min_p: float = Field(0.0, ge=0, le=1)
    return_token_ids: bool = False
    control_tokens: bool | None = None
    user: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None
    service_tier: Ignored = None
    stream_options: Ignored = None
    background: Annotated[Any, only([False], "an answer is told when it is asked for")] = None
    conversation: Annotated[Any, only([], _UNKEPT)] = None
    prompt: Annotated[Any, only([], _UNKEPT)] = None
    context_management: Annotated[Any, only([[]], "contexts are taken as they come")] = None
    truncation: Annotated[Any, only(["disabled"], "contexts are taken as they come")] = None
    max_tool_calls: Annotated[Any, only([], "tools are called by the client alone")] = None
    top_logprobs: Annotated[Any, only([0], "chats have them")] = None

    def as_chat(self, before: Sequence[Json] = ()) -> Json:
        """The same as the body of a chat. before: messages of the answer that it goes on from."""
        same = ("model", "stream", "temperature", "top_p", "parallel_tool_calls", "seed", "stop")
        own = ("top_k", "min_p", "return_token_ids", "control_tokens")
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return {
            **{name: getattr(self, name) for name in (*same, *own)},
            "messages": [*instructions, *before, *self.messages],
            "max_tokens": self.max_output_tokens,
            "tools": [_chat_tool(tool) for tool in self.tools] or None,
            "tool_choice": self._chat_choice,
            "response_format": self._chat_format,
        }

    @property
    def messages(self) -> list[Json]:
        """The input as messages of a chat."""
        found: list[Json] = []
        open = False  # whether calls that follow belong to the last message
        for item in self.input:
            match item:
                case MessageItem():
                    found.append({"role": item.role, "content": "".join(part.text for part in item.content)})
                    open = item.role == "assistant"
                case OutputItem():
                    said = "".join(part.text for part in item.output)
                    found.append({"role": "tool", "content": said, "tool_call_id": item.call_id})
                    open = False
                case CallItem():
                    if not open:
                        found.append({"role": "assistant", "content": ""})
                    function = {"name": item.name, "arguments": item.arguments}
                    call = {"id": item.call_id, "type": "function", "function": function}
                    found[-1].setdefault("tool_calls", []).append(call)
                    open = True
        return found

    @property
    def _chat_choice(self) -> Any:
        match self.tool_choice:
            case {"type": "function", "name": str(name), **rest} if not rest:
                return {"type": "function", "function": {"name": name}}
        return self.tool_choice

    @property
    def _chat_format(self) -> Any:
        match self.text.format:
            case {"type": "json_schema", **described}:
                return {"type": "json_schema", "json_schema": described}
        return self.text.format


def _chat_tool(tool: FunctionTool) -> Json:
    described = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": described | {"strict": tool.strict}}
