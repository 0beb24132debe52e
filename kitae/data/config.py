"""Settings of the data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from kitae.data.formats import FORMATS
from kitae.data.layouts import LAYOUTS
from kitae.data.overlap import Deduplicate
from kitae.data.tasks import TASKS
from kitae.section import Section, Table

SOURCES = ("task", "gym", "path", "hub")


class PromptColumns(Table):
    """What the columns of a file of prompts are called."""

    prompt: str = Field("question", min_length=1, description="The question, or a list of chat messages.")
    answer: str = Field(
        "answer", description="The reference answer; empty: there is none, and the verifier needs none."
    )


class DataConfig(Section):
    """Where prompts come from: exactly one of task, gym, path or hub."""

    task: str | None = Field(None, description=f"A generated task: {', '.join(TASKS)}.")
    gym: str | None = Field(None, description="Data sets of reasoning-gym, separated by commas; they take turns.")
    params: dict[str, JsonValue] = Field(
        default_factory=dict, description="Difficulty and options of the task, or the config of the gym's data sets."
    )
    path: str | None = Field(
        None,
        description="A .jsonl, .json, .csv or .parquet file of training prompts, or a folder that `datasets` saved.",
    )
    eval_path: str | None = Field(None, description="A file of held-out prompts.")
    hub: str | None = Field(None, description="A data set on the hub, e.g. openai/gsm8k.")
    hub_files: str = Field("main/train-*.parquet", description="Files of the hub data set to train on.")
    hub_eval_files: str | None = Field("main/test-*.parquet", description="Files of the hub data set to evaluate on.")
    format: str | None = Field(
        None,
        description="Read rows as math, svamp, mbpp, humaneval, apps, taco, livecodebench, evalplus, ifeval, trl or "
        "verl "
        "have them, or by your own file.py:function.",
    )
    columns: PromptColumns = PromptColumns()
    answer_after: str | None = Field(None, description="Keep only the reference text after this mark, e.g. '####'.")
    system: str | None = Field(None, description="System message put before each question.")
    instruction: str = Field("{question}", description="Template of the user turn; {question} is replaced.")
    skip_bad_rows: bool = Field(False, description="Leave out rows that cannot be read, instead of refusing the file.")
    shuffle: bool = Field(True, description="Visit the prompts in a seeded random order, a new one each epoch.")
    deduplicate: Deduplicate = Field(
        "none",
        description="Leave out rows that repeat an earlier one: exact, but for case and spaces; or near, where most of "
        "the words are the same.",
    )
    decontaminate: tuple[str, ...] = Field(
        (), description="Files of evaluations: rows to train on that overlap with a text in them are left out."
    )

    @property
    def paths(self) -> dict[str, str]:
        """The files on this machine, by the settings that name them."""
        return {f"data.{key}": path for key in ("path", "eval_path") if (path := getattr(self, key))}

    @property
    def files(self) -> list[Path]:
        """The files of this machine that hold references."""
        return [Path(path) for path in (self.path, self.eval_path, *self.decontaminate) if path]

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"data needs exactly one of {', '.join(SOURCES)}, got {' and '.join(given) or 'none'}")
        if "{question}" not in self.instruction:
            raise ValueError(f"data.instruction must contain {{question}}, got {self.instruction!r}")
        if self.params and self.task is None and self.gym is None:
            raise ValueError("data.params belongs to a generated task, but neither data.task nor data.gym is set")
        if self.format is not None and not (self.path or self.hub or self.eval_path):
            raise ValueError("data.format reads the rows of a file, but none of data.path, hub and eval_path is set")
        if self.format is not None and self.answer_after is not None:
            raise ValueError(f"data.format = {self.format!r} finds the reference itself: remove data.answer_after")
        if (self.deduplicate != "none" or self.decontaminate) and not (self.path or self.hub):
            raise ValueError("data.deduplicate and data.decontaminate sift rows, but neither data.path nor hub is set")
        return self


def usual_verifier(data: Mapping[str, Any]) -> str | None:
    """Tasks and formats know their verifier; a recipe need not name it."""
    known = TASKS.get(str(data.get("task"))) or FORMATS.get(str(data.get("format")))
    return known.verifier if known else "gym" if data.get("gym") else None


EXAMPLE_SOURCES = ("path", "mix", "hub", "task")


class ExampleColumns(Table):
    """What the columns of a file of examples are called."""

    text: str = Field("text", description="Plain text, all of it trained on.")
    prompt: str = Field("prompt", description="A prompt: text, or a list of chat messages.")
    completion: str = Field("completion", description="The answer to it: text or messages.")
    messages: str = Field("messages", description="A whole conversation.")
    tools: str = Field("tools", description="The tools that the template tells the model of.")
    chosen: str = Field("chosen", description="The better answer, or the better conversation.")
    rejected: str = Field("rejected", description="The worse one.")
    label: str = Field("label", description="Whether an answer is good: true or false.")
    margin: str = Field("margin", description="How much better the better answer is.")
    scores: tuple[str, str] = Field(
        ("score_chosen", "score_rejected"),
        description="A score of each answer; the margin is between them.",
    )


class MixPart(Section):
    """One file of a mix: `{path = "chat.jsonl", weight = 2}`."""

    path: str = Field(description="A .jsonl, .json or .parquet file.")
    weight: float | None = Field(None, gt=0, description="Its share, compared with the other files.")
    format: str | None = Field(None, description="How its rows are laid out, where data.format does not say it.")


class ExamplesConfig(Section):
    """Where examples come from, for training without sampling: exactly one of path, mix, hub or task."""

    path: str | None = Field(None, description="A .jsonl, .json or .parquet file of examples to train on.")
    mix: tuple[MixPart, ...] = Field(
        (), description='Several files: [{path = "a.jsonl", weight = 2}, …]; without weights they are one file.'
    )
    eval_path: str | None = Field(None, description="A file of held-out examples.")
    hub: str | None = Field(None, description="A data set on the hub, e.g. HuggingFaceH4/ultrafeedback_binarized.")
    hub_files: str = Field("data/train-*.parquet", description="Files of the hub data set to train on.")
    hub_eval_files: str | None = Field(None, description="Files of the hub data set to evaluate on.")
    task: str | None = Field(None, description="A generated task, whose reference answers are the demonstrations.")
    params: dict[str, JsonValue] = Field(default_factory=dict, description="Difficulty and options of the task.")
    problems: int = Field(1000, ge=1, description="How many problems of the task are the examples to train on.")
    format: str | None = Field(
        None, description=f"Read rows as {' or '.join(LAYOUTS)} has them, or by your own file.py:function."
    )
    columns: ExampleColumns = ExampleColumns()
    system: str | None = Field(None, description="System message put before each conversation that has none.")
    train_on: Literal["all", "last", "completion"] = Field(
        "all",
        description="Which turns of the assistant are trained on: all after the prompt; the last one; or the "
        "completion, which is what follows the prompt, or the last turn of the user where a row has no prompt.",
    )
    max_tokens: int = Field(2048, ge=2, description="The longest example, in tokens.")
    too_long: Literal["drop", "truncate", "refuse"] = Field(
        "drop", description="What happens to longer ones: left out and counted, cut off at the end, or an error."
    )
    skip_bad_rows: bool = Field(False, description="Leave out rows that cannot be read, instead of refusing the file.")
    shuffle: bool = Field(True, description="Visit the examples in a seeded random order, a new one each epoch.")
    deduplicate: Deduplicate = Field(
        "none",
        description="Leave out rows that repeat an earlier one: exact, but for case and spaces; or near, where most of "
        "the words are the same.",
    )
    decontaminate: tuple[str, ...] = Field(
        (), description="Files of evaluations: rows to train on that overlap with a text in them are left out."
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in EXAMPLE_SOURCES if getattr(self, name)]
        if len(given) != 1:
            wanted = ", ".join(EXAMPLE_SOURCES)
            raise ValueError(f"data needs exactly one of {wanted}, got {' and '.join(given) or 'none'}")
        if self.params and self.task is None:
            raise ValueError("data.params belongs to a generated task, but data.task is not set")
        paths = [part.path for part in self.mix]
        if twice := [path for path in paths if paths.count(path) > 1]:
            raise ValueError(
                f"data.mix must name each file once, with a weight if it counts more, got {twice[0]} twice"
            )
        weights = [part.weight for part in self.mix]
        if any(weights) and not all(weights):
            raise ValueError(f"data.mix needs a weight for every file or for none, got {weights}")
        usual = dict(ExampleColumns())
        if self.format is not None and (named := [key for key, name in self.columns if name != usual[key]]):
            raise ValueError(f"data.format = {self.format!r} finds the columns itself: remove data.columns.{named[0]}")
        return self

    @property
    def paths(self) -> dict[str, str]:
        """The files on this machine, by the settings that name them."""
        return {f"data.{key}": path for key in ("path", "eval_path") if (path := getattr(self, key))}

    @property
    def source(self) -> str:
        """What to call it: `"train.jsonl"`."""
        return self.path or self.hub or self.task or " and ".join(part.path for part in self.mix)

    def with_usual_columns(self) -> Self:
        """The settings with the columns as a format names them, whatever other files call theirs."""
        return self.model_copy(update={"columns": ExampleColumns()})
