"""Orders made from the bodies of requests: a request to the model for each answer, and how to return the answers."""

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from kitae.data.chat import Chat, text_of
from kitae.data.data_files import clip
from kitae.data.messages import read_message, read_tools
from kitae.data.pictures import IMAGES, given_of, sources_of
from kitae.engines.base import SamplingParams, stream_seed
from kitae.engines.constraint import Constraint
from kitae.errors import DataError
from kitae.serving.answer_form import GUIDES, after_thoughts, of_guide, of_response_format, of_tool_choice
from kitae.serving.base import Ask
from kitae.serving.prompt_reader import PromptReader
from kitae.serving.refusals import Refused
from kitae.serving.request_bodies import HIGHEST_TOKEN, AnswerBody, ChatBody, CompletionBody
from kitae.types import Message, Tool, Turn

ROLE_OF = "policy/"
"""Before the name of a role of an agent's episode, as the name of a model."""
_COMPLETION_TOKENS = 16  # what OpenAI's API has where a completion says nothing of max_tokens
_UNBOUNDED = 1 << 30  # max_tokens of a chat that says nothing of it, or more: the context is the limit
_COLDEST = 1e-9  # temperature
_MOST_TOOLS = 256
_MOST_TOOL_BYTES = 512 * 2**10  # of their JSON


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The tool calls that an answer must have: `ToolChoice(call=True, name="add")`; `single` allows at most one."""

    call: bool = False
    name: str = ""
    single: bool = False

    @property
    def any(self) -> bool:
        return self.call or self.single

    def unmet(self, turn: Turn) -> str:
        """Why a turn is not what was asked for; "": it is."""
        if self.single and len(turn.calls) > 1:
            return f"parallel_tool_calls is false, and the model called {len(turn.calls)} tools"
        if self.call and turn.problem:
            return f"tool_choice asks for a call, and the model's cannot be read: {turn.problem}"
        if self.call and not turn.calls:
            return "tool_choice asks for a call, and the model called no tool"
        if self.name and (other := next((c.name for c in turn.calls if c.name != self.name), "")):
            return f"tool_choice names the tool {self.name!r}, and the model called {other!r}"
        return ""


@dataclass(frozen=True, slots=True)
class AnswerOrder:
    """One HTTP request: a request to the model for each choice, and how to return the answers.

    prompt_texts: the prompts of a completion as texts; empty for a chat. logprobs: return those of sampled tokens. top:
    return so many of the likeliest tokens beside each. echo: return the prompt before the answer.
    """

    id: str
    model: str
    asks: tuple[Ask, ...]
    prompt_texts: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False
    logprobs: bool = False
    top: int = 0
    token_ids: bool = False
    tool_choice: ToolChoice = ToolChoice()
    echo: bool = False

    @property
    def generates(self) -> bool:
        """Whether anything is to be sampled; else the prompt alone is wanted."""
        return self.asks[0].sampling.max_tokens > 0

    @property
    def kind(self) -> Literal["chat", "text"]:
        return "text" if self.prompt_texts else "chat"

    @property
    def choices(self) -> int:
        """Of each prompt."""
        return len(self.asks) // (len(self.prompt_texts) or 1)


def read_chat(
    body: ChatBody, prompts: PromptReader, retry: bool = False, id: str = "chatcmpl-", thoughts: bool = False
) -> AnswerOrder:
    """id: what the name of the answer begins with. thoughts: thinking is told apart, see `Ask`."""
    prompts.check_answers(1, body.n)
    messages = read_talk(body.messages, prompts)
    tool_choice, tools = _tools(body)
    if body.add_generation_prompt not in (None, not body.continue_final_message):
        message = "add_generation_prompt must be true where continue_final_message is false, and false where it is true"
        raise Refused(f"{message}, got {json.dumps(body.add_generation_prompt)}", param="add_generation_prompt")
    if body.top_logprobs and not body.logprobs:
        message = f"top_logprobs needs logprobs = true, got {body.top_logprobs} without it"
        raise Refused(message, param="top_logprobs")
    wanted = _form(body, prompts.chat, tool_choice, tools, of_response_format(body.response_format))
    id, sampling = f"{id}{uuid.uuid4().hex}", _sampling(body, prompts.chat, _UNBOUNDED, form=wanted)
    tokens = None
    if prompts.encodes:
        encode = prompts.encode_continued if body.continue_final_message else prompts.encode_chat
        tokens = encode(messages, tools, body.control_tokens)
    elif body.continue_final_message:
        raise Refused(
            "an episode cannot go on from half an answer: the last message must be one that the model answers"
        )
    thoughts = thoughts and prompts.chat.thinks
    ask = Ask(
        id,
        messages=messages,
        prompt_tokens=tokens,
        tools=tools,
        sampling=sampling,
        retry=retry,
        thoughts=thoughts,
        role=body.model.removeprefix(ROLE_OF) if body.model.startswith(ROLE_OF) else "",
    )
    return AnswerOrder(
        id,
        body.model,
        _asks([ask], body),
        stream=body.stream,
        usage=_usage(body),
        logprobs=body.logprobs,
        top=body.top_logprobs,
        token_ids=body.return_token_ids,
        tool_choice=tool_choice,
    )


def read_completion(body: CompletionBody, prompts: PromptReader, retry: bool = False) -> AnswerOrder:
    id, least = f"cmpl-{uuid.uuid4().hex}", 0 if body.echo else 1
    sampling = _sampling(body, prompts.chat, _COMPLETION_TOKENS, least, _guide(body))
    if body.best_of not in (None, body.n):
        message = f"best_of is not supported, only {body.n}: every answer is returned: set n alone; got {body.best_of}"
        raise Refused(message, param="best_of")
    made = _prompts(body, prompts)
    asks = [Ask(id, prompt_tokens=tokens, sampling=sampling, retry=retry) for tokens, _ in made]
    return AnswerOrder(
        id,
        body.model,
        _asks(asks, body),
        tuple(text for _, text in made),
        stream=body.stream,
        usage=_usage(body),
        logprobs=body.logprobs is not None,
        top=body.logprobs or 0,
        token_ids=body.return_token_ids,
        echo=body.echo,
    )


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Refusals of a chat's fields, told by the names that another dialect has for them."""
    try:
        yield
    except Refused as refused:
        head, rest = re.match(r"(\w*)(.*)", str(refused), re.DOTALL).groups()  # type: ignore[union-attr]
        if head not in names:
            raise
        raise Refused(names[head] + rest, refused.status, param=names[head], code=refused.code) from None


def _usage(body: AnswerBody) -> bool:
    """Whether the stream ends with the number of tokens used."""
    if body.stream_options.include_usage and not body.stream:
        raise Refused("stream_options needs stream = true, got it without", param="stream_options")
    return body.stream_options.include_usage


def _guide(body: AnswerBody) -> Constraint | None:
    """What the fields of other servers ask for; at most one of them."""
    asked = {field: found for field in GUIDES if (found := of_guide(field, getattr(body, field))) is not None}
    if len(asked) > 1:
        raise Refused(f"an answer has one form, got {' and '.join(asked)}", param=next(iter(asked)))
    return next(iter(asked.values()), None)


def _form(
    body: ChatBody, chat: Chat, choice: ToolChoice, tools: Sequence[Tool], format: Constraint | None
) -> Constraint | None:
    """What an answer to a chat must match: calls that it must make, else the form that was asked for."""
    guide = _guide(body)
    if guide is not None and format is not None:
        raise Refused("an answer has one form, got response_format and a guided_ field", param="response_format")
    asked = format if guide is None else guide
    if not choice.call:
        return after_thoughts(chat, asked)
    if asked is not None:
        raise Refused("an answer is a call or has a form, got tool_choice and response_format", param="tool_choice")
    return of_tool_choice(chat, tools, single=choice.single or bool(choice.name))


def _sampling(
    body: AnswerBody, chat: Chat, default: int, least: int = 1, form: Constraint | None = None
) -> SamplingParams:
    """default: of max_tokens, where the body has none; least: the smallest that it may have."""
    given = {n for n in (body.max_tokens, body.max_completion_tokens) if n is not None}
    if len(given) > 1:
        message = f"max_tokens and max_completion_tokens must agree, got {min(given)} and {max(given)}"
        raise Refused(message, param="max_tokens")
    if given and min(given) < least:
        raise Refused(f"max_tokens must be at least {least}, got {min(given)}", param="max_tokens")
    if body.top_p == 0:
        raise Refused("top_p must be above 0, got 0; for the likeliest token set temperature = 0", param="top_p")
    if 0 < body.temperature < _COLDEST:  # logits divided by it would not be finite, and end the engine
        message = f"temperature must be 0 or at least {_COLDEST:g}, got {body.temperature:g}"
        raise Refused(message, param="temperature")
    ends = () if body.ignore_eos else chat.stop_tokens
    return SamplingParams(
        temperature=body.temperature,
        max_tokens=min(given.pop() if given else default, _UNBOUNDED),
        top_p=body.top_p,
        top_k=max(0, body.top_k),
        min_p=body.min_p,
        stop_tokens=(*ends, *body.stop_token_ids),
        stop_strings=body.stop,
        constraint=form,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=body.logit_bias,
    )


def _asks(prompts: list[Ask], body: AnswerBody) -> tuple[Ask, ...]:
    """n requests for each prompt, with ids and random streams of their own."""
    found: list[Ask] = []
    for ask in prompts:
        for _ in range(body.n):
            index = len(found)
            seed = None if body.seed is None else stream_seed(body.seed, index)
            found.append(replace(ask, id=f"{ask.id}/{index}", seed=seed))
    return tuple(found)


def _prompts(body: CompletionBody, prompts: PromptReader) -> list[tuple[tuple[int, ...], str]]:
    """The tokens of each prompt, and its text."""
    given = body.prompt
    many = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
    prompts.check_answers(len(many), body.n)
    return [_prompt(one, prompts, body.control_tokens) for one in many]


def _prompt(given: Any, prompts: PromptReader, control_tokens: bool | None) -> tuple[tuple[int, ...], str]:
    if isinstance(given, str):
        tokens = prompts.encode_text(given, control_tokens)
        if not tokens:
            raise Refused("prompt must have at least one token, got an empty text", param="prompt")
        return tokens, given
    if isinstance(given, list) and given and all(isinstance(t, int) and not isinstance(t, bool) for t in given):
        prompts.check_length("prompt", len(given))
        if min(given) < 0 or max(given) > HIGHEST_TOKEN:
            message = f"token ids must be from 0 to {HIGHEST_TOKEN}, got {min(given)} to {max(given)}"
            raise Refused(message, param="prompt")
        return tuple(given), prompts.chat.spell(*given)
    raise Refused(
        f"prompt must be a text, a list of texts, token ids or a list of them, got {clip(repr(given))}", param="prompt"
    )


# Messages and tools.

_MESSAGE_FIELDS = {"role", "content", "tool_calls", "tool_call_id", "name"}
_UNREAD = {"reasoning_content", "reasoning", "provider_specific_fields"}
"""Of a message of the assistant: chat templates leave the thinking of earlier turns out, and what clients note beside
an answer (litellm) is for themselves."""


def read_talk(given: Any, prompts: PromptReader) -> tuple[Message, ...]:
    if not isinstance(given, list) or not given:
        raise Refused(f"messages must be a list of at least one message, got {clip(repr(given))}", param="messages")
    prompts.check_length("messages", len(given))
    return tuple(_message(number, turn) for number, turn in enumerate(given))


def _message(number: int, turn: Any) -> Message:
    where = f"messages[{number}]"
    if isinstance(turn, Mapping):
        for name, value in turn.items():
            if name not in _MESSAGE_FIELDS | _UNREAD and value not in (None, [], {}, ""):
                raise Refused(f"{where}: unknown field {name!r}", param=f"{where}.{name}")
        content = turn.get("content") or ""
        blank = isinstance(content, str) and not content.strip()
        if turn.get("role") == "assistant" and not turn.get("tool_calls") and blank:
            return Message("assistant", content)  # no example to learn from, but a model said it
    try:
        _refuse_places(turn)
        read = read_message(turn)
    except DataError as error:
        raise Refused(f"{where}: {error}", param=where) from None
    if any(sources_of([read])):
        return read
    return replace(read, content=text_of(read), parts=())  # text in parts is one text: many templates know no parts


def _refuse_places(turn: Any) -> None:
    """Whoever asks a server may send pictures, but not name files of its machine, or what others have sent."""
    content = turn.get("content") if isinstance(turn, Mapping) else None
    for part in content if isinstance(content, list) else ():
        if isinstance(part, Mapping) and part.get("type") in IMAGES:
            given = given_of(part)
            if not isinstance(given, str) or not given.startswith("data:"):
                raise DataError(
                    f"a part of a message must be text, or a picture as a data: URL, got {clip(repr(dict(part)))}"
                )


def _tools(body: ChatBody) -> tuple[ToolChoice, tuple[Tool, ...]]:
    try:
        tools = read_tools(_functions(body.tools))
    except DataError as error:
        raise Refused(str(error), param="tools") from None
    single = not body.parallel_tool_calls
    choice = body.tool_choice
    names = [str(tool["function"]["name"]) for tool in tools]
    match choice:
        case None | "auto":
            return ToolChoice(single=single), tools
        case "none":
            return ToolChoice(), ()
        case "required" if tools:
            return ToolChoice(call=True, single=single), tools
        case {"type": "function", "function": {"name": str(name)}} if name in names:
            return ToolChoice(call=True, name=name, single=single), (tools[names.index(name)],)
    known = ", ".join(["auto", "none", *(["required"] if tools else []), *names])
    raise Refused(f"tool_choice must be one of {known}, got {clip(repr(choice))}", param="tool_choice")


def _functions(tools: Any) -> Any:
    if isinstance(tools, list) and len(tools) > _MOST_TOOLS:
        raise Refused(f"there may be at most {_MOST_TOOLS} tools, got {len(tools)}", param="tools")
    if (size := len(json.dumps(tools))) > _MOST_TOOL_BYTES:
        raise Refused(f"tools may have at most {_MOST_TOOL_BYTES} bytes of JSON, got {size}", param="tools")
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, Mapping) and tool.get("type", "function") != "function":
            raise Refused(f"a tool must be of type 'function', got {clip(repr(tool.get('type')))}", param="tools")
    return tools
