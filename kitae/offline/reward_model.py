"""Reward models: a score for a whole answer, learnt from pairs of which one is preferred (Bradley–Terry)."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kitae.config.root import RewardConfig
from kitae.data.examples import Example, Shape
from kitae.errors import DataError
from kitae.models.classifier import begin_scalar
from kitae.models.load import Load, load_policy
from kitae.models.scorer import scored
from kitae.observe.observer import Observer
from kitae.offline.base import Item, better, pair_of
from kitae.trainer.base import Batch, Column, Trainer
from kitae.trainer.objectives import Objective
from kitae.trainer.responses import ScoredPairs
from kitae.types import FloatArray, Sample


class RewardModelling:
    """Every pair of a batch counts the same. A score is read at the last token of an answer, the one that stops it."""

    shape: Shape = "preference"

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._margin_coef = config.method.margin_coef

    def make_objective(self, load: Load = load_policy) -> Objective:
        model = begin_scalar(self._config.model, self._config.run.seed, load)
        return ScoredPairs(model, centring=self._config.method.centring)

    async def prepare(
        self, trainer: Trainer, items: Iterable[Item], held_out: Sequence[Item], folder: Path, observer: Observer
    ) -> None:
        pass

    async def batch(self, trainer: Trainer, items: Sequence[Item]) -> Batch:
        return Batch(tuple(s for i, item in enumerate(items) for s in self._pair(i, item, 1 / len(items))))

    async def evaluate(self, trainer: Trainer, items: Sequence[Item]) -> FloatArray:
        """Whether the chosen answer has the higher score."""
        samples = [s for i, item in enumerate(items) for s in self._pair(i, item)]
        read = await trainer.annotate(samples, [Column.OLD])
        scores = np.concatenate([s.loss(Column.OLD.value) for s in read])
        return better(scores[0::2] - scores[1::2])

    def _pair(self, number: int, item: Item, weight: float = 0.0) -> tuple[Sample, Sample]:
        whole = replace(item, sequences=tuple(map(scored, item.sequences)))
        margin = np.float32(self._margin_coef * (item.margin or 0.0))
        chosen, rejected = (s.with_columns(margin=s.spread(margin)) for s in pair_of(number, whole, weight))
        return chosen, rejected


def check_margins(config: RewardConfig, examples: Iterable[Example]) -> None:
    coefficient = config.method.margin_coef
    if coefficient and all(example.margin is None for example in examples):
        raise DataError(
            f"method.margin_coef is {coefficient:g}, but no row has a margin: data.columns.margin names its column, "
            "data.columns.scores two columns that it is between"
        )
