"""Conversations into tokens and masks, by the chat template that the model was trained with.

Templates are never patched. A turn of the assistant is found by rendering what was said before it, up to where the
model would begin to answer, and then with the answer: what the second has more is what the model must learn to say, up
to the token that stops it. So the tokens before an answer are those that the model will read when it is asked, and the
stop token is always trained. What a template does between two turns (system lines, results of tools) is never trained.

A template is refused where that cannot be true: it must leave the beginning of a conversation as it is when an answer
is added, must end an answer with a stop token, and, where several turns are trained at once, must show old answers as
it showed them when they were new. A template that rewrites old answers (that drops their thinking, say) can be trained
with `train_on = "last"`, which shows the history as the model will see it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kitae.data.chat import Chat, joined, text_of
from kitae.data.config import ExamplesConfig
from kitae.data.data_files import clip
from kitae.data.examples import Conversation, Example, ExampleStream, after_user
from kitae.errors import DataError
from kitae.types import BoolArray, IntArray, Message

TrainOn = Literal["all", "last", "completion"]


@dataclass(frozen=True, slots=True)
class Rendered:
    """`Rendered(tokens_T=[1, 5, 9, 42, 2], mask_T=[0, 0, 0, 1, 1], prompt_length=3)`.

    prompt_length: the first position that is trained on; position 0 never is, because nothing predicts it. cut: how
    many tokens at the end did not fit.
    """

    tokens_T: IntArray
    mask_T: BoolArray
    prompt_length: int
    cut: int = 0

    @property
    def length(self) -> int:
        """Tokens, those that were cut off included."""
        return len(self.tokens_T) + self.cut


Piece = tuple[tuple[int, ...], bool]
"""Tokens, and whether they are trained on."""


class Renderer:
    """`Renderer(chat, train_on="all", max_tokens=2048).render(conversation)`; what is longer is cut off at the end."""

    def __init__(self, chat: Chat, train_on: TrainOn, max_tokens: int) -> None:
        self._chat = chat
        self._train_on = train_on
        self._max_tokens = max_tokens
        self._stops = tuple(map(chat.spell, chat.stop_tokens))
        # Some tokenizers put a space before every text; there a piece has other tokens than the same piece in a text.
        self._additive = chat.encode("x\n") + chat.encode("y") == chat.encode("x\ny")

    def render(self, conversation: Conversation) -> Rendered:
        pieces = list(self._pieces(conversation))
        tokens = [token for piece, _ in pieces for token in piece]
        mask = [trained for piece, trained in pieces for _ in piece]
        if self._chat.bos is not None and tokens[:2] == [self._chat.bos] * 2:
            bos = self._chat.spell(self._chat.bos)
            raise DataError(
                f"an example must begin with {bos!r} once, got it twice: the chat template and the text say it"
            )
        mask[0] = False
        return _cut(tokens, mask, self._max_tokens)

    def _pieces(self, conversation: Conversation) -> Iterator[Piece]:
        if conversation.text is not None:
            return self._document(conversation.text)
        turns = trained_turns(conversation, self._train_on)
        return self._plain(conversation, turns) if self._chat.plain else self._templated(conversation, turns)

    def _document(self, text: str) -> Iterator[Piece]:
        """Plain text from BOS, where the tokenizer has the habit, to EOS; a text may have either already."""
        tokens, begin, end = self._chat.encode(text), self._chat.begin(), self._chat.stop_tokens[:1]
        if not begin or tokens[:1] != begin:
            yield begin, False
        yield tokens if tokens[-1:] == end else tokens + end, True

    def _plain(self, conversation: Conversation, turns: Sequence[int]) -> Iterator[Piece]:
        """Without a template: texts with a newline between them, and EOS after what is trained."""
        messages, shown = conversation.messages, 0
        if conversation.tools:
            raise DataError(f"a model needs a chat template to be told of tools, got {len(conversation.tools)} tools")
        for turn in turns:
            before = joined(messages[shown:turn])
            yield self._chat.encode(f"\n{before}") if shown else self._chat.begin() + self._chat.encode(before), False
            if messages[turn].calls:
                raise DataError("a model needs a chat template to call tools, and it has none")
            self._refuse_stops(messages[turn])
            yield self._chat.encode(text_of(messages[turn])) + self._chat.stop_tokens[:1], True
            shown = turn + 1

    def _templated(self, conversation: Conversation, turns: Sequence[int]) -> Iterator[Piece]:
        shown = ""
        tokens: tuple[int, ...] = ()
        for text, trained in self._texts(conversation, turns):
            whole = () if self._additive else self._chat.encode(shown + text)
            follows = bool(whole) and whole[: len(tokens)] == tokens
            piece = whole[len(tokens) :] if follows else self._chat.encode(text)
            if trained and piece[-1] not in self._chat.stop_tokens:
                raise DataError(f"the tokenizer must read the end of {clip(repr(text[-40:]))} as a token that stops")
            yield piece, trained
            shown, tokens = shown + text, tokens + piece

    def _texts(self, conversation: Conversation, turns: Sequence[int]) -> Iterator[tuple[str, bool]]:
        """The conversation cut at the ends of what is trained."""
        messages, tools = conversation.messages, conversation.tools
        shown = ""
        for turn in turns:
            asked = self._chat.render(messages[:turn], tools=tools)
            answered = self._chat.render(messages[: turn + 1], generate=False, tools=tools)
            if not asked.startswith(shown):
                raise DataError(
                    f"the chat template must show old answers as it showed them when they were new, but a later turn "
                    f"changes {_differ(shown, asked)}; data.train_on='last' trains the last answer alone"
                )
            if not answered.startswith(asked):
                raise DataError(
                    "the chat template must show an answer after what it asks the model to go on from, but it changes "
                    f"{_differ(asked, answered)}"
                )
            self._check_tools(conversation, asked)
            answer = self._answer(messages[turn], answered[len(asked) :])
            yield asked[len(shown) :], False
            yield answer, True
            shown = asked + answer

    def _answer(self, message: Message, text: str) -> str:
        """What the model must say of `text`, which the template shows for the message: all up to the first stop."""
        self._refuse_stops(message)
        ends = [text.index(stop) + len(stop) for stop in self._stops if stop in text]
        if not ends:
            raise DataError(
                "the chat template must end a turn of the assistant with a token that stops the model "
                f"({', '.join(map(repr, self._stops))}), but it ends with {clip(repr(text[-40:]))}: no answer would end"
            )
        answer = text[: min(ends)]
        missing = [said for said in _said(message) if _bare(said) not in _bare(answer)]
        if missing:
            raise DataError(f"the chat template must show all of an answer, but it leaves out {clip(repr(missing[0]))}")
        return answer

    def _refuse_stops(self, message: Message) -> None:
        found = [stop for stop in self._stops for said in _said(message) if stop in said]
        if found:
            raise DataError(f"an answer must not spell out {found[0]!r}, which ends a turn")

    def _check_tools(self, conversation: Conversation, asked: str) -> None:
        unknown = [tool["function"]["name"] for tool in conversation.tools if tool["function"]["name"] not in asked]
        if unknown:
            raise DataError(f"the chat template must tell the model of its tools, but it leaves out {unknown[0]!r}")


def trained_turns(conversation: Conversation, train_on: TrainOn) -> list[int]:
    """The indices of the messages that are trained on; at least one."""
    messages, start = conversation.messages, conversation.prompt
    if train_on == "completion":
        start = start or after_user(messages)
    turns = [i for i, message in enumerate(messages) if message.role == "assistant" and i >= start]
    if not turns:
        raise DataError(f"an example must have a turn of the assistant to train on, got {len(messages)} messages")
    return turns[-1:] if train_on == "last" else turns


def fit_stream(stream: ExampleStream, renderer: Renderer, config: ExamplesConfig) -> ExampleStream:
    """The stream with the examples that fit into `data.max_tokens`; its `skipped` says what was left out.

    Every example is rendered once, so that what a template refuses is raised before training, with the example's id.
    """
    examples = {example.id: example for source in stream.sources for example in source}
    refused, long = _unfit(examples.values(), renderer, config)
    if refused:
        first = next(iter(refused.items()))
        stream = stream.without(
            refused.keys(), f"cannot be rendered and are left out (data.skip_bad_rows); the first: {': '.join(first)}"
        )
    return stream.without(long, f"do not fit into data.max_tokens = {config.max_tokens} and are left out")


def fit_list(examples: Sequence[Example], renderer: Renderer, config: ExamplesConfig) -> list[Example]:
    """The held-out examples that fit."""
    refused, long = _unfit(examples, renderer, config)
    fit = [example for example in examples if example.id not in refused.keys() | long]
    if examples and not fit:
        raise DataError(f"no held-out example fits into data.max_tokens = {config.max_tokens}")
    return fit


def _unfit(examples: Iterable[Example], renderer: Renderer, config: ExamplesConfig) -> tuple[dict[str, str], set[str]]:
    """The ids of those that cannot be rendered, each with the reason, and of those that are too long."""
    refused, long = dict[str, str](), set[str]()
    for example in examples:
        try:
            rendered = [renderer.render(conversation) for conversation in example.conversations]
        except DataError as error:
            if not config.skip_bad_rows:
                raise DataError(f"{example.id}: {error}") from None
            refused[example.id] = str(error)
            continue
        length = max(made.length for made in rendered)
        if length > config.max_tokens and config.too_long == "refuse":
            raise DataError(
                f"{example.id}: an example must fit into data.max_tokens = {config.max_tokens}, got {length} tokens; "
                "data.too_long='drop' leaves such examples out"
            )
        cut = config.too_long == "truncate"
        if not all(made.mask_T.any() and (cut or not made.cut) for made in rendered):
            long.add(example.id)
    return refused, long


def _cut(tokens: list[int], mask: list[bool], limit: int) -> Rendered:
    if True not in mask:
        raise DataError("an example must have a token to train on after its first, got none")
    first = mask.index(True)
    kept = slice(0, limit)
    return Rendered(
        np.array(tokens[kept], dtype=np.int64), np.array(mask[kept], dtype=np.bool_), first, max(0, len(tokens) - limit)
    )


def _said(message: Message) -> list[str]:
    """What must be seen of an answer: its text, the names of tools that it calls, and the values it gives them."""
    values = [value for call in message.calls for value in call.arguments.values() if isinstance(value, str)]
    return [text_of(message), *(call.name for call in message.calls), *values]


def _bare(text: str) -> str:
    return "".join(text.split())


def _differ(old: str, new: str) -> str:
    """Where two texts part: `"'<think>Hm</think>' into 'Yes'"`."""
    same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    start = max(0, same - 20)
    return f"{old[start : same + 30]!r} into {new[start : same + 30]!r}"
