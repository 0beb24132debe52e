"""Texts cannot become markup."""

import pytest

from kitae.ui.report.markup import Markup, element, empty, escaped, joined


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<script>x</script>", "&lt;script&gt;x&lt;/script&gt;"),
        ("a & b", "a &amp; b"),
        ("\" onload='x'", "&quot; onload=&#x27;x&#x27;"),
        ("nul\x00 escape\x1b del\x7f", "nul� escape� del�"),
        ("half \ud83d of a pair", "half � of a pair"),
        ("lines\n\tstay", "lines\n\tstay"),
    ],
)
def test_texts_are_escaped_everywhere(text: str, shown: str) -> None:
    assert escaped(text) == shown
    assert element("p", text) == f"<p>{shown}</p>"
    assert element("p", title=text) == f'<p title="{shown}"></p>'
    assert joined([text, None, Markup("<br>")]) == f"{shown}<br>"


def test_names_and_numbers_of_attributes() -> None:
    assert empty("circle", class_="f1", cx=1.234567, r=3, data_step=7, title=None) == (
        '<circle class="f1" cx="1.23" r="3" data-step="7"/>'
    )
    assert element("b", element("i", "<")) == "<b><i>&lt;</i></b>"
