"""Settings of the data."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, JsonValue, model_validator

from kitae.data.formats import FORMATS
from kitae.data.tasks import TASKS
from kitae.section import Section

SOURCES = ("task", "gym", "path", "hub")


class DataConfig(Section):
    """Where prompts come from: exactly one of task, gym, path or hub."""

    task: str | None = Field(None, description=f"A generated task: {', '.join(TASKS)}.")
    gym: str | None = Field(None, description="Data sets of reasoning-gym, separated by commas; they take turns.")
    params: dict[str, JsonValue] = Field(
        default_factory=dict, description="Difficulty and options of the task, or the config of the gym's data sets."
    )
    path: str | None = Field(None, description="A .jsonl, .json or .parquet file of training prompts.")
    eval_path: str | None = Field(None, description="A file of held-out prompts.")
    hub: str | None = Field(None, description="A data set on the hub, e.g. openai/gsm8k.")
    hub_files: str = Field("main/train-*.parquet", description="Files of the hub data set to train on.")
    hub_eval_files: str | None = Field("main/test-*.parquet", description="Files of the hub data set to evaluate on.")
    format: str | None = Field(
        None,
        description="Read rows as math, svamp, mbpp, humaneval or ifeval have them, or by your own file.py:function.",
    )
    prompt_key: str = Field("question", description="Column with the question, or with a list of chat messages.")
    answer_key: str = Field("answer", description="Column with the reference answer.")
    answer_after: str | None = Field(None, description="Keep only the reference text after this mark, e.g. '####'.")
    system: str | None = Field(None, description="System message put before each question.")
    instruction: str = Field("{question}", description="Template of the user turn; {question} is replaced.")
    skip_bad_rows: bool = Field(False, description="Leave out rows that cannot be read, instead of refusing the file.")
    shuffle: bool = Field(True, description="Visit the prompts in a seeded random order, a new one each epoch.")

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
        return self


def usual_verifier(data: Mapping[str, Any]) -> str | None:
    """Tasks and formats know their verifier; a recipe need not name it."""
    known = TASKS.get(str(data.get("task"))) or FORMATS.get(str(data.get("format")))
    return known.verifier if known else "gym" if data.get("gym") else None
