"""The bodies of Anthropic's Messages API, as models, and what they are as chats.

A message of blocks becomes messages of a chat: results of tools one each, texts between them one together. Thinking of
earlier turns is left out, as chat templates leave it out. What asks for anything else is refused by its name.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from kitae.serving.request_bodies import Ignored, Json, RequestBody, only

_DECIDES = "the model decides how long it thinks"
_ALONE = "the model is told of tools that the client runs"


class _Block(RequestBody):
    cache_control: Ignored = None


class TextBlock(_Block):
    type: Literal["text"]
    text: str
    citations: Annotated[Any, only([[]], "answers have no citations")] = None


class ToolUseBlock(_Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Annotated[Any, only([{"type": "direct"}], _ALONE)] = None


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Texts = Annotated[list[TextBlock], Field(fail_fast=True), BeforeValidator(_as_blocks)]


class ToolResultBlock(_Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = Field([])
    is_error: bool = False


class ThinkingBlock(RequestBody):
    type: Literal["thinking", "redacted_thinking"]
    thinking: Ignored = None
    signature: Ignored = None
    data: Ignored = None


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ToolUseBlock | ThinkingBlock, Field(discriminator="type")]


class UserMessage(RequestBody):
    role: Literal["user"]
    content: Annotated[list[UserBlock], Field(fail_fast=True), BeforeValidator(_as_blocks)]


class AssistantMessage(RequestBody):
    role: Literal["assistant"]
    content: Annotated[list[AssistantBlock], Field(fail_fast=True), BeforeValidator(_as_blocks)]


AnyMessage = Annotated[UserMessage | AssistantMessage, Field(discriminator="role")]


class ClientTool(RequestBody):
    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: Ignored = None
    eager_input_streaming: Ignored = None


class ToolChoiceBody(RequestBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class OutputConfig(RequestBody):
    format: dict[str, Any] | None = None
    effort: Annotated[Any, only([], _DECIDES)] = None


class CountBody(RequestBody):
    """The body of `POST /v1/messages/count_tokens`."""

    model: str = ""
    messages: list[AnyMessage] = Field(fail_fast=True)
    system: Texts = Field([])
    tools: list[ClientTool] = Field([], fail_fast=True)
    tool_choice: ToolChoiceBody = ToolChoiceBody(type="auto")
    thinking: Annotated[Any, only([{"type": "adaptive"}, {"type": "disabled"}], _DECIDES)] = None
    output_config: OutputConfig = OutputConfig()
    cache_control: Ignored = None
    control_tokens: bool | None = None

    def as_chat(self) -> Json:
        """The same as the body of a chat, but for how the answer is sampled."""
        system = [{"role": "system", "content": _parts(self.system)}] if self.system else []
        choice, format = self.tool_choice, self.output_config.format
        named: Json = {"type": "function", "function": {"name": choice.name}}
        return {
            "model": self.model,
            "messages": [*system, *(made for message in self.messages for made in _chat_messages(message))],
            "tools": [_chat_tool(tool) for tool in self.tools] or None,
            "tool_choice": {"any": "required", "tool": named}.get(choice.type, choice.type),
            "parallel_tool_calls": not choice.disable_parallel_tool_use,
            "response_format": format and {"type": format.get("type"), "json_schema": {"schema": format.get("schema")}},
            "control_tokens": self.control_tokens,
        }


class MessagesBody(CountBody):
    """The body of `POST /v1/messages`. seed, return_token_ids and control_tokens are Kitae's own."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] = Field([], fail_fast=True)
    stream: bool = False
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=0, le=2**31 - 1)
    metadata: Ignored = None
    service_tier: Ignored = None
    seed: int | None = None
    return_token_ids: bool = False

    def as_chat(self) -> Json:
        last = self.messages[-1] if self.messages else None
        same = ("max_tokens", "stream", "temperature", "top_p", "top_k", "seed", "return_token_ids")
        return {
            **super().as_chat(),
            **{name: getattr(self, name) for name in same},
            "stop": self.stop_sequences or None,
            "continue_final_message": isinstance(last, AssistantMessage),
        }


def _chat_tool(tool: ClientTool) -> Json:
    described = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": described | {"strict": tool.strict}}  # what is None was never said


def _parts(texts: list[TextBlock]) -> list[Json]:
    return [{"type": "text", "text": block.text} for block in texts]


def _chat_messages(message: UserMessage | AssistantMessage) -> Iterator[Json]:
    if isinstance(message, AssistantMessage):
        texts = [block for block in message.content if isinstance(block, TextBlock)]
        calls = [block for block in message.content if isinstance(block, ToolUseBlock)]
        yield {"role": "assistant", "content": "".join(b.text for b in texts), "tool_calls": [*map(_call, calls)]}
        return
    for _, same in groupby(message.content or [TextBlock(type="text", text="")], type):
        blocks = list(same)
        if texts := [block for block in blocks if isinstance(block, TextBlock)]:
            yield {"role": "user", "content": _parts(texts)}
        yield from (_result(block) for block in blocks if isinstance(block, ToolResultBlock))


def _result(block: ToolResultBlock) -> Json:
    said = ("Error: " if block.is_error else "") + "".join(text.text for text in block.content)
    return {"role": "tool", "content": said, "tool_call_id": block.tool_use_id}


def _call(block: ToolUseBlock) -> Json:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
