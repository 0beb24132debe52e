"""Supervised fine-tuning: the mean negative log-likelihood of the trained tokens of a batch."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from kitae.config.root import SFTConfig
from kitae.data.examples import Shape
from kitae.models.load import export_policy, load_policy
from kitae.observe.observer import Observer
from kitae.stages.base import Item, sample_of
from kitae.trainer.base import Batch, Column, Trainer
from kitae.trainer.objectives import Likelihood, Objective
from kitae.types import FloatArray


class SFT:
    """Every token of a batch counts the same, whichever example it is of."""

    shape: Shape = "demonstration"

    def __init__(self, config: SFTConfig) -> None:
        self._policy = load_policy(config.model, config.run.seed)
        dft = config.method.loss == "dft"
        self.objective: Objective = Likelihood(self._policy, config.training, temperature=1.0, by_probability=dft)

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
        scored = await trainer.annotate(samples, [Column.OLD])
        return np.array([-s.loss(Column.OLD.value).mean() for s in scored], dtype=np.float32)

    def export(self, folder: Path) -> None:
        export_policy(self._policy, folder)
