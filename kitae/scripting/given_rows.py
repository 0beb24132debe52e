"""Rows that were given from Python: lists, generators, data frames, data sets of the library `datasets`.

They are written once, as JSON lines, into the run folder: from there on the run reads them like any other file, checks
that they are what it began with, and can be resumed from the command line.

A row is a mapping from columns to values; a text alone is a prompt. What JSON has not is written as text or as a list:
dates, decimals, arrays. A value that is missing in a data frame (NaN) is null.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, time
from pathlib import Path
from typing import Any

from kitae.data.data_files import clip, listed
from kitae.data.pictures import as_data, as_source, is_pil, looks_like_picture
from kitae.errors import DataError, StoreError
from kitae.store.disk import write_whole

PROMPTS = ("prompt", "question", "problem", "query", "instruction", "input", "messages")
REFERENCES = ("answer", "solution", "ground_truth", "label", "reference", "target")
"""What the columns of a prompt and of its reference may be called: the first of these that the rows have."""

_MOST = 20_000_000  # rows: a generator without an end would otherwise fill the memory


@dataclass(frozen=True, slots=True)
class GivenRows:
    """`GivenRows(('{"prompt": "2 + 2", "answer": "4"}',), ("prompt", "answer"))`; columns: of the first row."""

    lines: tuple[str, ...]
    columns: tuple[str, ...]

    def write(self, path: Path) -> None:
        try:
            path.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot make {path.parent}: {error}") from error
        write_whole(path, "".join(f"{line}\n" for line in self.lines))

    def named_columns(self, given: Mapping[str, Any]) -> dict[str, str]:
        """The columns of prompt and reference, as `data.columns` of a run of reinforcement learning. Without a
        reference `answer` is empty: a reward function may need none."""
        prompt = given.get("prompt") or self._first(PROMPTS)
        if prompt is None:
            raise DataError(
                f"rows must have a column for the prompt, one of {', '.join(PROMPTS)}, or named by "
                f'columns={{"prompt": …}}; got {listed(self.columns)}'
            )
        answer = given["answer"] if "answer" in given else self._first(REFERENCES)
        return {"prompt": prompt, "answer": answer or ""}

    def _first(self, names: Iterable[str]) -> str | None:
        return next((name for name in names if name in self.columns), None)


def read_given(what: str, data: Any) -> GivenRows:
    """The rows of whatever was given; `what` names the argument in messages. Raises `DataError`."""
    lines, columns = list[str](), tuple[str, ...]()
    for number, each in enumerate(_rows(what, data), start=1):
        if number > _MOST:
            raise DataError(
                f"{what} must have an end: more than {_MOST:,} rows came, and rows are kept in the run folder"
            )
        row = {"prompt": each} if isinstance(each, str) else each
        if not isinstance(row, Mapping):
            raise DataError(f"row {number} of {what} must be a mapping of columns, or a text, got {clip(repr(row))}")
        if bad := next((key for key in row if not isinstance(key, str)), None):
            raise DataError(f"row {number} of {what} must have columns named by texts, got {bad!r}")
        if number == 1:
            columns = tuple(row)
        try:
            lines.append(json.dumps({key: _plain(value) for key, value in row.items()}, ensure_ascii=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(
                f"row {number} of {what} cannot be written as JSON: {error}; got {clip(repr(row))}"
            ) from None
    if not lines:
        raise DataError(f"{what} must have rows, got none")
    return GivenRows(tuple(lines), columns)


def _rows(what: str, data: Any) -> Iterator[Any]:
    """The rows of lists and generators, of pandas, polars, pyarrow and datasets: known by what they can do."""
    if isinstance(data, Mapping):
        yield from _of_mapping(what, data)
        return
    for name, arguments in (("to_pylist", ()), ("to_dicts", ()), ("to_dict", ("records",))):
        convert: Callable[..., Any] | None = getattr(data, name, None)
        if convert is not None and (name != "to_dict" or hasattr(data, "iloc")):
            yield from convert(*arguments)
            return
    if isinstance(data, str | bytes) or not isinstance(data, Iterable):
        raise DataError(f"{what} must be rows, a data frame or a data set, got {clip(repr(data))}")
    yield from data


def _of_mapping(what: str, data: Mapping[Any, Any]) -> Iterator[Any]:
    """Columns, each a list; or the splits of a data set, of which one must be named."""
    values = list(data.values())
    if values and all(hasattr(value, "column_names") for value in values):
        names = " or ".join(f"data[{name!r}]" for name in data)
        raise DataError(f"{what} must be one split of the data set: {names}")
    lengths = [len(value) if isinstance(value, list | tuple) else None for value in values]
    if None in lengths or len(set(lengths)) != 1:
        got = (
            f"{name!r}: {clip(repr(v)) if n is None else n}" for (name, v), n in zip(data.items(), lengths, strict=True)
        )
        raise DataError(f"{what} as a mapping must have columns, lists of one length, got {', '.join(got) or 'none'}")
    for row in zip(*values, strict=True):
        yield dict(zip(data, row, strict=True))


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, bytes):
        return as_data(value) if looks_like_picture(value) else f"({len(value)} bytes)"
    if is_pil(value):
        return as_source(value)
    if hasattr(value, "tolist"):  # numbers and arrays of numpy and torch
        return _plain(value.tolist())
    return str(value)
