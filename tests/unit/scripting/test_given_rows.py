"""Rows from Python, as files of a run: whatever holds them, and which of their columns is what."""

import datetime
import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

from kitae.errors import DataError
from kitae.scripting.given_rows import GivenRows, read_given

ROWS = [{"prompt": "2 + 2", "answer": "4"}, {"prompt": "3 + 3", "answer": "6"}]


class Frame:
    """As pandas does it."""

    iloc = None
    columns = ("prompt", "answer")

    def to_dict(self, how: str) -> list[dict[str, Any]]:
        assert how == "records"
        return [*ROWS, {"prompt": "?", "answer": float("nan")}]


class Split:
    """As a split of `datasets` does it."""

    column_names = ("prompt", "answer")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(ROWS)


def lines(data: Any) -> list[Any]:
    return [json.loads(line) for line in read_given("data", data).lines]


@pytest.mark.parametrize(
    "data",
    [
        ROWS,
        tuple(ROWS),
        (row for row in ROWS),
        Split(),
        pyarrow.Table.from_pylist(ROWS),
        {"prompt": ["2 + 2", "3 + 3"], "answer": ["4", "6"]},
    ],
    ids=["list", "tuple", "generator", "dataset", "arrow", "columns"],
)
def test_whatever_has_rows_gives_them(data: Any) -> None:
    assert lines(data) == ROWS


def test_a_data_frame_has_null_where_it_misses_a_value() -> None:
    assert lines(Frame()) == [*ROWS, {"prompt": "?", "answer": None}]


def test_values_that_json_has_not() -> None:
    row = {
        "prompt": "?",
        "number": np.float32(0.5),
        "array": np.array([[1, 2]]),
        "day": datetime.date(2026, 1, 31),
        "price": Decimal("1.50"),
        "picture": b"\x89PNG",
        "bytes": b"\x00abc",
        "set": {7},
        "inner": {"a": (1, None)},
    }
    assert lines([row]) == [
        {
            "prompt": "?",
            "number": 0.5,
            "array": [[1, 2]],
            "day": "2026-01-31",
            "price": "1.50",
            "picture": "data:image/png;base64,iVBORw==",
            "bytes": "(4 bytes)",
            "set": [7],
            "inner": {"a": [1, None]},
        }
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "data must have rows, got none"),
        ([1], "row 1 of data must be a mapping of columns, or a text, got 1"),
        ([{"prompt": "a"}, ["b"]], r"row 2 of data must be a mapping of columns, or a text, got \['b'\]"),
        ([{1: "a"}], "row 1 of data must have columns named by texts, got 1"),
        ("train", "data must be rows, a data frame or a data set, got 'train'"),
        (7, "data must be rows, a data frame or a data set, got 7"),
        ({"train": Split(), "test": Split()}, r"must be one split of the data set: data\['train'\] or data\['test'\]"),
        ({"prompt": ["a"], "answer": []}, "columns, lists of one length, got 'prompt': 1, 'answer': 0"),
        ({"prompt": ["a"], "answer": "b"}, "lists of one length, got 'prompt': 1, 'answer': 'b'"),
        ({}, "lists of one length, got none"),
    ],
)
def test_what_has_no_rows_is_refused(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_given("data", data)


def test_a_message_is_short_whatever_was_given() -> None:
    with pytest.raises(DataError) as caught:
        read_given("data", {"a": ["x" * 100_000], "b": 1})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("columns", "given", "found"),
    [
        (("prompt", "answer"), {}, ("prompt", "answer")),
        (("problem", "solution", "level"), {}, ("problem", "solution")),
        (("prompt", "solution", "answer"), {}, ("prompt", "answer")),
        (("question", "ground_truth"), {}, ("question", "ground_truth")),
        (("text", "label"), {"prompt": "text"}, ("text", "label")),
        (("prompt", "label", "gold"), {"answer": "gold"}, ("prompt", "gold")),
        (("prompt",), {}, ("prompt", "")),
    ],
)
def test_the_columns_are_found_by_name(columns: tuple[str, ...], given: dict[str, str], found: tuple[str, str]) -> None:
    named = GivenRows(("{}",), columns).named_columns(given)
    assert (named["prompt"], named["answer"]) == found


def test_rows_without_a_prompt_name_the_rule() -> None:
    with pytest.raises(DataError, match=r"one of prompt, question, .*columns=.*got 'text', 'label'"):
        GivenRows(("{}",), ("text", "label")).named_columns({})


def test_a_text_alone_is_a_prompt_and_lines_are_lines(tmp_path: Path) -> None:
    rows = read_given("data", ["2 + 2", "a\u2028b\n"])
    rows.write(tmp_path / "given" / "train.jsonl")
    written = (tmp_path / "given" / "train.jsonl").read_text("utf-8")
    assert [json.loads(line) for line in written.split("\n")[:-1]] == [{"prompt": "2 + 2"}, {"prompt": "a\u2028b\n"}]
