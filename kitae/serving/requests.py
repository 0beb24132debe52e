"""What clients ask for, read from the JSON of their requests.

A field is honoured, or the request is refused with a sentence that names it: nothing that a client asks for is quietly
left out. `ignore` lists what changes nothing about an answer, and `without` what may come only with a value that asks
for nothing.
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from kitae.data.chat import Chat, text_of
from kitae.data.data_files import clip
from kitae.data.messages import read_message, read_tools
from kitae.engines.base import SamplingParams, stream_seed
from kitae.errors import DataError
from kitae.serving.base import Ask
from kitae.serving.fields import Fields
from kitae.serving.refusals import Refused
from kitae.types import Message, Tool, Turn

MOST_TOP = 20
"""Likeliest tokens at a place that a client may ask for."""

_MOST_CHOICES = 128
_COMPLETION_TOKENS = 16  # what OpenAI's API has where a completion says nothing of max_tokens
_UNBOUNDED = 1 << 30  # max_tokens of a chat that says nothing of it: the context is the limit
_COLDEST = 1e-9  # temperature
_HIGHEST = 2**31 - 1  # of a token id that can be asked about at all; the model has fewer, and says so
_UNCONSTRAINED = "tokens are drawn from the model as it is"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What calls of tools an answer must have: `ToolChoice(call=True, name="add")`, or at most one with `single`."""

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
    """One request: an ask for each choice wanted, and how the answers are to be told.

    prompt_texts: of a completion, each prompt as text; empty: it is a chat. logprobs: of sampled tokens; top: so many
    of the likeliest beside each. echo: with the prompt.
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


def read_chat(fields: Fields, chat: Chat, retry: bool = False) -> AnswerOrder:
    """The body of `POST /v1/chat/completions`."""
    messages = _messages(fields.take("messages"))
    tool_choice, tools = _tools(fields)
    logprobs, top = fields.flag("logprobs"), fields.integer("top_logprobs", 0, least=0, most=MOST_TOP)
    if top and not logprobs:
        raise Refused(f"top_logprobs needs logprobs = true, got {top} without it", param="top_logprobs")
    kind = fields.section("response_format")
    if (wanted := kind.take("type")) not in (None, "text"):
        raise Refused(
            f"response_format must be of type 'text', got {clip(repr(wanted))}: {_UNCONSTRAINED}",
            param="response_format",
        )
    fields.without("modalities", [["text"]], "the model writes text")
    fields.without("reasoning_effort", ["none"], "the model decides how long it thinks")
    fields.without("chat_template_kwargs", [{}], "the chat template is used as it is")
    for name in ("functions", "function_call"):
        fields.without(name, [], "it has become tools and tool_choice")
    for name in ("audio", "prediction", "web_search_options", "verbosity"):
        fields.without(name, [], "the model only writes text")
    common = _common(fields, "chatcmpl", chat, _UNBOUNDED)
    ask = Ask(common.id, messages=messages, tools=tools, sampling=common.sampling, retry=retry)
    fields.finish()
    return AnswerOrder(
        common.id,
        common.model,
        _asks([ask], common),
        stream=common.stream,
        usage=common.usage,
        logprobs=logprobs,
        top=top,
        token_ids=common.token_ids,
        tool_choice=tool_choice,
    )


def read_completion(fields: Fields, chat: Chat, retry: bool = False) -> AnswerOrder:
    """The body of `POST /v1/completions`."""
    prompts = _prompts(fields.take("prompt"), chat)
    echo = fields.flag("echo")
    logprobs = fields.take("logprobs")
    if logprobs is not None and (isinstance(logprobs, bool) or not isinstance(logprobs, int)):
        raise Refused(f"logprobs must be a whole number, got {clip(repr(logprobs))}", param="logprobs")
    if logprobs is not None and not 0 <= logprobs <= MOST_TOP:
        raise Refused(f"logprobs must be from 0 to {MOST_TOP}, got {logprobs}", param="logprobs")
    fields.without("suffix", [""], "the model writes from left to right")
    common = _common(fields, "cmpl", chat, _COMPLETION_TOKENS, least=0 if echo else 1)
    fields.without("best_of", [common.n], "every answer is returned: set n alone")
    asks = [Ask(common.id, prompt_tokens=tokens, sampling=common.sampling, retry=retry) for tokens, _ in prompts]
    fields.finish()
    return AnswerOrder(
        common.id,
        common.model,
        _asks(asks, common),
        tuple(text for _, text in prompts),
        stream=common.stream,
        usage=common.usage,
        logprobs=logprobs is not None,
        top=logprobs or 0,
        token_ids=common.token_ids,
        echo=echo,
    )


@dataclass(frozen=True, slots=True)
class _Common:
    id: str
    model: str
    n: int
    seed: int | None
    sampling: SamplingParams
    stream: bool
    usage: bool
    token_ids: bool


def _common(fields: Fields, prefix: str, chat: Chat, most: int, least: int = 1) -> _Common:
    """What both kinds of request say. most and least: of max_tokens, where it is not given, and that may be given."""
    stream = fields.flag("stream")
    options = fields.section("stream_options")
    usage = options.flag("include_usage")
    options.ignore("include_obfuscation")
    options.finish()
    if usage and not stream:
        raise Refused("stream_options needs stream = true, got it without", param="stream_options")
    fields.ignore("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier")
    fields.without("store", [False], "answers are not kept")
    fields.without("logit_bias", [{}], _UNCONSTRAINED)
    fields.without("frequency_penalty", [0], _UNCONSTRAINED)
    fields.without("presence_penalty", [0], _UNCONSTRAINED)
    fields.without("repetition_penalty", [1], _UNCONSTRAINED)
    fields.without("min_tokens", [0], _UNCONSTRAINED)
    seed = fields.take("seed")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise Refused(f"seed must be a whole number, got {clip(repr(seed))}", param="seed")
    return _Common(
        id=f"{prefix}-{uuid.uuid4().hex}",
        model=fields.text("model"),
        n=fields.integer("n", 1, least=1, most=_MOST_CHOICES),
        seed=seed,
        sampling=_sampling(fields, chat, most, least),
        stream=stream,
        usage=usage,
        token_ids=fields.flag("return_token_ids"),
    )


def _sampling(fields: Fields, chat: Chat, most: int, least: int) -> SamplingParams:
    given = {fields.integer(name, most, least=least) for name in ("max_tokens", "max_completion_tokens")} - {most}
    if len(given) > 1:
        raise Refused(f"max_tokens and max_completion_tokens must agree, got {min(given)} and {max(given)}",
                      param="max_tokens")  # fmt: skip
    top_p = fields.number("top_p", 1.0, least=0.0, most=1.0)
    if top_p == 0:
        raise Refused("top_p must be above 0, got 0; for the likeliest token set temperature = 0", param="top_p")
    temperature = fields.number("temperature", 1.0, least=0.0)
    if 0 < temperature < _COLDEST:  # logits divided by it would not be finite, and end the engine
        raise Refused(f"temperature must be 0 or at least {_COLDEST:g}, got {temperature:g}", param="temperature")
    stops = fields.take("stop_token_ids") or []
    if not isinstance(stops, list) or not all(isinstance(token, int) for token in stops):
        raise Refused(f"stop_token_ids must be a list of token ids, got {clip(repr(stops))}", param="stop_token_ids")
    ends = () if fields.flag("ignore_eos") else chat.stop_tokens
    return SamplingParams(
        temperature=temperature,
        max_tokens=given.pop() if given else most,
        top_p=top_p,
        top_k=max(0, fields.integer("top_k", 0, least=-1)),
        min_p=fields.number("min_p", 0.0, least=0.0, most=1.0),
        stop_tokens=(*ends, *stops),
        stop_strings=fields.texts("stop"),
    )


def _asks(prompts: list[Ask], common: _Common) -> tuple[Ask, ...]:
    """n of each prompt, with ids and random streams of their own."""
    found: list[Ask] = []
    for ask in prompts:
        for _ in range(common.n):
            index = len(found)
            seed = None if common.seed is None else stream_seed(common.seed, index)
            found.append(replace(ask, id=f"{ask.id}/{index}", seed=seed))
    return tuple(found)


def _prompts(given: Any, chat: Chat) -> list[tuple[tuple[int, ...], str]]:
    """The tokens of each prompt, and its text."""
    many = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
    return [_prompt(one, chat) for one in many]


def _prompt(given: Any, chat: Chat) -> tuple[tuple[int, ...], str]:
    if isinstance(given, str):
        tokens = chat.begin() + chat.encode(given)
        if not tokens:
            raise Refused("prompt must have at least one token, got an empty text", param="prompt")
        return tokens, given
    if isinstance(given, list) and given and all(isinstance(t, int) and not isinstance(t, bool) for t in given):
        if min(given) < 0 or max(given) > _HIGHEST:
            raise Refused(f"token ids must be from 0 to {_HIGHEST}, got {min(given)} to {max(given)}", param="prompt")
        return tuple(given), chat.spell(*given)
    raise Refused(
        f"prompt must be a text, a list of texts, token ids or a list of them, got {clip(repr(given))}", param="prompt"
    )


# Messages and tools.

_MESSAGE_FIELDS = {"role", "content", "tool_calls", "tool_call_id", "name"}
_UNREAD = {"reasoning_content", "reasoning", "provider_specific_fields"}
"""Of a message of the assistant: chat templates leave the thinking of earlier turns out, and what clients note beside
an answer (litellm) is for themselves."""


def _messages(given: Any) -> tuple[Message, ...]:
    if not isinstance(given, list) or not given:
        raise Refused(f"messages must be a list of at least one message, got {clip(repr(given))}", param="messages")
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
        read = read_message(turn)
    except DataError as error:
        raise Refused(f"{where}: {error}", param=where) from None
    return replace(read, content=text_of(read), parts=())  # text in parts is one text: many templates know no parts


def _tools(fields: Fields) -> tuple[ToolChoice, tuple[Tool, ...]]:
    try:
        tools = read_tools(_functions(fields.take("tools")))
    except DataError as error:
        raise Refused(str(error), param="tools") from None
    single = not fields.flag("parallel_tool_calls", True)
    choice = fields.take("tool_choice")
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
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, Mapping) and tool.get("type", "function") != "function":
            raise Refused(f"a tool must be of type 'function', got {clip(repr(tool.get('type')))}", param="tools")
    return tools
