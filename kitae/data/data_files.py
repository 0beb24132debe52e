"""Data files into rows: JSON lines, JSON lists, CSV, Parquet, and folders that the library `datasets` saved, on this
disk or in a data set on the hub.

A row that cannot be read is named by file and line. `sift` reads all rows of some files before anything expensive
starts, and says which of them are bad.
"""

import csv
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kitae.data.picture_columns import COLUMNS
from kitae.data.pictures import as_data, looks_like_picture
from kitae.errors import DataError

T = TypeVar("T")


class File(NamedTuple):
    """`name` is short and starts the ids of what is in it: the file name, or the path inside the hub data set."""

    path: Path
    name: str


class DataRow(NamedTuple):
    """`number` is the line of a JSONL file or the row of a Parquet file, counted from 1."""

    file: File
    number: int
    values: Mapping[str, Any]

    @property
    def id(self) -> str:
        """`"train.jsonl:17"`."""
        return f"{self.file.name}:{self.number}"

    @property
    def where(self) -> str:
        """Where a user finds it: `"data/train.jsonl:17"`."""
        return f"{self.file.path}:{self.number}"


SHIPPED = "shipped:"
_SHIPPED_FOLDER = Path(__file__).parent / "shipped"


def local_file(setting: str, text: str) -> File:
    """A file of the user's; `shipped:NAME` is one that comes with Kitae."""
    if text.startswith(SHIPPED):
        return _shipped_file(setting, text)
    path = Path(text).expanduser()
    if (path / _SAVED).is_file():
        return File(path, path.name)
    if (path / _SPLITS).is_file():
        splits = " or ".join(str(path / name) for name in json.loads((path / _SPLITS).read_text())["splits"])
        raise DataError(f"{setting} must name one split of a saved data set: {splits}")
    if not path.is_file():
        found = "a folder is there" if path.is_dir() else f"nothing is there (in {Path.cwd()})"
        raise DataError(f"{setting} must name a file, got {text}, but {found}")
    return File(path, path.name)


def check_files(paths: Mapping[str, str]) -> None:
    """Whether files of the user's are there, by the settings that name them."""
    for setting, path in paths.items():
        local_file(setting, path)


_SAVED, _SPLITS = "state.json", "dataset_dict.json"  # what `save_to_disk` writes into the folder


def _shipped_file(setting: str, text: str) -> File:
    known = {path.stem: path for path in sorted(_SHIPPED_FOLDER.glob("*.jsonl"))}
    name = text.removeprefix(SHIPPED)
    if name not in known:
        raise DataError(f"{setting}: {SHIPPED}NAME must be one of {', '.join(known)}, got {name!r}")
    return File(known[name], known[name].name)


def hub_files(hub: str, pattern: str) -> list[File]:
    """The files of a data set on the hub that match the pattern; at least one. A folder of that name is taken first, as
    `load_dataset` does."""
    from huggingface_hub import snapshot_download

    try:
        local = Path(hub).is_dir()
        folder = Path(hub if local else snapshot_download(hub, repo_type="dataset", allow_patterns=pattern))
    except Exception as error:  # the network, the disk, the hub's own refusals: they share no base class
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise DataError(
            f"cannot get data set {hub!r} from the hub: {reason}\n"
            "Check the id and the connection (a private or gated data set needs `hf auth login`), or download the "
            "data set where there is a connection and copy the hub cache here."
        ) from error
    there = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    names = [name for name in there if fnmatchcase(name, pattern)]
    if not names:
        raise DataError(f"data set {hub!r} has no file that matches {pattern!r}; in the cache are {listed(there)}")
    return [File(folder / name, name) for name in names]


def training_files(path: str | None, hub: str | None, pattern: str) -> list[File]:
    """The files to train on: one on this machine, or those of a data set on the hub."""
    if path is not None:
        return [local_file("data.path", path)]
    assert hub is not None  # the settings name one source
    return hub_files(hub, pattern)


def held_out_hub_files(hub: str, pattern: str, training: str) -> list[File]:
    """The files of a data set that are held out; raises `DataError` where one of them is also trained on."""
    files = hub_files(hub, pattern)
    if both := [file.name for file in files if fnmatchcase(file.name, training)]:
        raise DataError(f"data.hub_eval_files must not match files to train on, but both match {', '.join(both)}")
    return files


def sift(files: Sequence[File], read: Callable[[DataRow], T], skip_bad_rows: bool) -> tuple[list[T], str]:
    """What `read` makes of the good rows, and a note on bad ones (empty where there are none).

    `read` complains about a row with a `DataError`. Unless bad rows may be skipped, and some are good, the first one
    is raised.
    """
    rows = [row for file in files for row in read_rows(file)]
    if not rows:
        raise DataError(f"{', '.join(str(file.path) for file in files)}: no rows")
    good, bad = list[T](), list[DataError]()
    for row in rows:
        try:
            if isinstance(row, DataError):
                raise row
            good.append(read(row))
        except DataError as error:
            bad.append(error)
    if bad and not (skip_bad_rows and good):
        way_out = "" if skip_bad_rows else "; data.skip_bad_rows=true leaves them out"
        raise DataError(f"{bad[0]}\n{len(bad)} of {len(rows)} rows are bad{way_out}")
    note = f"{len(bad)} of {len(rows)} rows are left out (data.skip_bad_rows); the first: {bad[0]}" if bad else ""
    return good, note


def read_rows(file: File) -> Iterator[DataRow | DataError]:
    """The rows of a file; lines that are no row come as what is wrong with them."""
    readers: dict[str, Callable[[File], Iterator[DataRow | DataError]]] = {
        ".jsonl": _read_jsonl,
        ".json": _read_json,
        ".parquet": _read_parquet,
        ".csv": _read_csv,
        ".tsv": _read_csv,
    }
    if file.path.is_dir():
        return _read_saved(file)
    if file.path.suffix not in readers:
        raise DataError(f"a data file must end in {' or '.join(readers)}, got {file.path}")
    return readers[file.path.suffix](file)


_SURROGATE = re.compile("[\ud800-\udfff]")


def check_unicode(values: object) -> None:
    """Half a surrogate pair can be written in JSON, but not encoded."""
    if (bad := _SURROGATE.search(json.dumps(values, ensure_ascii=False))) is not None:
        raise DataError(f"a row must be valid Unicode, got half a surrogate pair: {bad[0]!r}")


@contextmanager
def explained(row: Mapping[str, Any]) -> Iterator[None]:
    """Whatever goes wrong while a format reads a row is a `DataError` that says what."""
    try:
        yield
    except KeyError as error:
        raise DataError(f"no column {error}; the row has {', '.join(map(repr, row))}") from None
    except DataError:
        raise
    except Exception as error:  # a user's own function may raise anything
        raise DataError(f"the format cannot read the row: {type(error).__name__}: {error}") from error


def clip(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:79]}…"


def listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:12])) or "none"
    return f"{shown} and {len(names) - 12} more" if len(names) > 12 else shown


def _read_jsonl(file: File) -> Iterator[DataRow | DataError]:
    try:
        with file.path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.isspace():
                    try:
                        yield DataRow(file, number, _parse(file, number, line))
                    except DataError as error:
                        yield error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {file.path}: {error}") from error


def _parse(file: File, number: int, line: str) -> dict[str, Any]:
    try:
        values = json.loads(line.rstrip("\r\n"))
    except json.JSONDecodeError as error:
        raise DataError(f"{file.path}:{number}: not valid JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(values, dict):
        raise DataError(f"{file.path}:{number}: a row must be a JSON object, got {clip(line.strip())}")
    return values


def _read_json(file: File) -> Iterator[DataRow | DataError]:
    """A list of objects; or an object on each line, as some call .json too."""
    try:
        text = file.path.read_text(encoding="utf-8-sig")
        rows = json.loads(text)
    except (OSError, ValueError) as error:
        if isinstance(error, json.JSONDecodeError) and _is_object(text.lstrip().split("\n", 1)[0]):
            return _read_jsonl(file)
        raise DataError(f"cannot read {file.path}: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{file.path}: a .json file must hold a list of objects; one object per line is a .jsonl file")
    return (DataRow(file, number, values) for number, values in enumerate(rows, start=1))


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _read_csv(file: File) -> Iterator[DataRow | DataError]:
    """The first line names the columns; all values are texts."""
    try:
        with file.path.open(encoding="utf-8-sig", newline="") as lines:
            rows = csv.DictReader(lines, delimiter="\t" if file.path.suffix == ".tsv" else ",", strict=True)
            for values in rows:
                if None in values or None in values.values():
                    got = f"{len(values) - (None in values)} columns are named"
                    yield DataError(f"{file.path}:{rows.line_num}: a row must have a value for each column, but {got}")
                else:
                    yield DataRow(file, rows.line_num, values)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read {file.path}: {error}") from error


def _read_saved(file: File) -> Iterator[DataRow | DataError]:
    """A folder that `datasets` has saved: Arrow streams, which a file of the folder lists."""
    import pyarrow
    import pyarrow.ipc

    number = 0
    try:
        for part in json.loads((file.path / _SAVED).read_text())["_data_files"]:
            with pyarrow.ipc.open_stream(file.path / part["filename"]) as stream:
                for batch in stream:
                    for values in batch.to_pylist():
                        number += 1
                        yield DataRow(file, number, _as_json(values))
    except (OSError, ValueError, KeyError, TypeError, pyarrow.ArrowException) as error:
        raise DataError(f"cannot read {file.path} as a data set that was saved: {error}") from error


def _read_parquet(file: File) -> Iterator[DataRow | DataError]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.ParquetFile(file.path).read().to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"cannot read {file.path}: {error}") from error
    return (DataRow(file, number, _as_json(values)) for number, values in enumerate(rows, start=1))


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """A row as a JSON file would hold it: the journal and the verifiers' processes know nothing else."""
    return {k: json.loads(json.dumps(v, default=_as_picture if k in COLUMNS else _as_text)) for k, v in values.items()}


def _as_picture(value: Any) -> Any:
    return as_data(value) if isinstance(value, bytes) and looks_like_picture(value) else _as_text(value)


def _as_text(value: Any) -> str:
    """Dates as ISO has them, decimals and the like as they print; bytes that no column of pictures has are left out."""
    if isinstance(value, bytes):
        return f"({len(value)} bytes)"
    return value.isoformat() if isinstance(value, date | time) else str(value)


def fingerprint(records: Iterable[object]) -> str:
    """Of what they say, in their order; two records that print the same are the same."""
    digest = hashlib.blake2b(digest_size=16)
    for record in records:
        digest.update(repr(record).encode())
    return digest.hexdigest()
