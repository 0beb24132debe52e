"""Files that newcomers have: lines that are named .json, CSV, folders that `datasets` saved."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pytest

from kitae.data.data_files import check_files, local_file, read_rows
from kitae.errors import DataError

ROWS = [{"question": "2 + 2", "answer": "4"}, {"question": 'café, "3"\n+ 3', "answer": "6"}]


def rows_of(path: Path) -> list[Any]:
    return [row.values for row in read_rows(local_file("data.path", str(path)))]


def saved(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """As `Dataset.save_to_disk` writes it, in two parts."""
    folder.mkdir(parents=True)
    names = []
    for number, row in enumerate(rows):
        names.append({"filename": f"data-{number:05d}-of-00002.arrow"})
        table = pyarrow.Table.from_pylist([row])
        with pyarrow.ipc.new_stream(folder / names[-1]["filename"], table.schema) as stream:
            stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": names, "_split": "train"}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_lines_that_are_named_json_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert rows_of(path) == ROWS
    path.write_text(json.dumps(ROWS, indent=1))
    assert rows_of(path) == ROWS


def test_csv_has_columns_of_text(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('\ufeffquestion,answer\n2 + 2,4\n"café, ""3""\n+ 3",6\n', encoding="utf-8")
    assert rows_of(path) == ROWS
    tabs = tmp_path / "a.tsv"
    tabs.write_text("question\tanswer\n2 + 2\t4\n")
    assert rows_of(tabs) == ROWS[:1]
    path.write_text("question,answer\nonly one\n1,2,3\n")
    bad = list(read_rows(local_file("data.path", str(path))))
    assert all(isinstance(row, DataError) for row in bad)
    assert "a.csv:2: a row must have a value for each column, but 2 columns are named" in str(bad[0])


def test_folders_that_datasets_saved_are_read(tmp_path: Path) -> None:
    folder = saved(tmp_path / "set" / "train", ROWS)
    assert rows_of(folder) == ROWS
    assert [row.id for row in read_rows(local_file("data.path", str(folder)))] == ["train:1", "train:2"]  # type: ignore[union-attr]
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r"must name one split of a saved data set: .*set/train or .*set/test"):
        rows_of(tmp_path / "set")
    (folder / "data-00000-of-00002.arrow").write_bytes(b"nonsense")
    with pytest.raises(DataError, match="as a data set that was saved"):
        rows_of(folder)


def test_a_missing_file_is_named_by_its_setting(tmp_path: Path) -> None:
    check_files({})
    with pytest.raises(DataError, match=r"data.eval_path must name a file, got nothing.jsonl, but nothing is there"):
        check_files({"data.eval_path": "nothing.jsonl"})
