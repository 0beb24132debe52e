"""Finds the program in a response, and ways to interpret a text as one."""

import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kitae.verifiers.plain_text import after_thought

_FENCE_RE = re.compile(r"^([ \t>]*)(`{3,}|~{3,})[ \t]*\{?\.?([\w+#-]*)(.*)$")
_LATE_FENCE_RE = re.compile(r"(?<!`)(`{3,})([\w+#-]*)[ \t]*$")  # preceded by other text on its line
_AFTER_FENCE_RE = re.compile(r"[ \t]*$|[ \t]*<|[ \t]+(?!\S+[ \t]*$)")  # nothing, <|im_end|>, or several words
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


@dataclass(frozen=True, slots=True)
class Source:
    """The code of a response: `Source("print(1)\\n", fenced=True)`. Code without a fence may have prose around it."""

    text: str
    fenced: bool


def extract_code(response: str, tags: Sequence[str], wanted: Sequence[str] = ()) -> Source:
    """The program in a response: its last fenced block in the language, or without a tag; the whole text if there are
    no fences.

    If several such blocks exist, the last one that defines one of the `wanted` names counts, because an example of use
    often follows the solution. Text before `</think>` is ignored. A block that is never closed reaches to the end. A
    console session (>>>) is no program. Without blocks, [BEGIN] and [DONE] or <code> mark the program.
    """
    text = after_thought(response).replace("\r\n", "\n").removeprefix("\ufeff")
    blocks = [(tag, body) for tag, body in _blocks(text) if not body.lstrip().startswith(">>>")]
    if not blocks:
        return _unfenced(text, tags)
    tagged = [body for tag, body in blocks if tag in tags]
    untagged = [body for tag, body in blocks if not tag]
    candidates = tagged or untagged or [body for _, body in blocks]
    chosen = next((body for body in reversed(candidates) if defines(body, wanted)), candidates[-1])
    return Source(chosen, fenced=True)


def _unfenced(text: str, tags: Sequence[str]) -> Source:
    end = text.rfind("</code>")
    start = text.rfind("<code", 0, max(end, 0))
    if start >= 0:
        return Source(text[start:end].partition(">")[2], fenced=True)
    said, _, _ = f"\n{text}".partition("\n[DONE]")
    _, begin, said = said.rpartition("\n[BEGIN]")
    if begin:
        return Source(said.removeprefix("\n"), fenced=True)
    first, _, rest = text.partition("\n")
    return Source(rest if first.strip().lower() in tags else said.removeprefix("\n"), fenced=False)


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """The fenced blocks of a text as (tag in lower case, body), including those within a block of Markdown.

    A fence may open after text on its line, and close before text, or at the end of a line of code. The latter counts
    only if the bare fences that follow are paired without it.
    """
    fence = tag = indent = ""
    body: list[str] = []
    lines = text.split("\n")
    for line, paired in zip(lines, _pairs_follow(lines), strict=True):
        match = _FENCE_RE.match(line) if "```" in line or "~~~" in line else None
        late = _LATE_FENCE_RE.search(line) if "```" in line and line.count("```") == 1 and not match else None
        if not fence:
            if match and "`" not in match[4]:
                indent, fence, tag, body = match[1], match[2], match[3].lower(), []
            elif late:
                indent, fence, tag, body = "", late[1], late[2].lower(), []
        elif match and _closes(match, indent, fence):
            yield from _block(tag, body)
            fence = ""
        elif late and late[1].startswith(fence) and not late[2] and paired:
            yield from _block(tag, [*body, line[: late.start()].removeprefix(indent)])
            fence = ""
        else:
            body.append(line.removeprefix(indent))
    if fence:
        yield from _block(tag, _without_far_fence(body, fence))


def _without_far_fence(body: list[str], fence: str) -> list[str]:
    """An unclosed block without what follows its last bare fence, if that fence is unpaired: models indent the closing
    fence like the code before it."""
    bare = [i for i, line in enumerate(body) if line.strip() == fence]
    return body[: bare[-1]] if len(bare) % 2 else body


def _block(tag: str, lines: list[str]) -> Iterator[tuple[str, str]]:
    body = "\n".join(lines) + "\n"
    inner = list(_blocks(body)) if tag in ("markdown", "md") else []
    yield from inner or [(tag, body)]


def _closes(match: re.Match[str], indent: str, fence: str) -> bool:
    """Whether a line that begins with a fence closes a block. A more deeply indented one is in a string or a
    comment."""
    after = match.string[match.end(2) :]
    return match[2].startswith(fence) and len(match[1]) < len(indent) + 4 and bool(_AFTER_FENCE_RE.match(after))


def _pairs_follow(lines: Sequence[str]) -> list[bool]:
    """For each line, whether an even number of bare fences follows it before the next one with a tag."""
    even, found = True, []
    for line in reversed(lines):
        found.append(even)
        match = _FENCE_RE.match(line) if "```" in line or "~~~" in line else None
        if match and len(match[1]) < 4:
            even = True if match[3] else not even
    return found[::-1]


def defines(source: str, names: Sequence[str]) -> bool:
    """Whether an unindented line defines one of the names; `f = f(3)` and imports from other modules do not."""
    for name in names:
        word = re.escape(name)
        if re.search(
            rf"^(?:(?:async\s+)?def\s+{word}\b|class\s+{word}\b|{word}\s*(?::[^=\n]*)?=(?!=)(?!.*\b{word}\b))",
            source,
            re.MULTILINE,
        ):
            return True
        imports = re.finditer(rf"^(?:from|import)\s+(\w+).*\b{word}\b", source, re.MULTILINE)
        if any(found[1] in sys.stdlib_module_names for found in imports):
            return True
    return False


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
