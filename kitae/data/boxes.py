r"""What texts of mathematics put into a \boxed{}: the answer of a solution, or of a response."""

import re

_BOX = r"(?:\\(?:boxed|fbox|framebox)|\x08oxed)(?![A-Za-z])"  # \x08: "\boxed" of a JSON writer that did not escape it
_BRACE_RE = re.compile(rf"{_BOX}\s*\{{|\\.|[{{}}]", re.DOTALL)
_BOX_RE = re.compile(_BOX)
_BESIDE_RE = re.compile(r"[,;/|]|(?<![A-Za-z])(?:or|and)(?![A-Za-z])|\\(?:lor|vee|boxed)")
_BARE_BOX_RE = re.compile(rf"{_BOX}\s*([-+]?[0-9][0-9.,/]*|[A-Za-z](?![A-Za-z]))")


def boxes(text: str) -> list[tuple[int, int, str]]:
    r"""The complete outermost \boxed{}, \fbox{} and `\boxed 5` of a text as (start, end, inside), in order.

    Of boxes in boxes, the innermost is the answer, `"\boxed{x = \boxed{5}}"` → `"5"`, unless more is listed beside it.
    """
    text = text.replace(r"\\boxed", r" \boxed")  # a backslash that was escaped
    found: list[tuple[int, int, str]] = []
    opened: list[tuple[int, int, bool]] = []  # start of the command, start of the inside, is it a box
    for brace in _BRACE_RE.finditer(text):
        if brace[0] == "}":
            start, inside, boxed = opened.pop() if opened else (-1, -1, False)
            if boxed and found and found[-1][0] > start:
                if _BESIDE_RE.search(text[inside : found[-1][0]] + text[found[-1][1] : brace.start()]):
                    found = [box for box in found if box[0] < start]
                    found.append((start, brace.end(), _BOX_RE.sub("", text[inside : brace.start()])))
            elif boxed:
                found.append((start, brace.end(), text[inside : brace.start()]))
        elif brace[0].endswith("{") and brace[0] != r"\{":
            opened.append((brace.start(), brace.end(), brace[0] != "{"))
    if not found:
        found = [(bare.start(), bare.end(), bare[1].rstrip(".,")) for bare in _BARE_BOX_RE.finditer(text)]
    return found


def last_boxed(text: str) -> str | None:
    r"""What is in the last complete \boxed{}: `"\boxed{1}, so \boxed{\frac{1}{2}}"` → `"\frac{1}{2}"`."""
    found = boxes(text)
    return found[-1][2] if found else None
