"""Text of models, data and programs on a terminal: what would steer the terminal, or turn lines around, is spelled out.

An escape sequence can colour, hide or overwrite what else is shown, set the window's title or answer in the reader's
place; direction marks show text in another order than it has; invisible characters hide. All of them are shown as
`\\u001b`, which is also how JSON spells them.
"""

import re
from typing import Any, TextIO

_STEERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\u3164\ud800-\udfff\ufeff\uffa0\ufff0-\ufffb\U000e0000-\U000e0fff]"
)
"""Controls but tab and line feed, direction marks, invisible characters but joiners, halves of surrogate pairs."""


def visible(text: str) -> str:
    """`visible("a\\x1b[2Jb")` is `"a\\\\u001b[2Jb"`."""
    return _STEERS.sub(lambda found: _spelled(found[0]), text)


def _spelled(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))


class PlainOutput:
    """A text stream whose text is made visible: `sys.stdout = PlainOutput(sys.stdout)`.

    What draws on a terminal itself, from text that is visible already, writes to `terminal_of(sys.stdout)`.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(visible(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def terminal_of(stream: TextIO) -> TextIO:
    return stream.stream if isinstance(stream, PlainOutput) else stream
