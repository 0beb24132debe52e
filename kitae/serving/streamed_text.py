"""The text of an answer while its tokens come: what is told of it is never taken back.

Held back is whatever later tokens may change: half a character, the beginning of a stop string, and, where tools may be
called, everything from the first sign of a call on. Where a format has thinking, all of it waits for the end: what was
said already may turn out to be that. So the pieces joined are what is read when all tokens are there, byte for byte.
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
"""With one of these a call of a tool, or thinking, may begin, in any model's format."""


_EARLY = ("qwen", "hermes", "smollm2", "qwen-xml", "llama")  # families in which text before a call is content


def tells_early(tokenizer: Any) -> bool:
    """Whether what precedes a call, in an answer that may have some, is content whatever follows."""
    return family_of(tokenizer) in _EARLY and "<think>" not in template_of(tokenizer)


class SpokenText:
    """The text of tokens, as far as later ones cannot change it.

    A window of the last tokens is decoded, not all of them; it moves on where a character ends. Tokens that stand for
    one byte each are waited for until another one follows: a run of them is decoded as a whole.
    """

    def __init__(self, chat: Chat, token_text: TokenText) -> None:
        self._chat, self._spelling = chat, token_text
        self._tokens: list[int] = []
        self._start = self._end = 0  # of the part of the window that is in the text already
        self.text = ""

    def hear(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens
        if not self._tokens or _BYTE_RE.fullmatch(self._spelling.piece(self._tokens[-1])):
            return
        known = self._chat.decode(self._tokens[self._start : self._end])
        window = self._chat.decode(self._tokens[self._start :])
        if len(window) > len(known) and not window.endswith(_BROKEN):
            self.text += window[len(known) :]
            self._start, self._end = self._end, len(self._tokens)


class GrowingAnswer:
    """`growing.hear(tokens)` gives the further text that is certain; `growing.end(content)` the rest of it."""

    def __init__(
        self,
        chat: Chat,
        token_text: TokenText,
        stops: Sequence[str] = (),
        tools: Sequence[Tool] = (),
        early: bool = True,
    ) -> None:
        """early: see `tells_early`."""
        self._spelling, self._stops, self._tools = token_text, tuple(stops), tuple(tools)
        self._spoken = SpokenText(chat, token_text)
        self._told = ""
        self._searched = 0  # no stop string begins before
        self._sure = early or not tools  # what comes next is certain to be content

    def hear(self, tokens: Sequence[int]) -> str:
        if not self._sure:
            return ""
        self._spoken.hear(tokens)
        if self._tools and any(map(self._spelling.is_special, tokens)):
            self._sure = False  # it may mark a call, and is not in the text
            return ""
        text = self._spoken.text
        certain = text[: self._undecided(text)]
        if self._tools:
            certain = self._content(certain)
        return self._tell(certain)

    def end(self, content: str) -> str:
        """Raises `Refused` where what was told has become thinking: a model that knows of none has closed some."""
        if not content.startswith(self._told):
            raise Refused("the answer cannot be told in pieces: ask for it without stream", 500, code="not_streamable")
        return self._tell(content)

    def _tell(self, certain: str) -> str:
        news = certain[len(self._told) :]
        self._told += news
        return news

    def _undecided(self, text: str) -> int:
        """Where the first stop string begins, whole or in part."""
        if not self._stops:
            return len(text)
        longest = max(map(len, self._stops))
        starts = [at for stop in self._stops if (at := text.find(stop, self._searched)) >= 0]
        first = max(self._searched, len(text) - longest + 1)  # at which the text may end in a part of one
        tails = [at for at in range(first, len(text)) if any(stop.startswith(text[at:]) for stop in self._stops)]
        self._searched = first  # one that began before would be there whole
        if starts:
            self._sure = False
        return min([*starts, *tails, len(text)])

    def _content(self, certain: str) -> str:
        """Up to the first sign of a call. Spaces around content may be left out of it: they wait for what follows."""
        if sign := _SIGN_RE.search(certain, len(self._told)):
            self._sure = False
            certain = certain[: sign.start()]
        if not certain.strip() or certain[0].isspace():
            self._sure = self._sure and not certain.strip()
            return self._told
        return certain.rstrip()
