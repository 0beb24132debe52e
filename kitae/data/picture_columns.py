"""Pictures of rows: in parts of messages, or in a column of their own, as data for TRL and verl has them.

    messages with parts      {"type": "image", "image": "digit.png"}
    a column and parts       images: [...], and {"type": "image"} in the messages, in the same order
    a column and a mark      images: [...], and <image> in a text, in the same order
    a column alone           image: ..., shown before the text of the first turn of the user

A picture is a path, relative to the file of data, or bytes, as parquet has them (`{"bytes": …, "path": …}`).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kitae.data.pictures import IMAGES, given_of, shown
from kitae.errors import DataError

COLUMNS = ("images", "image")
_MARK = "<image>"


def with_pictures(said: Any, row: Mapping[str, Any], folder: Path) -> Any:
    """A question, or a list of messages in OpenAI's shape, with the pictures of its row; as it is, where the row has
    none."""
    column = next((row[name] for name in COLUMNS if row.get(name) is not None), None)
    given = column if isinstance(column, list) else [] if column is None else [column]
    if not given and (isinstance(said, str) or not any(map(_shows, said if isinstance(said, list) else ()))):
        return said
    turns = [{"role": "user", "content": said}] if isinstance(said, str) else said
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        return said  # whoever reads it says what is wrong
    left = iter(given)
    made = [{**turn, "content": _content(turn.get("content"), left, folder, bool(given))} for turn in turns]
    rest = [shown(each, folder) for each in left]
    if rest and len(rest) < len(given):
        raise DataError(f"messages must show all pictures of their row or name none, got {len(rest)} that are left")
    if rest:
        first = next((turn for turn in made if turn.get("role") == "user"), None)
        if first is None:
            raise DataError("a row with pictures must have a turn of the user to show them in, got none")
        content = first["content"]
        first["content"] = [*rest, *([{"type": "text", "text": content}] if isinstance(content, str) else content)]
    return made


def _shows(turn: object) -> bool:
    content = turn.get("content") if isinstance(turn, Mapping) else None
    return isinstance(content, list) and any(isinstance(p, Mapping) and p.get("type") in IMAGES for p in content)


def _content(content: Any, left: Iterator[Any], folder: Path, marks: bool) -> Any:
    """marks: whether there are pictures that a mark in a text may stand for."""
    if isinstance(content, str) and marks and _MARK in content:
        first, *others = content.split(_MARK)
        parts: list[Any] = [first]
        for text in others:
            parts += [{"type": "image"}, text]
        content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts if p]
    if not isinstance(content, list):
        return content
    return [_part(part, left, folder) for part in content if not (isinstance(part, Mapping) and part.get("text") == "")]


def _part(part: Any, left: Iterator[Any], folder: Path) -> Any:
    if not isinstance(part, Mapping) or part.get("type") not in IMAGES:
        return part
    given = given_of(part)
    if given is None and (given := next(left, None)) is None:
        raise DataError("messages show more pictures than their row has")
    return shown(given, folder)
