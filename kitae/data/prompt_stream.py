"""Where prompts come from: files, data sets on the hub, and generated tasks, all behind one resumable stream.

The cursor of a stream is an integer. `stream.at(position)` depends on the settings and the position only, so a run
that resumes, or asks twice, gets the same prompt. Every row of a file is checked when the stream opens: a bad one
stops the run before it begins, not when its turn comes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kitae.data.chat import text_of
from kitae.data.config import DataConfig
from kitae.data.data_files import (
    DataRow,
    File,
    check_unicode,
    clip,
    held_out_hub_files,
    listed,
    local_file,
    sift,
    training_files,
)
from kitae.data.epochs import Epochs
from kitae.data.formats import Exercise, Reader, find_reader, read_row
from kitae.data.gym_prompts import gym_prompt, gym_prompts
from kitae.data.messages import read_parts
from kitae.data.overlap import find_overlap
from kitae.data.picture_columns import COLUMNS, with_pictures
from kitae.data.pictures import sources_of
from kitae.data.tasks import Problem, Split, find_task
from kitae.errors import DataError
from kitae.types import Message, Prompt


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
        self._order = Epochs(size, seed=seed, shuffle=shuffle) if size else None

    def all(self) -> Iterator[Prompt]:
        """Each prompt of a finite source once, in the order of its rows; nothing of one that has no end."""
        return map(self._read, range(self.size or 0))

    def at(self, position: int) -> Prompt:
        assert position >= 0, f"a stream position is not negative, got {position}"
        return self._read(self._order.at(position) if self._order else position)


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
    return _file_stream(config, training_files(config.path, config.hub, config.hub_files), seed, sifted=True)


def eval_prompts(config: DataConfig, seed: int, count: int) -> list[Prompt]:
    """`count` different held-out prompts; fewer when the file that holds them is shorter."""
    if count <= 0:
        return []
    if config.eval_path is not None:
        files = [local_file("data.eval_path", config.eval_path)]
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
        assert config.hub is not None  # the settings name one source
        files = held_out_hub_files(config.hub, config.hub_eval_files, config.hub_files)
    stream = _file_stream(config, files, seed)
    return [stream.at(position) for position in range(min(count, stream.size or 0))]


def _task_prompt(config: DataConfig, split: Split, index: int, problem: Problem) -> Prompt:
    messages, reference = problem
    if config.system is not None:
        messages = (Message("system", config.system), *messages[1:])
    context = {"question": text_of(messages[-1])}
    messages = tuple(
        replace(m, content=_instruct(config, m.content)) if m.role == "user" and not m.parts else m for m in messages
    )
    return Prompt(f"{config.task}/{split}/{index}", messages, reference, context)


def _gym_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _gym_prompt(config: DataConfig, prompt: Prompt) -> Prompt:
    (question,) = prompt.messages
    messages = _with_system(config, (Message("user", _instruct(config, question.content)),))
    return replace(prompt, messages=messages, context={"question": question.content, **prompt.context})


def _file_stream(config: DataConfig, files: list[File], seed: int, *, sifted: bool = False) -> PromptStream:
    reader = find_reader(config.format) if config.format else partial(_columns, config)

    def check(row: DataRow) -> DataRow:
        _row_prompt(config, reader, row)
        return row

    rows, skipped = sift(files, check, config.skip_bad_rows)
    if sifted and (config.deduplicate != "none" or config.decontaminate):
        rows, skipped = _without_overlap(config, reader, rows, skipped)

    def read(index: int) -> Prompt:
        return _row_prompt(config, reader, rows[index])

    return PromptStream(read, len(rows), seed=seed, shuffle=config.shuffle, skipped=skipped)


def _without_overlap(
    config: DataConfig, reader: Reader, rows: list[DataRow], skipped: str
) -> tuple[list[DataRow], str]:
    asked = [_texts(read_row(reader, row.values).question) for row in rows]
    found = find_overlap(asked, config.deduplicate, config.decontaminate)
    total, notes = len(rows), [skipped] if skipped else []
    for gone, why in found.notes([row.id for row in rows]):
        rows = [row for row in rows if row.id not in gone]
        notes.append(f"{len(gone)} of {total} rows {why}")
    if not rows:
        raise DataError("data must have rows to train on, but none is left:\n" + "\n".join(notes))
    return rows, "\n".join(notes)


def _texts(question: Any) -> list[str]:
    """As the data has them: what the settings put around a question is the same in all prompts."""
    return [question] if isinstance(question, str) else [text_of(message) for message in _messages(question)]


def _row_prompt(config: DataConfig, reader: Reader, row: DataRow) -> Prompt:
    """The question as text and the other columns become the verifier's context, but for the answer's."""
    try:
        exercise = read_row(reader, row.values)
        question = exercise.question
        told = _instruct(config, question) if isinstance(question, str) else question
        seen = with_pictures(told, row.values, row.file.path.parent)
        messages = (Message("user", seen),) if isinstance(seen, str) else _messages(seen)
        check_unicode([row.values, exercise.reference])
    except DataError as error:
        raise DataError(f"{row.where}: {error}") from None
    asked = question if isinstance(question, str) else text_of(messages[-1])
    used = () if config.format else (config.columns.prompt, config.columns.answer)
    columns = row.values if exercise.context is None else exercise.context
    pictures = COLUMNS if any(sources_of(messages)) else ()
    context = {"question": asked} | {k: v for k, v in columns.items() if k not in (*used, *pictures)}
    messages = _with_system(config, messages)
    return Prompt(row.id, messages, exercise.reference, context, exercise.gold)


def _columns(config: DataConfig, row: Mapping[str, Any]) -> Exercise:
    """The format of files without one: a column for the question, a column for the answer; "" where there is none."""
    for setting, key in config.columns:
        if key and key not in row:
            raise DataError(f"no column {key!r}, as data.columns.{setting} has it; the row has {listed(list(row))}")
    if not config.columns.answer:
        return Exercise(row[config.columns.prompt], None)
    reference = row[config.columns.answer]
    if reference is None:
        raise DataError(
            f"the reference answer is null, in the column {config.columns.answer!r}; "
            'data.columns.answer="" is for data without references'
        )
    if config.answer_after is not None:
        reference = _after(config.answer_after, repr(config.columns.answer), reference)
    return Exercise(row[config.columns.prompt], reference)


def _with_system(config: DataConfig, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    if config.system is None or any(m.role == "system" for m in messages):
        return messages
    return (Message("system", config.system), *messages)


def _messages(turns: object) -> tuple[Message, ...]:
    """Chat turns as they are; keys other than role and content are ignored."""
    if not isinstance(turns, list) or not turns:
        raise DataError(f"a question must be text or a list of messages, got {clip(repr(turns))}")
    messages = []
    for turn in turns:
        role, content = (turn.get("role"), turn.get("content")) if isinstance(turn, dict) else (None, None)
        if isinstance(role, str) and isinstance(content, list) and content:
            messages.append(Message(role, parts=read_parts(content)))
            continue
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(f"a message must have a role and a content, both text, got {clip(repr(turn))}")
        messages.append(Message(role, content))
    if messages[-1].role == "assistant":
        raise DataError(
            "a question must end with a turn that the model answers, but its last message is the assistant's"
        )
    return tuple(messages)


def _after(mark: str, where: str, answer: object) -> str:
    if not isinstance(answer, str):
        raise DataError(f"{where} must be text for data.answer_after = {mark!r}, got {clip(repr(answer))}")
    _, found, rest = answer.rpartition(mark)
    if not found or not rest.strip():
        raise DataError(f"{where} must have text after {mark!r} (data.answer_after), got {clip(repr(answer[-60:]))}")
    return rest.strip()


def _instruct(config: DataConfig, question: str) -> str:
    return config.instruction.replace("{question}", question)
