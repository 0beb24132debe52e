"""Messages to tokens and back, by the chat template that the model was trained with.

Text becomes tokens only on its way in. What the model sampled stays the tokens that it sampled: a turn that follows
is encoded on its own and appended, and the conversation so far is never rendered again.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from kitae.data.pictures import MARK, MARKED, PICTURE, sources_of
from kitae.data.tool_calls import CLOSE, OPEN, CallReader, special_ids, template_of
from kitae.errors import DataError
from kitae.types import Message, Tool, ToolCall, Turn

_QUESTION = Message("user", "q")
_ANSWER = Message("assistant", "answerendshere")
"""Stands for the model's turn when a template is asked what follows one; an improbable word, so that it is found."""
_WORD = _ANSWER.content
_PROBE: Tool = {"type": "function", "function": {"name": _WORD, "description": "d", "parameters": {"type": "object"}}}
_CALLING = Message("assistant", calls=(ToolCall(_WORD, {}, "call_0"),))
_ESCAPE = "\U00100000"  # a character that nobody uses, before one that says which special token stands here
_ITSELF = {_ESCAPE: 2 * _ESCAPE}
_ESCAPED = re.compile(f"{_ESCAPE}.", re.DOTALL)
_TOLD = (
    "You can call these functions:\n<tools>\n{tools}\n</tools>\nTo call one, answer with "
    f'{OPEN}{{{{"name": NAME, "arguments": {{{{…}}}}}}}}{CLOSE}'
    ". You will then be given the result."
)


class Chat:
    """A Hugging Face tokenizer and its template: `Chat(tokenizer, model.generation_config)`.

    Without a template, messages are their contents joined by newlines. In prompts, a template that does not tell of
    tools, or does not show calls, is helped: the system message tells of them, in the manner of Hermes.

    What tools and environments say stays text: special tokens spelled out in it are not read as such, in `encode_turn`
    in any message, in `encode_prompt` in messages of tools. In other messages of a prompt, which are the data's, they
    are read as special tokens: data from strangers should not contain them. With `shields`, nothing but the template
    says special tokens: those in any message, in calls and in descriptions of tools stay text.

    Where the tokenizer has a reader of pictures, messages may show some. In a rendered text a picture stands as a mark,
    which becomes tokens that are places of it; what a message spells of the tokens that mark pictures stays text.
    """

    def __init__(
        self, tokenizer: Any, generation_config: Any = None, *, shields: bool = False, most_bytes: int | None = None
    ) -> None:
        """most_bytes: a longer text is refused before it becomes tokens."""
        self.tokenizer, self.shields, self._most_bytes = tokenizer, shields, most_bytes
        self._pictures: PictureTexts | None = getattr(tokenizer, "kitae_reader", None)
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
            tokens = self.begin() + (self.encode_text if self.shields else self.encode)(joined(messages))
        else:
            shown = [self._shielded(m, None if self.shields or m.role == "tool" else _ITSELF) for m in messages]
            tokens = self._encode_shielded(self._helped(shown, self._shield(tools, None if self.shields else _ITSELF)))
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
        shown = self.shielded(messages)
        if self.plain:
            return self._encode_shielded("\n" + joined(shown))
        tail = self._after_answer(shown)
        if tail is None:
            return self._encode_shielded(self._after_calls(shown, closed))
        tokens = self._encode_shielded(tail)
        if closed:
            for position, (token, last) in enumerate(zip(tokens, self.closing(), strict=False)):
                if token in self.stop_tokens and token == last:
                    return tokens[position + 1 :]
                if token != last:  # here the closing of the turn is over, or old turns are closed by another token
                    return (
                        tokens[position + 1 :] if last in self.stop_tokens and token in self.special_tokens else tokens
                    )
        return tokens

    def closing(self) -> tuple[int, ...]:
        """The tokens that the template writes after the last answer of a conversation."""
        return self.encode(self._tail((), generate=False))

    def read(
        self, tokens: Sequence[int], stops: Sequence[str] = (), tools: Sequence[Tool] = (), thoughts: bool = False
    ) -> Turn:
        """What the model said, cut before a stop string; with its calls, if it was told of tools. thoughts: thinking is
        told from content also without tools."""
        text = self.decode(tokens)
        cuts = [text.find(stop) for stop in stops if stop in text]
        text = text[: min(cuts)] if cuts else text
        return self._reader.read(tokens, tools, text) if tools or thoughts else Turn(text, text)

    @cached_property
    def thinks(self) -> bool:
        """Whether the model's format has thinking."""
        return "<think>" in template_of(self.tokenizer) or self.family in ("harmony", "template")

    @cached_property
    def _reader(self) -> CallReader:
        return CallReader(self.tokenizer)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text without special tokens, its spaces as they are."""
        ids = np.array(tokens, dtype=np.int64)  # of a list, transformers would look at each element
        ids = ids[ids < PICTURE]
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def render(self, messages: Sequence[Message], *, generate: bool = True, tools: Sequence[Tool] = ()) -> str:
        """The text that the template makes of messages; `generate` adds what the model answers after."""
        pictures = list(sources_of(messages))
        if pictures and (self._pictures is None or self.plain):
            raise DataError(
                "a message shows a picture, but the model has no processor of pictures that Kitae knows, or no template"
            )
        if self._pictures is not None:
            messages = [self._shielded(m, self._of_pictures) for m in messages]
        turns = [as_dict(m) for m in messages]
        told = {"tools": [dict(tool) for tool in tools]} if tools else {}
        try:
            text: str = self.tokenizer.apply_chat_template(
                turns, add_generation_prompt=generate, tokenize=False, **told
            )
        except Exception as error:  # the template is a program that came with the model
            raise DataError(f"the chat template refuses the roles {[m.role for m in messages]}: {error}") from error
        return text if self._pictures is None else _with_pictures(text, self._pictures, pictures)

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a text as it is, with nothing added. With `shields`, what is shielded in it stays text."""
        self._check_bytes(text)
        return self._encode_shielded(text) if self.shields or self._pictures else self._encode(text)

    def encode_text(self, text: str) -> tuple[int, ...]:
        """The tokens of a text in which special tokens that are spelled out stay text."""
        return self._encode_shielded(self._shield(text))

    def _encode(self, text: str, **options: bool) -> tuple[int, ...]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"a message must be valid Unicode: {error}") from None
        shown: list[int] = []

        def places(mark: "re.Match[str]") -> str:
            assert self._pictures is not None
            shown.extend([PICTURE + int(mark[1], 16)] * int(mark[2], 16))
            return self._pictures.soft * int(mark[2], 16)

        if self._pictures is not None and not options:  # what people typed stays as it is
            text = MARKED.sub(places, text)
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False, **options)["input_ids"]
        if shown:
            assert self._pictures is not None
            soft, rest = self._pictures.soft_id, iter(shown)
            if tokens.count(soft) != len(shown):
                raise DataError(f"a message must not spell {self._pictures.soft!r}, which stands for pictures")
            tokens = [next(rest) if token == soft else token for token in tokens]
        return tuple(tokens)

    def begin(self) -> tuple[int, ...]:
        """The BOS token where the tokenizer adds one of its own accord; an EOS that it would add is left out."""
        added = tuple(self.tokenizer("")["input_ids"])
        return added[:1] if added and added[0] == self.tokenizer.bos_token_id else ()

    def spell(self, *tokens: int) -> str:
        """How tokens are written in a text, special ones too: `"Hello<|im_end|>"`."""
        soft = 0 if self._pictures is None else self._pictures.soft_id
        ids = [soft if token >= PICTURE else token for token in tokens]
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    @property
    def bos(self) -> int | None:
        token: int | None = self.tokenizer.bos_token_id
        return token

    def _helped(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        """What the template makes of messages, with tools and calls in their texts where it leaves them out."""
        if tools and not self.tells_tools:
            messages, tools = _with_tools_told(messages, tools), ()
        if any(m.calls for m in messages) and not self.shows_calls:
            messages = [_with_calls_written(m) for m in messages]
        return self.render(messages, tools=tools)

    @cached_property
    def tells_tools(self) -> bool:
        """Whether the template tells the model of tools."""
        with suppress(DataError):
            return _WORD in self.render((_QUESTION,), tools=(_PROBE,))
        return False

    @cached_property
    def shows_calls(self) -> bool:
        """Whether the template shows what an assistant asked of tools."""
        with suppress(DataError):
            return _WORD in self.render((_QUESTION, _CALLING), generate=False)
        return False

    def _after_answer(self, messages: Sequence[Message]) -> str | None:
        """What follows an answer; None: the template wants to see the calls to which these messages answer."""
        try:
            return self._tail(messages, generate=True)
        except DataError:
            if not any(m.role == "tool" for m in messages):
                raise
            return None

    def _after_calls(self, messages: Sequence[Message], closed: bool) -> str:
        """What follows calls that `messages` answer, from the token that ends the turn, or from after it."""
        calls = tuple(ToolCall(m.name or "tool", {"x": _WORD}, m.call_id) for m in messages if m.role == "tool")
        rendered = self.render((_QUESTION, Message("assistant", calls=calls), *messages))
        tail = rendered.rpartition(_WORD)[2]
        ends = [(tail.find(stop), stop) for stop in map(self.spell, self.stop_tokens) if stop in tail]
        if not ends:
            return tail
        position, stop = min(ends)
        return tail[position + len(stop) * closed :]

    @cached_property
    def special_tokens(self) -> frozenset[int]:
        """All of the tokenizer's."""
        return special_ids(self.tokenizer)

    @property
    def family(self) -> str:
        """How the model writes calls of tools: see `kitae.data.tool_calls`."""
        return self._reader.family

    @cached_property
    def _stands(self) -> Mapping[str, str]:
        """What stands for each special token that is spelled out, and for the escape character itself."""
        names = {self.tokenizer.convert_ids_to_tokens(i) for i in self.special_tokens} - {"", None}
        longest_first = sorted(sorted(names), key=len, reverse=True)  # one may contain another
        if self._pictures is not None:
            longest_first.append(MARK)
        return _ITSELF | {name: _ESCAPE + chr(ord(_ESCAPE) + i) for i, name in enumerate(longest_first, 1)}

    @cached_property
    def _of_pictures(self) -> Mapping[str, str]:
        """The same for those that mark pictures, and for the character that marks begin with."""
        assert self._pictures is not None
        names = {self._pictures.soft, self._pictures.placeholder}
        return {n: s for n, s in self._stands.items() if n in names or n == MARK}

    def shielded(self, messages: Sequence[Message]) -> list[Message]:
        """Messages in which characters of their own stand for special tokens that are spelled out.

        So a template treats the messages as ever (it may trim them, or write them as JSON), and when the whole becomes
        tokens it is known which special tokens are the template's own.
        """
        return [self._shielded(message) for message in messages]

    def _shielded(self, message: Message, stands: Mapping[str, str] | None = None) -> Message:
        return replace(
            message,
            content=self._shield(message.content, stands),
            name=self._shield(message.name, stands),
            call_id=self._shield(message.call_id, stands),
            parts=tuple(p if p.get("type") == "image" else self._shield(p, stands) for p in message.parts),
            calls=tuple(
                ToolCall(*(self._shield(x, stands) for x in (c.name, c.arguments, c.id))) for c in message.calls
            ),
        )

    def _shield(self, said: Any, stands: Mapping[str, str] | None = None) -> Any:
        """A text, or anything made of texts. stands: other ones than those of all special tokens."""
        match said:
            case str():
                for name, stand in (self._stands if stands is None else stands).items():
                    said = said.replace(name, stand) if name in said else said
            case Mapping():
                return {self._shield(name, stands): self._shield(value, stands) for name, value in said.items()}
            case list() | tuple():
                return type(said)(self._shield(value, stands) for value in said)
        return said

    def _encode_shielded(self, text: str) -> tuple[int, ...]:
        """The tokens of a text in which other characters stand for special tokens that are to stay text.

        As the tokenizer does it, the text is cut at special tokens, here the template's own, and what lies between two
        of them becomes tokens in one piece.
        """
        self._check_bytes(text)
        own = [re.escape(name) for name in self._stands if name in text and name not in (_ESCAPE, MARK)]
        if self._pictures is not None and MARK in text:
            own.append(MARKED.pattern)
        places = list(re.finditer("|".join(own), text)) if own else []
        tokens: list[int] = []
        begin = 0
        for found in [*places, None] if _ESCAPE in text else ():
            piece = text[begin : found.start() if found else len(text)]
            if _ESCAPE in piece:
                tokens += self._encode(_ESCAPED.sub(self._spelled, piece), split_special_tokens=True)
            else:
                tokens += self._encode(piece) if piece else ()
            if found:
                tokens += self._encode(found[0])
                begin = found.end()
        tokens = tokens or [*self._encode(text)]
        if self.shields and len(places) < sum(map(self._commands.__contains__, tokens)):
            raise DataError("a message must not spell special tokens in other letters, got some that become tokens")
        return tuple(tokens)

    def _check_bytes(self, text: str) -> None:
        most = self._most_bytes
        if most is not None and (size := len(text.encode("utf-8", "replace"))) > most:
            raise DataError(f"a prompt must have at most {most} bytes, as many as the context can hold, got {size}")

    def _spelled(self, stand: "re.Match[str]") -> str:
        return self._names.get(stand[0], stand[0])

    @cached_property
    def _names(self) -> Mapping[str, str]:
        return {stand: name for name, stand in self._stands.items()}

    @cached_property
    def _commands(self) -> frozenset[int]:
        """The special tokens that plain text never becomes."""
        return self.special_tokens - {self.tokenizer.unk_token_id}

    def _tail(self, messages: Sequence[Message], *, generate: bool) -> str:
        rendered = self.render((_QUESTION, _ANSWER, *messages), generate=generate)
        _, found, tail = rendered.partition(_ANSWER.content)
        if not found:
            raise DataError("the chat template must show the content of assistant messages, but it leaves it out")
        return tail


class PictureTexts(Protocol):
    """What a model's processor says of pictures. placeholder: what the template writes for one; soft, soft_id: the
    token of one place; `text`: what stands for the picture of a source, its places as a mark."""

    placeholder: str
    soft: str
    soft_id: int

    def text(self, source: str) -> str: ...


def _with_pictures(text: str, reader: PictureTexts, sources: Sequence[str]) -> str:
    pieces = text.split(reader.placeholder)
    if len(pieces) != len(sources) + 1:
        raise DataError(
            f"the chat template must show each of {len(sources)} pictures as {reader.placeholder!r} once, got "
            f"{len(pieces) - 1} of these"
        )
    return pieces[0] + "".join(reader.text(s) + piece for s, piece in zip(sources, pieces[1:], strict=True))


def longest_token(tokenizer: Any) -> int:
    """The bytes that a token stands for at most. Byte-level vocabularies write some bytes with two."""
    return max((len(piece.encode("utf-8", "replace")) for piece in tokenizer.get_vocab()), default=1)


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


def _with_tools_told(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Messages of which the first, the system's, tells of tools."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    told = _TOLD.format(tools=listed)
    if messages and messages[0].role == "system":
        return [replace(messages[0], content=f"{text_of(messages[0])}\n\n{told}", parts=()), *messages[1:]]
    return [Message("system", told), *messages]


def _with_calls_written(message: Message) -> Message:
    """A message in which calls are part of the text, as `CallReader` reads them."""
    if not message.calls:
        return message
    written = [
        f"{OPEN}{json.dumps({'name': c.name, 'arguments': dict(c.arguments)}, ensure_ascii=False)}{CLOSE}"
        for c in message.calls
    ]
    return replace(message, content="\n".join(filter(None, [text_of(message), *written])), calls=(), parts=())


def as_message(turn: Turn) -> Message:
    """A turn as a transcript has it: without the text of its calls, where there are any."""
    return (
        Message("assistant", turn.content, turn.calls)
        if turn.calls
        else Message("assistant", turn.text, problem=turn.problem)
    )


def joined(messages: Sequence[Message]) -> str:
    """Messages as a model without a template reads them."""
    if any(sources_of(messages)):
        raise DataError("a message shows a picture, which a model without a chat template cannot be shown")
    return "\n".join(map(text_of, messages))


def text_of(message: Message) -> str:
    return "".join(part.get("text", "") for part in message.parts) if message.parts else message.content


def _ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
