"""Files into rows, and which rows are bad."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from kitae.data.data_files import DataRow, File, check_unicode, clip, listed, local_file, read_rows, sift
from kitae.errors import DataError


def file(path: Path, text: str) -> File:
    path.write_text(text, encoding="utf-8")
    return local_file("data.path", str(path))


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_every_kind_of_file_has_the_same_rows(tmp_path, suffix):
    rows = [{"a": 1, "b": ["x"]}, {"a": 2, "b": []}]
    path = tmp_path / f"f{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows) if suffix == ".json" else "\n".join(map(json.dumps, rows)))
    found = list(read_rows(local_file("data.path", str(path))))
    assert [row.values for row in found] == rows
    assert [(row.id, row.where) for row in found] == [(f"f{suffix}:{i}", f"{path}:{i}") for i in (1, 2)]


def test_lines_are_counted_as_an_editor_does(tmp_path):
    found = list(read_rows(file(tmp_path / "f.jsonl", '{"a": 1}\n\nnonsense\n[1]\n{"a": 2}\n')))
    assert [row.number for row in found if isinstance(row, DataRow)] == [1, 5]
    bad = [str(row) for row in found if isinstance(row, DataError)]
    assert "f.jsonl:3: not valid JSON" in bad[0] and "f.jsonl:4: a row must be a JSON object, got [1]" in bad[1]


def test_good_rows_and_a_note_on_bad_ones(tmp_path):
    source = file(tmp_path / "f.jsonl", "".join(f'{{"a": {i}}}\n' for i in range(4)) + "{\n")

    def even(row):
        if row.values["a"] % 2:
            raise DataError(f"{row.where}: odd")
        return row.values["a"]

    with pytest.raises(DataError, match=r"f.jsonl:2: odd\n3 of 5 rows are bad; data.skip_bad_rows=true"):
        sift([source], even, skip_bad_rows=False)
    good, note = sift([source], even, skip_bad_rows=True)
    assert good == [0, 2] and note.startswith("3 of 5 rows are left out (data.skip_bad_rows); the first: ")
    assert sift([source], even, skip_bad_rows=True)[1] == note
    with pytest.raises(DataError, match="1 of 1 rows are bad"):  # none would be left
        sift([file(tmp_path / "g.jsonl", "{")], even, skip_bad_rows=True)
    with pytest.raises(DataError, match="no rows"):
        sift([file(tmp_path / "h.jsonl", "\n")], even, skip_bad_rows=True)


def test_what_is_no_data_file(tmp_path):
    with pytest.raises(DataError, match=r"data.path must name a file, got .*, but a folder is there"):
        local_file("data.path", str(tmp_path))
    with pytest.raises(DataError, match=r"data.mix must name a file, got nowhere.jsonl, but nothing is there"):
        local_file("data.mix", "nowhere.jsonl")
    with pytest.raises(DataError, match=r"must end in .jsonl or .json or .parquet or .csv or .tsv, got .*f.txt"):
        list(read_rows(file(tmp_path / "f.txt", "a,b")))
    with pytest.raises(DataError, match="must hold a list of objects"):
        list(read_rows(file(tmp_path / "f.json", '{"a": 1}')))


def test_words_for_messages():
    assert clip("x" * 80) == "x" * 80 and clip("x" * 81) == "x" * 79 + "…"
    assert listed([]) == "none" and listed(["a", "b"]) == "'a', 'b'"
    assert listed([str(i) for i in range(14)]).endswith("'11' and 2 more")
    check_unicode({"a": "é😀"})
    with pytest.raises(DataError, match="half a surrogate pair"):
        check_unicode({"a": ["\ud83d"]})
