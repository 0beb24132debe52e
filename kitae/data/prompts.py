"""Where prompts come from: files, data sets on the hub, and generated tasks, all behind one resumable stream.

The cursor of a stream is an integer. `stream.at(position)` depends on the settings and the position only, so a run
that resumes, or asks twice, gets the same prompt. Every row of a file is checked when the stream opens: a bad one
stops the run before it begins, not when its turn comes.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import date, time
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kitae.data.config import DataConfig
from kitae.data.formats import Example, Reader, find_reader, read_row
from kitae.data.gym import gym_prompt, gym_prompts
from kitae.data.tasks import Problem, Split, find_task
from kitae.errors import DataError
from kitae.types import IntArray, Message, Prompt


class PromptStream:
    """An endless, seeded sequence of prompts: `open_stream(config, seed=0).at(17)`.

    A finite source is visited once an epoch, each epoch in an order of its own when `shuffle` is set; a generated
    task (`size` None) makes problem `position`. `read` must be pure. skipped: what there is to say of bad rows.
    """

    def __init__(
        self, read: Callable[[int], Prompt], size: int | None, *, seed: int, shuffle: bool, skipped: str = ""
    ) -> None:
        self.size = size
        self.skipped = skipped
        self._read = read
        # Two epochs are kept: readers that run ahead and readers that lag may straddle the border between them.
        self._order = lru_cache(maxsize=2)(partial(_permutation, size, seed)) if size and shuffle else None

    def at(self, position: int) -> Prompt:
        assert position >= 0, f"a stream position is not negative, got {position}"
        if self.size is None:
            return self._read(position)
        epoch, index = divmod(position, self.size)
        return self._read(int(self._order(epoch)[index]) if self._order else index)


def open_stream(config: DataConfig, seed: int) -> PromptStream:
    """The training prompts; whatever is wrong with the source is raised here as a `DataError`."""
    if config.task is not None:
        task, params = find_task(config.task), dict(config.params)

        def read(index: int) -> Prompt:
            return _task_prompt(config, "train", index, task.problem(seed, "train", params, index))

        read(0)  # complains about parameters and about a space too small for the split
        return PromptStream(read, None, seed=seed, shuffle=False)
    if config.gym is not None:
        names = _gym_names(config.gym)

        def read_gym(index: int) -> Prompt:
            return _gym_prompt(config, gym_prompt(names, seed, "train", index, config.params))

        for index in range(len(names)):
            read_gym(index)
        return PromptStream(read_gym, None, seed=seed, shuffle=False)
    files = [_local_file("data.path", config.path)] if config.path else _hub_files(config, config.hub_files)
    return _file_stream(config, files, seed)


def eval_prompts(config: DataConfig, seed: int, count: int) -> list[Prompt]:
    """`count` different held-out prompts; fewer when the file that holds them is shorter."""
    if count <= 0:
        return []
    if config.eval_path is not None:
        files = [_local_file("data.eval_path", config.eval_path)]
        if config.path is not None and files[0].path.resolve() == Path(config.path).resolve():
            raise DataError(f"data.eval_path must be another file than data.path, got {config.eval_path} for both")
    elif config.task is not None:
        problems = find_task(config.task).held_out(seed, config.params, count)
        return [_task_prompt(config, "eval", index, problem) for index, problem in enumerate(problems)]
    elif config.gym is not None:
        made = gym_prompts(_gym_names(config.gym), seed, count, config.params)
        return [_gym_prompt(config, prompt) for prompt in made]
    elif config.path is not None:
        raise DataError(f"no held-out prompts for {config.path}: set data.eval_path, or eval.prompts to 0")
    elif config.hub_eval_files is None:
        raise DataError(f"no held-out prompts for {config.hub}: set data.hub_eval_files, or eval.prompts to 0")
    else:
        files = _hub_files(config, config.hub_eval_files)
        if both := [file.name for file in files if fnmatchcase(file.name, config.hub_files)]:
            raise DataError(f"data.hub_eval_files must not match files to train on, but both match {', '.join(both)}")
    stream = _file_stream(config, files, seed)
    return [stream.at(position) for position in range(min(count, stream.size or 0))]


_SURROGATE = re.compile("[\ud800-\udfff]")


class File(NamedTuple):
    """`name` is short and starts the ids of the prompts: the file name, or the path inside the hub data set."""

    path: Path
    name: str


class DataRow(NamedTuple):
    """`number` is the line of a JSONL file or the row of a Parquet file, counted from 1."""

    file: File
    number: int
    values: Mapping[str, Any]


def _permutation(size: int, seed: int, epoch: int) -> IntArray:
    # Sorting raw random bits, because numpy promises the same bits in every release, but not the same `permutation`.
    bits = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(size)
    return np.argsort(bits, kind="stable")


def _task_prompt(config: DataConfig, split: Split, index: int, problem: Problem) -> Prompt:
    messages, reference = problem
    if config.system is not None:
        messages = (Message("system", config.system), *messages[1:])
    context = {"question": messages[-1].content}
    messages = tuple(Message("user", _instruct(config, m.content)) if m.role == "user" else m for m in messages)
    return Prompt(f"{config.task}/{split}/{index}", messages, reference, context)


def _gym_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _gym_prompt(config: DataConfig, prompt: Prompt) -> Prompt:
    (question,) = prompt.messages
    messages = _with_system(config, (Message("user", _instruct(config, question.content)),))
    return replace(prompt, messages=messages, context={"question": question.content, **prompt.context})


def _file_stream(config: DataConfig, files: list[File], seed: int) -> PromptStream:
    rows = [row for file in files for row in _read_rows(file)]
    if not rows:
        raise DataError(f"{', '.join(str(file.path) for file in files)}: no rows")
    reader = find_reader(config.format) if config.format else partial(_columns, config)
    good, bad = [], list[DataError]()
    for row in rows:
        try:
            if isinstance(row, DataError):
                raise row
            _row_prompt(config, reader, row)
            good.append(row)
        except DataError as error:
            bad.append(error)
    if bad and not (config.skip_bad_rows and good):
        raise DataError(f"{bad[0]}\n{len(bad)} of {len(rows)} rows are bad; data.skip_bad_rows=true leaves them out")

    def read(index: int) -> Prompt:
        return _row_prompt(config, reader, good[index])

    skipped = f"{len(bad)} of {len(rows)} rows are left out (data.skip_bad_rows); the first: {bad[0]}" if bad else ""
    return PromptStream(read, len(good), seed=seed, shuffle=config.shuffle, skipped=skipped)


def _local_file(setting: str, text: str) -> File:
    path = Path(text).expanduser()
    if not path.is_file():
        found = "a folder is there" if path.is_dir() else f"nothing is there (in {Path.cwd()})"
        raise DataError(f"{setting} must name a file, got {text}, but {found}")
    return File(path, path.name)


def _hub_files(config: DataConfig, pattern: str) -> list[File]:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(config.hub, repo_type="dataset", allow_patterns=pattern))
    except Exception as error:  # the network, the disk, the hub's own refusals: they share no base class
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise DataError(
            f"cannot get data set {config.hub!r} from the hub: {reason}\n"
            "Check the id and the connection (a private or gated data set needs `hf auth login`), or download the "
            "data set where there is a connection and copy the hub cache here."
        ) from error
    there = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    names = [name for name in there if fnmatchcase(name, pattern)]
    if not names:
        raise DataError(
            f"data set {config.hub!r} has no file that matches {pattern!r}; in the cache are {_listed(there)}"
        )
    return [File(folder / name, name) for name in names]


def _read_rows(file: File) -> Iterator[DataRow | DataError]:
    readers: dict[str, Callable[[File], Iterator[DataRow | DataError]]] = {
        ".jsonl": _read_jsonl,
        ".json": _read_json,
        ".parquet": _read_parquet,
    }
    if file.path.suffix not in readers:
        raise DataError(f"a data file must end in {' or '.join(readers)}, got {file.path}")
    return readers[file.path.suffix](file)


def _read_jsonl(file: File) -> Iterator[DataRow | DataError]:
    """Lines that are no row come as what is wrong with them."""
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
        raise DataError(f"{file.path}:{number}: a row must be a JSON object, got {_clip(line.strip())}")
    return values


def _read_json(file: File) -> Iterator[DataRow | DataError]:
    try:
        rows = json.loads(file.path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {file.path}: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{file.path}: a .json file must hold a list of objects; one object per line is a .jsonl file")
    return (DataRow(file, number, values) for number, values in enumerate(rows, start=1))


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
    found: dict[str, Any] = json.loads(json.dumps(values, default=_as_text))
    return found


def _as_text(value: Any) -> str:
    """Dates as ISO has them, decimals and the like as they print; bytes (a picture in a column, say) are left out."""
    if isinstance(value, bytes):
        return f"({len(value)} bytes)"
    return value.isoformat() if isinstance(value, date | time) else str(value)


def _row_prompt(config: DataConfig, reader: Reader, row: DataRow) -> Prompt:
    """The question as text and the other columns become the verifier's context, but for the answer's."""
    where = f"{row.file.path}:{row.number}"
    try:
        example = read_row(reader, row.values)
        question = example.question
        messages = (Message("user", _instruct(config, question)),) if isinstance(question, str) else _messages(question)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    if (bad := _SURROGATE.search(json.dumps([row.values, example.reference], ensure_ascii=False))) is not None:
        raise DataError(f"{where}: a row must be valid Unicode, got half a surrogate pair: {bad[0]!r}")
    asked = question if isinstance(question, str) else messages[-1].content
    used = () if config.format else (config.prompt_key, config.answer_key)
    context = {"question": asked} | {k: v for k, v in row.values.items() if k not in used}
    messages = _with_system(config, messages)
    return Prompt(f"{row.file.name}:{row.number}", messages, example.reference, context, example.gold)


def _columns(config: DataConfig, row: Mapping[str, Any]) -> Example:
    """The format of files without one: a column for the question, a column for the answer."""
    for key in (config.prompt_key, config.answer_key):
        if key not in row:
            raise DataError(f"no key {key!r}; the row has {_listed(list(row))}")
    reference = row[config.answer_key]
    if config.answer_after is not None:
        reference = _after(config.answer_after, repr(config.answer_key), reference)
    return Example(row[config.prompt_key], reference)


def _with_system(config: DataConfig, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    if config.system is None or any(m.role == "system" for m in messages):
        return messages
    return (Message("system", config.system), *messages)


def _messages(turns: object) -> tuple[Message, ...]:
    """Chat turns as they are; keys other than role and content are ignored."""
    if not isinstance(turns, list) or not turns:
        raise DataError(f"a question must be text or a list of messages, got {_clip(repr(turns))}")
    messages = []
    for turn in turns:
        role, content = (turn.get("role"), turn.get("content")) if isinstance(turn, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(f"a message must have a role and a content, both text, got {_clip(repr(turn))}")
        messages.append(Message(role, content))
    if messages[-1].role == "assistant":
        raise DataError(
            "a question must end with a turn that the model answers, but its last message is the assistant's"
        )
    return tuple(messages)


def _after(mark: str, where: str, answer: object) -> str:
    if not isinstance(answer, str):
        raise DataError(f"{where} must be text for data.answer_after = {mark!r}, got {_clip(repr(answer))}")
    _, found, rest = answer.rpartition(mark)
    if not found or not rest.strip():
        raise DataError(f"{where} must have text after {mark!r} (data.answer_after), got {_clip(repr(answer[-60:]))}")
    return rest.strip()


def _instruct(config: DataConfig, question: str) -> str:
    return config.instruction.replace("{question}", question)


def _clip(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:79]}…"


def _listed(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:12])) or "none"
    return f"{shown} and {len(names) - 12} more" if len(names) > 12 else shown
