"""What the kinds of run share that learn from demonstrations, each trained token counting the same."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from kitae.data.examples import Shape
from kitae.observe.observer import Observer
from kitae.offline.base import Item, sample_of
from kitae.trainer.base import Batch, Column, Trainer
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
