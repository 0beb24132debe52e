"""The text of an answer as a stream, while its tokens come. Text that was sent is never taken back.

Text that later tokens may change is held back: half a character, the beginning of a stop string, and, where tools may
be called, everything from the first sign of a call. Where the model's format has thinking, the whole text waits for the
end, because it may turn out to be thinking. So the joined pieces are the text of the whole answer, byte for byte.
"""

import re
from collections.abc import Sequence
from typing import Any

from kitae.data.chat import Chat
from kitae.data.tool_calls import family_of, template_of
from kitae.serving.refusals import Refused
from kitae.serving.token_text import TokenText
from kitae.types import Tool

_BROKEN = "\ufffd"
_BYTE_RE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SIGN_RE = re.compile(r"[<\[{`|]")
"""A tool call or thinking may begin with one of these characters, in the format of any model."""


_EARLY = ("qwen", "hermes", "smollm2", "qwen-xml", "llama")  # families in which text before a call is content


def streams_early(tokenizer: Any) -> bool:
    """Whether the text before a tool call is content, whatever follows it, so that it can be sent at once."""
    return family_of(tokenizer) in _EARLY and "<think>" not in template_of(tokenizer)


class DecodedText:
    """The text of tokens, as far as later tokens cannot change it.

    Only a window of the last tokens is decoded; it moves on where a character ends. Consecutive tokens that stand for
    one byte each are decoded together, when a token of another kind follows.
    """

    def __init__(self, chat: Chat, token_text: TokenText) -> None:
        self._chat, self._token_text = chat, token_text
        self._tokens: list[int] = []
        self._start = self._end = 0  # the part of the window that is in the text already
        self.text = ""

    def add(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens
        if not self._tokens or _BYTE_RE.fullmatch(self._token_text.piece(self._tokens[-1])):
            return
        known = self._chat.decode(self._tokens[self._start : self._end])
        window = self._chat.decode(self._tokens[self._start :])
        if len(window) > len(known) and not window.endswith(_BROKEN):
            self.text += window[len(known) :]
            self._start, self._end = self._end, len(self._tokens)


class GrowingAnswer:
    """`growing.add(tokens)` returns the new text that is certain; `growing.end(content)` returns the rest."""

    def __init__(
        self,
        chat: Chat,
        token_text: TokenText,
        stops: Sequence[str] = (),
        tools: Sequence[Tool] = (),
        early: bool = True,
    ) -> None:
        """early: whether what comes first is certain to be content, see `streams_early`."""
        self._token_text, self._stops, self._tools = token_text, tuple(stops), tuple(tools)
        self._decoded = DecodedText(chat, token_text)
        self._sent = ""
        self._searched = 0  # no stop string begins before
        self._sure = early  # what comes next is certain to be content

    def add(self, tokens: Sequence[int]) -> str:
        if not self._sure:
            return ""
        self._decoded.add(tokens)
        if self._tools and any(map(self._token_text.is_special, tokens)):
            self._sure = False  # a special token may mark a call, and is not in the text
            return ""
        text = self._decoded.text
        certain = text[: self._undecided(text)]
        if self._tools:
            certain = self._content(certain)
        return self._send(certain)

    def end(self, content: str) -> str:
        """Raises `Refused` where text that was sent is thinking after all: the model closed what it never began."""
        if not content.startswith(self._sent):
            raise Refused("the answer cannot be told in pieces: ask for it without stream", 500, code="not_streamable")
        return self._send(content)

    def _send(self, certain: str) -> str:
        news = certain[len(self._sent) :]
        self._sent += news
        return news

    def _undecided(self, text: str) -> int:
        """The position of the first stop string in the text, or of the beginning of one at its end."""
        if not self._stops:
            return len(text)
        longest = max(map(len, self._stops))
        starts = [at for stop in self._stops if (at := text.find(stop, self._searched)) >= 0]
        first = max(self._searched, len(text) - longest + 1)  # the text may end in a part of a stop string from here
        tails = [at for at in range(first, len(text)) if any(stop.startswith(text[at:]) for stop in self._stops)]
        self._searched = first  # a stop string that begins before would be complete
        if starts:
            self._sure = False
        return min([*starts, *tails, len(text)])

    def _content(self, certain: str) -> str:
        """The text up to the first sign of a call. Spaces around it are held back: content may leave them out."""
        if sign := _SIGN_RE.search(certain, len(self._sent)):
            self._sure = False
            certain = certain[: sign.start()]
        if not certain.strip() or certain[0].isspace():
            self._sure = self._sure and not certain.strip()
            return self._sent
        return certain.rstrip()
