"""Examples to learn from without sampling: demonstrations, preferences, and answers with a label.

    shape            columns of a row                                            stage
    demonstration    text | messages | prompt, completion                        SFT
    preference       chosen, rejected, with a prompt or with a common beginning  DPO, reward models
    labelled         prompt, completion, label | messages, label                 KTO

A row's columns say its shape. A preference serves as a demonstration (the chosen answer) and as two labelled answers;
a labelled answer serves as a demonstration if its label is true. The cursor of a stream is an integer, and
`stream.at(position)` depends on the settings and the position only.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from kitae.data.chat import text_of
from kitae.data.config import ExamplesConfig
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
from kitae.data.epochs import Epochs, Mixture
from kitae.data.layouts import Layout, find_layout, lay_out
from kitae.data.messages import SYSTEM, read_message, read_messages, read_tools
from kitae.data.overlap import find_overlap
from kitae.data.picture_columns import with_pictures
from kitae.data.tasks import Problem, find_task
from kitae.errors import DataError
from kitae.types import Message, Tool

Shape = Literal["demonstration", "preference", "labelled"]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a model reads and writes: `Conversation((Message("user", "Hi"), Message("assistant", "Hello")), prompt=1)`.

    prompt: how many leading messages are never trained on. text: plain text in place of messages.
    """

    messages: tuple[Message, ...] = ()
    prompt: int = 0
    tools: tuple[Tool, ...] = ()
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Example:
    """`Example("train.jsonl:17", chosen=Conversation(…))`; a preference has a `rejected`, a labelled answer a `label`.

    margin: how much better the chosen answer is, where the data says it.
    """

    id: str
    chosen: Conversation
    rejected: Conversation | None = None
    label: bool | None = None
    margin: float | None = None

    @property
    def shape(self) -> Shape:
        return "preference" if self.rejected else "demonstration" if self.label is None else "labelled"

    @property
    def conversations(self) -> tuple[Conversation, ...]:
        return (self.chosen, self.rejected) if self.rejected else (self.chosen,)


class ExampleStream:
    """An endless, seeded sequence of examples: `open_examples(config, seed=0, shape="preference").at(17)`.

    Each source is visited epoch by epoch, each epoch in an order of its own when `shuffle` is set; with weights, they
    take turns by them. size: examples of all sources, which is what an epoch means. skipped: what was left out.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[Example]],
        *,
        seed: int,
        shuffle: bool,
        weights: Sequence[float] | None = None,
        skipped: str = "",
    ) -> None:
        self.sources = tuple(map(tuple, sources))
        self.size = sum(map(len, self.sources))
        self.skipped = skipped
        self._seed, self._shuffle, self._weights = seed, shuffle, weights
        self._epochs = [
            Epochs(len(examples), seed=seed, shuffle=shuffle, source=number)
            for number, examples in enumerate(self.sources)
        ]
        self._mixture = Mixture(weights or [1.0] * len(self.sources), seed)

    def at(self, position: int) -> Example:
        assert position >= 0, f"a stream position is not negative, got {position}"
        source, turn = self._mixture.at(position)
        return self.sources[source][self._epochs[source].at(turn)]

    def order(self) -> list[Example]:
        """All examples, each once: as they come first in one epoch's worth of positions, then those that a mixture has
        not reached by then."""
        reached = (self.at(position) for position in range(self.size))
        return list({example.id: example for example in (*reached, *(e for s in self.sources for e in s))}.values())

    def without(self, ids: Set[str], why: str) -> "ExampleStream":
        """The stream without some of its examples: `without({"train.jsonl:17"}, "are too long")`."""
        kept = [[example for example in examples if example.id not in ids] for examples in self.sources]
        dropped = self.size - sum(map(len, kept))
        if not dropped:
            return self
        said = f"{dropped} of {self.size} examples {why}"
        if not all(kept):
            raise DataError(f"a file must have examples to train on, but none is left of one: {said}")
        skipped = "\n".join(filter(None, (self.skipped, said)))
        return ExampleStream(kept, seed=self._seed, shuffle=self._shuffle, weights=self._weights, skipped=skipped)


def open_examples(config: ExamplesConfig, seed: int, shape: Shape) -> ExampleStream:
    """The examples to train on, in the shape that a stage needs; whatever is wrong with a file is raised here."""
    if config.task is not None:
        task = find_task(config.task)
        problems = (task.problem(seed, "train", config.params, i) for i in range(config.problems))
        stream = ExampleStream([_of_problems(config.task, problems, shape)], seed=seed, shuffle=config.shuffle)
    else:
        stream = _mixed(config, seed, shape) if config.mix else _single(config, seed, shape)
    examples = [example for source in stream.sources for example in source]
    texts, labels = list(map(texts_of, examples)), [example.label for example in examples]
    found = find_overlap(texts, config.deduplicate, config.decontaminate, labels)
    for gone, why in found.notes([example.id for example in examples]):
        stream = stream.without(gone, why)
    return stream


def held_out_examples(config: ExamplesConfig, seed: int, count: int, shape: Shape) -> list[Example]:
    """`count` held-out examples; fewer when the file that holds them is shorter."""
    if count <= 0:
        return []
    if config.task is not None:
        problems = find_task(config.task).held_out(seed, config.params, count)
        return _of_problems(f"{config.task}/eval", problems, shape)
    examples, skipped = _read_files(config, _held_out_files(config), shape, config.format)
    stream = ExampleStream([examples], seed=seed, shuffle=config.shuffle, skipped=skipped)
    return [stream.at(position) for position in range(min(count, stream.size))]


def _of_problems(name: str, problems: Iterable[Problem], shape: Shape) -> list[Example]:
    """Demonstrations of the reference answers of a generated task."""
    return [
        example
        for index, (asked, answer) in enumerate(problems)
        for example in reshape(
            Example(f"{name}/{index}", Conversation((*asked, Message("assistant", answer)), len(asked))), shape
        )
    ]


def read_example(config: ExamplesConfig, layout: Layout | None, row: DataRow) -> Example:
    """What a row says, in the shape that its columns show."""
    try:
        check_unicode(row.values)
        values = row.values if layout is None else lay_out(layout, row.values)
        values = _with_pictures(config, values, row.file.path.parent)
        return replace(_read(_Columns(config, values)), id=row.id)
    except DataError as error:
        raise DataError(f"{row.where}: {error}") from None


def _with_pictures(config: ExamplesConfig, values: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """A row whose messages show its pictures: those of the prompt, or of each whole conversation."""
    names = config.columns
    first = [names.messages] if values.get(names.messages) else [names.prompt] if values.get(names.prompt) else []
    return {
        **values,
        **{name: with_pictures(values[name], values, folder) for name in first or (names.chosen, names.rejected)
           if values.get(name) is not None},
    }  # fmt: skip


def reshape(example: Example, shape: Shape) -> tuple[Example, ...]:
    """The example in the shape that a stage needs: one, two, or none."""
    if example.shape == shape:
        return (example,)
    if shape == "demonstration":
        return () if example.label is False else (Example(example.id, example.chosen),)
    if shape == "labelled" and example.rejected is not None:
        return (
            Example(f"{example.id}/chosen", example.chosen, label=True),
            Example(f"{example.id}/rejected", example.rejected, label=False),
        )
    needs = {"preference": "chosen and rejected", "labelled": "a label, or chosen and rejected"}[shape]
    got = {"demonstration": "a demonstration", "labelled": "a labelled answer"}[example.shape]
    raise DataError(f"this stage needs rows with {needs}, got {got}")


def found_shapes(config: ExamplesConfig) -> dict[str, Counter[Shape]]:
    """How many good rows of each shape the files to train on have, before a stage makes its own of them."""
    parts = _parts(config) if config.mix else [(_files(config), config.format)]
    found = {}
    for files, format in parts:
        columns, layout = _reading(config, format)
        for file in files:
            examples, _ = sift([file], partial(read_example, columns, layout), skip_bad_rows=True)
            found[file.name] = Counter(example.shape for example in examples)
    return found


def texts_of(example: Example) -> list[str]:
    """What is said in it, but by the system; what both sides of a preference begin with, once."""
    if example.chosen.text is not None:
        return [example.chosen.text]
    rest = example.rejected.messages[example.rejected.prompt :] if example.rejected else ()
    return [text_of(message) for message in (*example.chosen.messages, *rest) if message.role not in SYSTEM]


def _single(config: ExamplesConfig, seed: int, shape: Shape) -> ExampleStream:
    examples, skipped = _read_files(config, _files(config), shape, config.format)
    return ExampleStream([examples], seed=seed, shuffle=config.shuffle, skipped=skipped)


def _mixed(config: ExamplesConfig, seed: int, shape: Shape) -> ExampleStream:
    found = [_read_files(config, files, shape, format) for files, format in _parts(config)]
    skipped = "\n".join(note for _, note in found if note)
    sources = [examples for examples, _ in found]
    weights = [part.weight for part in config.mix if part.weight is not None]
    if not weights:
        sources = [[example for examples in sources for example in examples]]
    return ExampleStream(sources, seed=seed, shuffle=config.shuffle, weights=weights or None, skipped=skipped)


def _parts(config: ExamplesConfig) -> list[tuple[list[File], str | None]]:
    """The files of a mix, each with its format."""
    paths = [part.path for part in config.mix]
    files = [_named(local_file("data.mix", path), paths) for path in paths]
    return [([file], part.format or config.format) for file, part in zip(files, config.mix, strict=True)]


def _files(config: ExamplesConfig) -> list[File]:
    return training_files(config.path, config.hub, config.hub_files)


def _held_out_files(config: ExamplesConfig) -> list[File]:
    if config.eval_path is not None:
        file = local_file("data.eval_path", config.eval_path)
        paths = [config.path] if config.path else [part.path for part in config.mix]
        if file.path.resolve() in [local_file("data", path).path.resolve() for path in paths]:
            raise DataError(f"data.eval_path must be another file than those to train on, got {config.eval_path} twice")
        return [file]
    if config.hub is not None and config.hub_eval_files is not None:
        return held_out_hub_files(config.hub, config.hub_eval_files, config.hub_files)
    setting = "hub_eval_files" if config.hub else "eval_path"
    raise DataError(f"no held-out examples: set data.{setting}, or eval.examples to 0")


def _named(file: File, paths: Sequence[str]) -> File:
    """Two files of one name in different folders are named by their paths."""
    same = [path for path in paths if Path(path).name == file.name]
    return file if len(same) < 2 else File(file.path, str(file.path))


def _reading(config: ExamplesConfig, format: str | None) -> tuple[ExamplesConfig, Layout | None]:
    """How rows are read: by their columns, or by a format, which knows them by their usual names."""
    return (config.with_usual_columns(), find_layout(format)) if format else (config, None)


def _read_files(
    config: ExamplesConfig, files: Sequence[File], shape: Shape, format: str | None
) -> tuple[list[Example], str]:
    columns, layout = _reading(config, format)

    def read(row: DataRow) -> tuple[Example, ...]:
        example = read_example(columns, layout, row)
        try:
            return reshape(example, shape)
        except DataError as error:
            raise DataError(f"{row.where}: {error}") from None

    found, skipped = sift(files, read, config.skip_bad_rows)
    examples = [example for several in found for example in several]
    if not examples:
        raise DataError(f"{', '.join(str(file.path) for file in files)}: no row has the label true")
    return examples, skipped


class _Columns:
    """A row with its columns under the names that Kitae has for them; an empty column is an absent one."""

    def __init__(self, config: ExamplesConfig, values: Mapping[str, Any]) -> None:
        self.config = config
        self.values = values

    def __getitem__(self, name: str) -> Any:
        return self.values.get(getattr(self.config.columns, name))

    def have(self, *names: str) -> bool:
        return all(self[name] is not None for name in names)

    @property
    def tools(self) -> tuple[Tool, ...]:
        return read_tools(self["tools"])


def _read(row: _Columns) -> Example:
    if row.have("chosen", "rejected"):
        return _preference(row)
    if row.have("label"):
        return Example("", _answered(row), label=_label(row["label"]))
    if row.have("messages") or row.have("prompt", "completion"):
        return Example("", _demonstration(row))
    if row.have("text"):
        return Example("", Conversation(text=_text("text", row["text"])))
    raise DataError(_unknown(row))


def _demonstration(row: _Columns) -> Conversation:
    if not row.have("messages"):
        return _answer(row, _prompt(row), row["completion"])
    return _conversation(row, read_messages(row["messages"]), 0)


def _answered(row: _Columns) -> Conversation:
    """A labelled answer: where the row is one conversation, what came after the last turn of the user."""
    if row.have("messages"):
        messages = read_messages(row["messages"])
        return _conversation(row, messages, after_user(messages))
    if row.have("prompt", "completion"):
        return _answer(row, _prompt(row), row["completion"])
    raise DataError(_unknown(row))


def _preference(row: _Columns) -> Example:
    chosen, rejected = row["chosen"], row["rejected"]
    if row.have("prompt") and not (_is_whole(chosen) and _is_whole(rejected)):
        prompt = _prompt(row)
        pair = _answer(row, prompt, chosen), _answer(row, prompt, rejected)
    else:
        whole = _whole("chosen", chosen), _whole("rejected", rejected)
        shared = _shared(*whole)
        pair = _conversation(row, whole[0], shared), _conversation(row, whole[1], shared)
    if pair[0] == pair[1]:
        raise DataError("chosen and rejected must differ, got the same answer twice")
    return Example("", *pair, margin=_margin(row))


def after_user(messages: Sequence[Message]) -> int:
    """Where the answer to the last turn of the user begins; calls of tools and their results are part of it."""
    return max((i + 1 for i, m in enumerate(messages) if m.role not in ("assistant", "tool")), default=0)


def _shared(chosen: tuple[Message, ...], rejected: tuple[Message, ...]) -> int:
    """How many messages both begin with; what follows begins with the assistant in both."""
    pairs = zip(chosen[:-1], rejected[:-1], strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    while shared and not chosen[shared].role == rejected[shared].role == "assistant":
        shared -= 1
    if not shared:
        raise DataError("chosen and rejected must begin with the same messages, got different ones; or give a prompt")
    return shared


def _prompt(row: _Columns) -> tuple[Message, ...]:
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return (Message("user", _text("prompt", prompt)),)
    messages = read_messages(prompt)
    if messages[-1].role == "assistant":
        raise DataError("a prompt must end with a turn that the assistant answers, got one that ends with its own")
    return messages


def _answer(row: _Columns, prompt: tuple[Message, ...], answer: object) -> Conversation:
    if isinstance(answer, str):
        return _conversation(row, (*prompt, Message("assistant", _text("answer", answer))), len(prompt))
    turns = read_messages(answer) if isinstance(answer, list) else (read_message(answer),)
    if turns[0].role != "assistant":
        raise DataError(f"an answer must begin with a turn of the assistant, got one of {turns[0].role!r}")
    return _conversation(row, (*prompt, *turns), len(prompt))


def _conversation(row: _Columns, messages: tuple[Message, ...], prompt: int) -> Conversation:
    if messages[-1].role != "assistant":
        raise DataError(f"a conversation must end with a turn of the assistant, got one of {messages[-1].role!r}")
    if row.config.system is not None and not any(m.role == "system" for m in messages):
        messages, prompt = (Message("system", row.config.system), *messages), prompt + (prompt > 0)
    if messages[0].role == "assistant":
        raise DataError("a conversation must begin with what the assistant answers, got a turn of its own")
    return Conversation(messages, prompt, row.tools)


def _is_whole(side: object) -> bool:
    """A conversation that has its prompt in it, and not an answer alone."""
    return isinstance(side, list) and bool(side) and isinstance(side[0], Mapping) and side[0].get("role") != "assistant"


def _whole(name: str, side: object) -> tuple[Message, ...]:
    if isinstance(side, str):
        return _dialogue(name, side)
    return read_messages(side)


_TURN = re.compile(r"\n\n(Human|Assistant):")


def _dialogue(name: str, text: str) -> tuple[Message, ...]:
    r"""`"\n\nHuman: Hi\n\nAssistant: Hello"` as messages."""
    before, *turns = _TURN.split(text if text.startswith("\n\n") else f"\n\n{text.lstrip()}")
    if before.strip() or not turns:
        raise DataError(
            f"without a prompt, {name} must be messages or text of the form "
            f"'\\n\\nHuman: … \\n\\nAssistant: …', got {clip(repr(text))}"
        )
    roles = {"Human": "user", "Assistant": "assistant"}
    rows = [{"role": roles[who], "content": said.strip()} for who, said in zip(turns[::2], turns[1::2], strict=True)]
    return read_messages(rows)


def _label(value: object) -> bool:
    if isinstance(value, bool) or (isinstance(value, int | float) and value in (0, 1)):
        return bool(value)
    raise DataError(f"a label must be true or false, got {clip(repr(value))}")


def _margin(row: _Columns) -> float | None:
    scores = [row.values.get(key) for key in row.config.columns.scores]
    if row.have("margin"):
        margin = _number("margin", row["margin"])
    elif None not in scores:
        margin = _number("score", scores[0]) - _number("score", scores[1])
    else:
        return None
    if margin < 0:
        raise DataError(f"chosen must be at least as good as rejected, got a margin of {margin:g}")
    return margin


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"a {name} must be a number, got {clip(repr(value))}")
    return float(value)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"the {name} must be text and not empty, got {clip(repr(value))}")
    return value


def _unknown(row: _Columns) -> str:
    hint = ""
    if "conversations" in row.values:
        hint = "; data.format='sharegpt' reads conversations"
    elif "instruction" in row.values:
        hint = "; data.format='alpaca' reads instructions"
    return (
        "a row must have text; messages; prompt and completion; or chosen and rejected (data.columns names "
        f"them); it has {listed(list(row.values))}{hint}"
    )
