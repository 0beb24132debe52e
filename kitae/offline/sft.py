"""Learning from demonstrations, each trained token counting the same: by its log-likelihood (SFT), or by the divergence
from a teacher (distillation on a file).
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from kitae.config.root import DistilFileConfig, SFTConfig
from kitae.data.examples import Shape
from kitae.models.load import Load, load_policy
from kitae.observe.observer import Observer
from kitae.offline.base import Item, sample_of
from kitae.trainer.base import Batch, Column, Trainer
from kitae.trainer.objectives import Likelihood, Objective
from kitae.trainer.teacher.frozen_teacher import Distilled, TeacherDivergence, load_teacher
from kitae.types import FloatArray


class Demonstrations:
    """A `Method` but for its objective. sign: by which what the objective reads of a token becomes the loss of it."""

    shape: Shape = "demonstration"
    sign = 1.0

    async def prepare(
        self, trainer: Trainer, items: Iterable[Item], held_out: Sequence[Item], folder: Path, observer: Observer
    ) -> None:
        pass

    async def batch(self, trainer: Trainer, items: Sequence[Item]) -> Batch:
        tokens = sum(int(item.sequences[0].mask_T.sum()) for item in items)
        return Batch(tuple(sample_of(i, 0, item.sequences[0], 1 / tokens) for i, item in enumerate(items)))

    async def evaluate(self, trainer: Trainer, items: Sequence[Item]) -> FloatArray:
        """The loss per token of each example."""
        samples = [sample_of(i, 0, item.sequences[0]) for i, item in enumerate(items)]
        read = await trainer.annotate(samples, [Column.OLD])
        return np.array([self.sign * s.loss(Column.OLD.value).mean() for s in read], dtype=np.float32)


class SFT(Demonstrations):
    """Every token of a batch counts the same, whichever example it is of."""

    sign = -1.0

    def __init__(self, config: SFTConfig) -> None:
        self._config = config

    def make_objective(self, load: Load = load_policy) -> Objective:
        config, policy = self._config, load(self._config.model, self._config.run.seed)
        dft = config.method.loss == "dft"
        return Likelihood(policy, config.training, temperature=1.0, by_probability=dft)


class FileDistillation(Demonstrations):
    """Every token of a batch counts the same. What a demonstration says is only where teacher and student look."""

    def __init__(self, config: DistilFileConfig) -> None:
        self._config = config

    def make_objective(self, load: Load = load_policy) -> Objective:
        config = self._config
        method, training = config.method, config.training
        policy = load(config.model, config.run.seed)
        teacher = load_teacher(config.model, method.teacher.path, policy, training, temperature=1.0)
        apart = TeacherDivergence(teacher, training, beta=method.beta, temperature=method.temperature)
        return Distilled(policy, training, apart)
