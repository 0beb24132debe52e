"""The process in which a teacher runs; the other end is `kitae.trainer.teacher.teacher_process`.

    setup  {"model": {…}, "rows", "token_budget", "temperature"}                            greeting  {}
    job    {"tokens", "positions", "spans", "sources", "targets", "threads"}, of one row    answer    {"logp": […]}

model: the settings by which the teacher is loaded. The numbers of an answer are those that the teacher would give in
the trainer's process, bit for bit: a row is computed as it was laid out, and JSON keeps every digit.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kitae.data.packing import Row, Span
from kitae.models.config import ModelConfig
from kitae.models.load import forked
from kitae.trainer.config import LearningConfig
from kitae.workers.templates.template_main import Answer, serve

if TYPE_CHECKING:
    from kitae.trainer.teacher.frozen_teacher import Teacher


def main() -> None:
    serve(load)


def load(setup: Mapping[str, Any]) -> tuple[Mapping[str, Any], Answer]:
    config = ModelConfig(**setup["model"])
    return {}, partial(_answer, forked(config.device, partial(_open, config, setup)))


def job_of(row: Row, threads: int) -> dict[str, Any]:
    """What is asked of a row."""
    return {
        "tokens": row.tokens_T.tolist(),
        "positions": row.positions_T.tolist(),
        "spans": [[s.start, s.length, s.prefix_start, s.prefix_length] for s in row.spans],
        "sources": row.source_N.tolist(),
        "targets": row.target_N.tolist(),
        "threads": threads,
    }


def _row_of(job: Mapping[str, Any]) -> Row:
    tokens, positions, sources, targets = (
        np.array(job[name], dtype=np.int64) for name in ("tokens", "positions", "sources", "targets")
    )
    unused = np.zeros(len(targets), dtype=np.float32)
    spans = tuple(Span(*span) for span in job["spans"])
    return Row(tokens, positions, spans, sources, targets, unused, {}, (len(targets),))


def _open(config: ModelConfig, setup: Mapping[str, Any]) -> "Teacher":
    from kitae.models.load import load_policy
    from kitae.trainer.teacher.frozen_teacher import Teacher

    training = LearningConfig(token_budget=setup["token_budget"])
    return Teacher(load_policy(config), training, setup["temperature"], setup["rows"])


def _answer(open_teacher: "Callable[[], Teacher]", job: Mapping[str, Any]) -> Mapping[str, Any]:
    import torch

    from kitae.trainer.trainable_model import outputs

    torch.set_num_threads(job["threads"])  # here and not in the template: a fork has none but its own
    (logp_N,) = outputs(open_teacher(), [_row_of(job)])
    return {"logp": logp_N.tolist()}
