"""Requests become prompts: their texts as tokens, within bounds that are checked before anything becomes tokens.

Bodies are read within bounds of size, time and memory, and all work with them is done in threads.

    body ─► a lane, which is one thread: small requests do not wait for large ones ─► JSON ─► what `make` makes of it

So whatever a request holds, the event loop goes on meanwhile, and other requests are answered.
"""

import asyncio
import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from starlette.requests import Request

from kitae.data.chat import Chat, longest_token
from kitae.errors import DataError
from kitae.serving.http_bodies import Json, receive_body, unless_gone
from kitae.serving.refusals import Refused
from kitae.serving.request_bodies import READING, ReadingLimits, read_json
from kitae.types import Message, Tool

ControlTokens = Literal["never", "completions", "always"]
"""Where special tokens that a request spells out are read as such, if it does not say: nowhere, in prompts that are
one text, or in messages too. "never": also not if it says."""


@dataclass(frozen=True, slots=True)
class PromptReader:
    """`PromptReader.of(tokenizer, generation_config, context=8192, most_answers=512).encode_chat(messages)`.

    context: tokens that a prompt may have at most, and messages too, because each becomes a token at least; 0: whoever
    answers knows. encodes: messages become tokens here; otherwise the model that answers makes them tokens.
    """

    reading: Chat
    shielding: Chat
    context: int = 0
    most_answers: int = 0
    control_tokens: ControlTokens = "completions"
    encodes: bool = True

    @staticmethod
    def of(
        tokenizer: Any,
        generation_config: Any,
        *,
        context: int,
        most_answers: int,
        control_tokens: ControlTokens = "completions",
    ) -> "PromptReader":
        """It has a tokenizer of its own, because one must not be used by two threads at a time."""
        own = copy.deepcopy(tokenizer)
        most = context * longest_token(own)
        reading = Chat(own, generation_config, most_bytes=most)
        shielding = Chat(own, generation_config, shields=True, most_bytes=most)
        return PromptReader(reading, shielding, context, most_answers, control_tokens)

    @staticmethod
    def for_models(chat: Chat) -> "PromptReader":
        """One for models that make tokens of messages themselves."""
        return PromptReader(chat, chat, encodes=False)

    @property
    def chat(self) -> Chat:
        return self.reading

    def check_answers(self, prompts: int, each: int) -> None:
        if self.most_answers and prompts * each > self.most_answers:
            message = (
                f"one request may have at most {self.most_answers} answers, got {prompts} prompts times n = {each}"
            )
            raise Refused(message if prompts > 1 else message.replace("1 prompts times n = ", ""), param="n")

    def check_length(self, what: str, length: int) -> None:
        if self.context and length > self.context:
            message = f"{what} must fit into the context of {self.context} tokens, got {length}"
            raise Refused(message, param=what, code="context_length_exceeded")

    def encode_text(self, text: str, control_tokens: bool | None = None) -> tuple[int, ...]:
        """A text as it is, without a template, after the token that the tokenizer puts before every text."""
        chat = self._chat(control_tokens, self.control_tokens != "never")
        try:
            return chat.begin() + (chat.encode_text(text) if chat.shields else chat.encode(text))
        except DataError as error:
            raise Refused(str(error), param="prompt") from None

    def encode_chat(
        self, messages: tuple[Message, ...], tools: tuple[Tool, ...] = (), control_tokens: bool | None = None
    ) -> tuple[int, ...]:
        chat = self._chat(control_tokens, self.control_tokens == "always")
        try:
            return chat.encode_prompt(messages, tools)
        except DataError as error:
            raise Refused(str(error), param="messages") from None

    def encode_continued(
        self, messages: tuple[Message, ...], tools: tuple[Tool, ...] = (), control_tokens: bool | None = None
    ) -> tuple[int, ...]:
        """A chat whose last message is the beginning of the answer."""
        *before, begun = messages
        if begun.role != "assistant" or begun.calls or not before:
            message = "continue_final_message needs messages before a last one of the assistant without calls"
            raise Refused(f"{message}, got {begun.role!r} as the last", param="continue_final_message")
        prompt = self.encode_chat(tuple(before), tools, control_tokens)
        chat = self._chat(control_tokens, self.control_tokens == "always")
        try:
            return prompt + (chat.encode_text(begun.content) if chat.shields else chat.encode(begun.content))
        except DataError as error:
            raise Refused(str(error), param="messages") from None

    def _chat(self, asked: bool | None, usual: bool) -> Chat:
        if asked and self.control_tokens == "never":
            message = "control_tokens must be false here: special tokens that a text spells out stay text; got true"
            raise Refused(message, param="control_tokens")
        return self.reading if (usual if asked is None else asked) else self.shielding


T = TypeVar("T")
P = TypeVar("P")

_SMALL = 32 * 2**10  # bytes of a body that is read in a few milliseconds
_WAIT = 5  # seconds after which it makes sense to ask again where too much is being read


class RequestReader(Generic[P]):
    """`await RequestReader([PromptReader.of(…), …]).read(request, make)`: what `make(body, prompts)` returns.

    prompts: what makes tokens, for each of the two lanes; one for both where nothing in it is changed by use.
    """

    def __init__(self, prompts: Sequence[P], limits: ReadingLimits = READING) -> None:
        self.limits = limits
        self._prompts = prompts[0], prompts[-1]
        self._lanes = tuple(ThreadPoolExecutor(1, f"kitae-reading-{name}") for name in ("small", "large"))
        self._held = 0

    async def read(self, request: Request, make: Callable[[Json, P], T]) -> T:
        with self._room() as hold:
            body = await receive_body(request, self.limits, hold)
            large = len(body) > _SMALL

            def work() -> T:
                return make(read_json(body, self.limits), self._prompts[large])

            running = asyncio.get_running_loop().run_in_executor(self._lanes[large], work)
            return await (unless_gone(request.receive, running) if large else running)

    @contextmanager
    def _room(self) -> Iterator[Callable[[int], None]]:
        """`hold(bytes)` is called with the length that a body has reached."""
        mine = 0

        def hold(size: int) -> None:
            nonlocal mine
            size = size if size > _SMALL else 0
            if self._held - mine + size > self.limits.all_bytes:
                message = f"requests of at most {self.limits.all_bytes} bytes may be read at once, got more"
                raise Refused(f"{message}; try again in {_WAIT} s", 429, code="queue_full", seconds=_WAIT)
            self._held += size - mine
            mine = size

        try:
            yield hold
        finally:
            self._held -= mine
