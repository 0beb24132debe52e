"""Elements of a page. What is not markup already is escaped: texts of models and settings cannot become any."""

import html
import re
from collections.abc import Iterable

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")  # HTML has no way to write these


class Markup(str):
    """A piece of a page, complete and escaped."""

    __slots__ = ()


def element(tag: str, *children: str | None, **attributes: str | float | None) -> Markup:
    """`element("p", "a < b", class_="small")` is `<p class="small">a &lt; b</p>`; what is None is left out.

    Names of attributes are ours, never those of a run: an underscore at the end goes, others become hyphens.
    """
    return Markup(f"<{tag}{_attributes(attributes)}>{joined(children)}</{tag}>")


def empty(tag: str, **attributes: str | float | None) -> Markup:
    """An element of SVG or HTML that holds nothing: `empty("circle", r=3)`."""
    return Markup(f"<{tag}{_attributes(attributes)}/>")


def joined(children: Iterable[str | None]) -> Markup:
    return Markup("".join(escaped(child) for child in children if child is not None))


def escaped(text: str) -> Markup:
    if isinstance(text, Markup):
        return text
    return Markup(html.escape(_UNPRINTABLE.sub("�", text), quote=True))


def _attributes(values: dict[str, str | float | None]) -> str:
    return "".join(
        f' {name.removesuffix("_").replace("_", "-")}="{escaped(_plain(value))}"'
        for name, value in values.items()
        if value is not None
    )


def _plain(value: str | float) -> str:
    """Numbers with as many digits as a picture needs."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
