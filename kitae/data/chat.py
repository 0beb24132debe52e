"""Messages to tokens and back, by the chat template that the model was trained with.

Text becomes tokens only on its way in. What the model sampled stays the tokens that it sampled: a turn that follows
is encoded on its own and appended, and the conversation so far is never rendered again.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from kitae.data.calls import CallReader
from kitae.errors import DataError
from kitae.types import Message, Tool, ToolCall, Turn

_QUESTION = Message("user", "q")
_ANSWER = Message("assistant", "answerendshere")
"""Stands for the model's turn when a template is asked what follows one; an improbable word, so that it is found."""


class Chat:
    """A Hugging Face tokenizer and its template: `Chat(tokenizer, model.generation_config)`.

    Without a template, messages are their contents joined by newlines. Special tokens spelled out in a message's
    text are read as special tokens: content from strangers should not contain them.
    """

    def __init__(self, tokenizer: Any, generation_config: Any = None) -> None:
        self._tokenizer = tokenizer
        self.plain = not getattr(tokenizer, "chat_template", None)
        """Whether the model has no template."""
        self._last: tuple[object, tuple[int, ...]] = (None, ())  # a group asks for one many times
        eos = _ids(tokenizer.eos_token_id) + _ids(getattr(generation_config, "eos_token_id", None))
        self.stop_tokens: tuple[int, ...] = tuple(dict.fromkeys(eos))
        """The tokens that end a turn: the tokenizer's and the generation config's, without repeats."""

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[int, ...]:
        """The tokens up to where the model's answer starts; never empty. `tools` are those that the template is to tell
        the model of."""
        key = tuple(messages), tuple(tools)
        if self._last[0] != key:
            self._last = (key, self._encode_prompt(*key))
        return self._last[1]

    def _encode_prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[int, ...]:
        if not messages:
            raise DataError("a prompt must have at least one message, got none")
        if self.plain:
            if tools:
                raise DataError(f"a model needs a chat template to be told of tools, and it has none; got {len(tools)}")
            tokens = self.begin() + self.encode(joined(messages))
        else:
            tokens = self.encode(self.render(messages, tools=tools))
        if not tokens:
            raise DataError(f"a prompt must have at least one token, got none from {list(messages)}")
        return tokens

    def encode_turn(self, messages: Sequence[Message], *, closed: bool = True) -> tuple[int, ...]:
        """The tokens from the end of a model turn over `messages` to where its next answer starts.

        `closed` says that the model ended its turn itself, with a stop token, which is then not repeated; after a
        stop string or a length limit it is False, and the tokens begin with whatever closes a turn.
        """
        if not messages:
            raise DataError("a turn must have at least one message, got none")
        if self.plain:
            return self.encode("\n" + joined(messages))
        tokens = self.encode(self._tail(messages, generate=True))
        if closed:
            closing = self.encode(self._tail((), generate=False))
            for position, (token, last) in enumerate(zip(tokens, closing, strict=False)):
                if token != last:
                    break  # here the closing of the turn is over, and it held no stop token
                if token in self.stop_tokens:
                    return tokens[position + 1 :]
        return tokens

    def read(self, tokens: Sequence[int], stops: Sequence[str] = (), tools: Sequence[Tool] = ()) -> Turn:
        """What the model said, cut before a stop string; with its calls, if it was told of tools."""
        text = self.decode(tokens)
        cuts = [text.find(stop) for stop in stops if stop in text]
        text = text[: min(cuts)] if cuts else text
        return self._reader.read(tokens, tools, text) if tools else Turn(text, text)

    @cached_property
    def _reader(self) -> CallReader:
        return CallReader(self._tokenizer)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text without special tokens, its spaces as they are."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def render(self, messages: Sequence[Message], *, generate: bool = True, tools: Sequence[Tool] = ()) -> str:
        """The text that the template makes of messages; `generate` adds what the model answers after."""
        turns = [as_dict(m) for m in messages]
        told = {"tools": [dict(tool) for tool in tools]} if tools else {}
        try:
            text: str = self._tokenizer.apply_chat_template(
                turns, add_generation_prompt=generate, tokenize=False, **told
            )
        except Exception as error:  # the template is a program that came with the model
            raise DataError(f"the chat template refuses the roles {[m.role for m in messages]}: {error}") from error
        return text

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a text as it is, with nothing added."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"a message must be valid Unicode: {error}") from None
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def begin(self) -> tuple[int, ...]:
        """The BOS token where the tokenizer adds one of its own accord; an EOS that it would add is left out."""
        added = tuple(self._tokenizer("")["input_ids"])
        return added[:1] if added and added[0] == self._tokenizer.bos_token_id else ()

    def spell(self, *tokens: int) -> str:
        """How tokens are written in a text, special ones too: `"Hello<|im_end|>"`."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    @property
    def bos(self) -> int | None:
        token: int | None = self._tokenizer.bos_token_id
        return token

    def _tail(self, messages: Sequence[Message], *, generate: bool) -> str:
        rendered = self.render((_QUESTION, _ANSWER, *messages), generate=generate)
        _, found, tail = rendered.partition(_ANSWER.content)
        if not found:
            raise DataError("the chat template must show the content of assistant messages, but it leaves it out")
        return tail


def as_dict(message: Message) -> dict[str, Any]:
    """A message in the shape that chat templates and OpenAI's API have for it, with what it has.

    `{"role": "tool", "content": "42", "tool_call_id": "call_0", "name": "python"}`; the arguments of calls are objects,
    not JSON in a text.
    """
    row: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.parts:
        row["content"] = [dict(part) for part in message.parts]
    if message.calls:
        row["tool_calls"] = [_call(call) for call in message.calls]
    if message.call_id:
        row["tool_call_id"] = message.call_id
    if message.name:
        row["name"] = message.name
    return row


def _call(call: ToolCall) -> dict[str, Any]:
    row: dict[str, Any] = {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
    return {"id": call.id, **row} if call.id else row


def as_message(turn: Turn) -> Message:
    """A turn as a transcript has it: without the text of its calls, where there are any."""
    return Message("assistant", turn.content, turn.calls) if turn.calls else Message("assistant", turn.text)


def joined(messages: Sequence[Message]) -> str:
    """Messages as a model without a template reads them."""
    return "\n".join(map(text_of, messages))


def text_of(message: Message) -> str:
    return "".join(part.get("text", "") for part in message.parts) if message.parts else message.content


def _ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
