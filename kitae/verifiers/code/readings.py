"""Interpretations of a text as a program, if it has prose around it or is only a part of one."""

import itertools
import re

from kitae.verifiers.code.extraction import Source

_TARGET = r"[A-Za-z_][\w.]*(?:\[[^\]\n]*\])?"
_CODE_LINE_RE = re.compile(
    r"^(?:def |class |import |from \w[\w.]* import |@|async def |print\(|(?:for|while|if|with) .*:$|try:$"
    rf"|{_TARGET}(?: ?, ?{_TARGET})* ?[-+*/]?= ?)",
    re.MULTILINE,
)
_STARTS = 3  # how many lines of a text are tried as the first of its code
_TYPING_RE = re.compile(
    r"(?:->|[:\[,|=(])\s*(List|Dict|Tuple|Set|FrozenSet|Optional|Union|Any|Callable|Iterable|Iterator|Sequence|Mapping"
    r"|Generator|Deque|DefaultDict|Counter|NamedTuple|TypeVar|Literal)\b(?=\s*[\[\]:,=)|(]|\s*$)",
    re.MULTILINE,
)


def variants(source: Source) -> list[str]:
    """Interpretations of a text as a program: as it is, and from its first lines that look like Python."""
    starts = itertools.islice(_CODE_LINE_RE.finditer(source.text), _STARTS)
    return list(dict.fromkeys([source.text, *(source.text[start.start() :] for start in starts)]))


def typing_names(*texts: str) -> list[str]:
    """Names of `typing` that are used in annotations by code that does not import them."""
    if any("typing" in text for text in texts):
        return []
    return sorted({name for text in texts for name in _TYPING_RE.findall(text)})


def completions(prompt: str, text: str) -> list[str]:
    """Interpretations of a text as the rest of a prompt: as it is, on its own line, or as a body without indent."""
    indented = "".join(f"    {line}" for line in text.splitlines(keepends=True))
    return [prompt + text, f"{prompt}\n{text}", f"{prompt}\n{indented}"]
