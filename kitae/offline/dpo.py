"""Direct preference optimisation and its family: the answer that was preferred is made more likely than the other."""

from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from kitae.algorithms.preferences import PREFERENCE_LOSSES, PairBatch
from kitae.config.root import DPOConfig
from kitae.data.examples import Shape
from kitae.models.load import Load, load_policy
from kitae.observe.observer import Observer
from kitae.offline.base import Item, better, pair_of
from kitae.offline.reference_logprobs import COLUMN, ReferenceLogProbs
from kitae.trainer.base import Batch, Column, Trainer
from kitae.trainer.objectives import Objective
from kitae.trainer.responses import Preference
from kitae.types import FloatArray, Sample


class DPO:
    """Every pair of a batch counts the same. The reference is the policy as it was before the first step."""

    shape: Shape = "preference"

    def __init__(self, config: DPOConfig) -> None:
        self._config = config
        self._loss = PREFERENCE_LOSSES[config.method.loss]
        self._settings = self._loss.settings(config.method.settings)
        self._reference: ReferenceLogProbs | None = None

    def make_objective(self, load: Load = load_policy) -> Objective:
        config, policy = self._config, load(self._config.model, self._config.run.seed)
        return Preference(policy, config.training, self._loss, self._settings, sft_coef=config.method.sft_coef)

    async def prepare(
        self, trainer: Trainer, items: Iterable[Item], held_out: Sequence[Item], folder: Path, observer: Observer
    ) -> None:
        if self._loss.reference:
            self._reference = ReferenceLogProbs(folder, observer, self._config)
            await self._reference.add(trainer, (pair_of(i, x) for i, x in enumerate(chain(items, held_out))))

    async def batch(self, trainer: Trainer, items: Sequence[Item]) -> Batch:
        pairs = (pair_of(i, item, 1 / len(items)) for i, item in enumerate(items))
        return Batch(tuple(self._referred(s) for pair in pairs for s in pair))

    async def evaluate(self, trainer: Trainer, items: Sequence[Item]) -> FloatArray:
        """Whether the implicit reward of the chosen answer is the higher one."""
        samples = [self._referred(s) for i, item in enumerate(items) for s in pair_of(i, item)]
        scored = await trainer.annotate(samples, [Column.OLD])
        chosen, rejected = self._loss.implicit_rewards(self._measured(scored), self._settings["beta"])
        return better((chosen - rejected).numpy())

    def _referred(self, sample: Sample) -> Sample:
        return sample if self._reference is None else self._reference.annotated(sample)

    def _measured(self, scored: Sequence[Sample]) -> PairBatch:
        """Chosen and rejected take turns."""
        logp = _sums(scored, Column.OLD.value)
        ref = None if self._reference is None else _sums(scored, COLUMN)
        length = torch.tensor([s.loss_tokens for s in scored])
        return PairBatch(
            logp[0::2],
            logp[1::2],
            None if ref is None else ref[0::2],
            None if ref is None else ref[1::2],
            length[0::2],
            length[1::2],
        )


def _sums(samples: Sequence[Sample], column: str) -> torch.Tensor:
    return torch.tensor([s.loss(column).sum(dtype=np.float64) for s in samples])
