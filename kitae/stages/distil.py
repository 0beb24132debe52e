"""Distillation on a file: the divergence from a teacher at each trained token of demonstrations."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from kitae.config.root import DistilFileConfig
from kitae.data.examples import Shape
from kitae.models.load import export_policy, load_policy
from kitae.observe.observer import Observer
from kitae.stages.base import Item, sample_of
from kitae.trainer.base import Batch, Column, Trainer
from kitae.trainer.objectives import Objective
from kitae.trainer.teacher import Distilled, TeacherDivergence, load_teacher
from kitae.types import FloatArray


class FileDistillation:
    """Every token of a batch counts the same. What a demonstration says is only where teacher and student look."""

    shape: Shape = "demonstration"

    def __init__(self, config: DistilFileConfig) -> None:
        method, training = config.method, config.training
        self._policy = load_policy(config.model, config.run.seed)
        teacher = load_teacher(config.model, method.teacher, self._policy, training, temperature=1.0)
        apart = TeacherDivergence(teacher, training, beta=method.beta, temperature=method.temperature)
        self.objective: Objective = Distilled(self._policy, training, apart)

    async def prepare(
        self, trainer: Trainer, items: Iterable[Item], held_out: Sequence[Item], folder: Path, observer: Observer
    ) -> None:
        pass

    async def batch(self, trainer: Trainer, items: Sequence[Item]) -> Batch:
        tokens = sum(int(item.sequences[0].mask_T.sum()) for item in items)
        return Batch(tuple(sample_of(i, 0, item.sequences[0], 1 / tokens) for i, item in enumerate(items)))

    async def evaluate(self, trainer: Trainer, items: Sequence[Item]) -> FloatArray:
        """The divergence per token of each example."""
        samples = [sample_of(i, 0, item.sequences[0]) for i, item in enumerate(items)]
        read = await trainer.annotate(samples, [Column.OLD])
        return np.array([s.loss(Column.OLD.value).mean() for s in read], dtype=np.float32)

    def export(self, folder: Path) -> None:
        export_policy(self._policy, folder)
