"""What a model says cannot steer a terminal, nor show in another order than it has."""

import io
import json
import unicodedata

import pytest

from kitae.observe.plain_output import PlainOutput, terminal_of, visible


@pytest.mark.parametrize(
    "hostile",
    [
        "\x1b[2J", "\x1b]0;title\x07", "\x1b]8;;http://x\x07y", "\x9b31m", "a\rb", "a\x08b", "\x7f", "\x00", "\x0b\x0c",
        "\u202eabc", "\u2066x\u2069", "\u200f", "\u061c", "\ufeff", "\u200b", "\u2028", "\u2029", "\U000e0041",
        "\ud800", "\x85", "\u180e", "\u2060", "\ufff9", "\u3164",
    ],
)  # fmt: skip
def test_what_steers_is_spelled_out(hostile: str) -> None:
    shown = visible(f"<{hostile}>")
    assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in shown), shown
    assert json.loads(f'"{shown}"') == f"<{hostile}>", "nothing is lost"
    stream = io.StringIO()
    print(f"<{hostile}>", file=PlainOutput(stream))
    assert stream.getvalue() == shown + "\n"
    stream.getvalue().encode()


def test_every_control_and_format_character_is() -> None:
    joiners = {"\t", "\n", "\u200c", "\u200d"}
    for code in range(0x110000):
        c = chr(code)
        kind = unicodedata.category(c)
        if kind in ("Cc", "Zl", "Zp", "Cs") or (kind == "Cf" and not 0x600 <= code < 0x900 and code < 0x11000):
            assert (visible(c) == c) == (c in joiners), hex(code)


@pytest.mark.parametrize(
    "text",
    ["", "plain\ttext\n", "日本語 عربي עברית हिन्दी", "é e\u0301", "👩\u200d💻", "می\u200cخواهم", "∀x ∈ ℝ"],
)
def test_what_people_write_stays(text: str) -> None:
    assert visible(text) == text


def test_what_draws_itself_gets_the_terminal() -> None:
    stream = io.StringIO()
    assert terminal_of(PlainOutput(stream)) is stream and terminal_of(stream) is stream  # type: ignore[arg-type]
