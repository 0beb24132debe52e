"""Kahneman–Tversky optimisation: single answers, each good or bad, and no pairs of them."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kitae.config.root import KTOConfig
from kitae.data.examples import Shape
from kitae.data.rendering import Rendered
from kitae.models.load import Load, load_policy
from kitae.observe.observer import Observer
from kitae.offline.base import Item, better, sample_of
from kitae.offline.reference_logprobs import COLUMN, ReferenceLogProbs
from kitae.trainer.base import Batch, Column, Trainer
from kitae.trainer.objectives import Objective
from kitae.trainer.responses import Rated
from kitae.types import FloatArray, Sample


class KTO:
    """Every answer of a batch counts the same, times the weight of its label.

    How far the policy has moved is measured on answers to other prompts: each example has a partner for the whole run,
    whose answer is put after its prompt (`kitae.offline.example_batches`).
    """

    shape: Shape = "labelled"

    def __init__(self, config: KTOConfig) -> None:
        self._config = config
        self._limit = config.data.max_tokens
        self._reference: ReferenceLogProbs

    def make_objective(self, load: Load = load_policy) -> Objective:
        m, policy = self._config.method, load(self._config.model, self._config.run.seed)
        return Rated(policy, self._config.training, beta=m.beta, desirable=m.desirable, undesirable=m.undesirable)

    async def prepare(
        self, trainer: Trainer, items: Iterable[Item], held_out: Sequence[Item], folder: Path, observer: Observer
    ) -> None:
        self._reference = ReferenceLogProbs(folder, observer, self._config)
        units = ([sample_of(i, 0, x.sequences[0]), self._strange(i, x)] for i, x in enumerate(items))
        await self._reference.add(trainer, units)
        await self._reference.add(trainer, ([sample_of(i, 0, x.sequences[0])] for i, x in enumerate(held_out)))

    async def batch(self, trainer: Trainer, items: Sequence[Item]) -> Batch:
        strange = await trainer.annotate([self._strange(i, item) for i, item in enumerate(items)], [Column.OLD])
        moved = [_log_ratio(self._reference.annotated(s)) for s in strange]
        kl = np.float32(max(0.0, float(np.mean(moved))))
        return Batch(tuple(self._sample(i, item, 1 / len(items), kl) for i, item in enumerate(items)))

    async def evaluate(self, trainer: Trainer, items: Sequence[Item]) -> FloatArray:
        """Whether a good answer has become more likely than it was, or a bad one less likely."""
        samples = [self._reference.annotated(sample_of(i, 0, item.sequences[0])) for i, item in enumerate(items)]
        ratio = np.array([_log_ratio(s) for s in await trainer.annotate(samples, [Column.OLD])])
        sign = np.array([1.0 if item.label else -1.0 for item in items])
        return better(sign * ratio)

    def _strange(self, number: int, item: Item) -> Sample:
        assert item.partner is not None
        return sample_of(number, 1, mismatched(item.sequences[0], item.partner, self._limit))

    def _sample(self, number: int, item: Item, weight: float, kl: np.float32) -> Sample:
        sample = self._reference.annotated(sample_of(number, 0, item.sequences[0], weight))
        good = np.float32(bool(item.label))
        return sample.with_columns(desirable=sample.spread(good), kl=sample.spread(kl))


def mismatched(prompt: Rendered, answer: Rendered, limit: int) -> Rendered:
    """The prompt of one example and the answer of another; what is longer than the limit is cut off at the end."""
    begin = prompt.tokens_T[: prompt.prompt_length]
    rest, mask = answer.tokens_T[answer.prompt_length :], answer.mask_T[answer.prompt_length :]
    fits = max(1, limit - len(begin))
    return replace(
        prompt,
        tokens_T=np.concatenate([begin, rest[:fits]]),
        mask_T=np.concatenate([np.zeros(len(begin), dtype=np.bool_), mask[:fits]]),
        cut=max(0, len(rest) - fits),
    )


def _log_ratio(sample: Sample) -> float:
    difference = sample.loss(Column.OLD.value).astype(np.float64) - sample.loss(COLUMN)
    return float(difference.sum())
