"""The seam of offline stages: what a kind of training on examples must say about itself. The loop knows nothing else.

Example ─► Item ─► Sample ─► Batch ─► trainer
(data)     tokens  (method)  weights, and what else the loss reads
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kitae.data.examples import Shape
from kitae.data.rendering import Rendered
from kitae.evaluation.held_out import digest
from kitae.models.load import Load, load_policy
from kitae.observe.observer import Observer
from kitae.trainer.base import Batch, Trainer
from kitae.trainer.objectives import Objective
from kitae.trainer.responses import PLACE
from kitae.types import FloatArray, Sample


@dataclass(frozen=True, slots=True)
class Item:
    """An example in tokens: `Item("train.jsonl:17", (Rendered(…),))`; a pair has two sequences, chosen first.

    partner: of a labelled answer to train on, one that was given to another prompt.
    """

    id: str
    sequences: tuple[Rendered, ...]
    label: bool | None = None
    margin: float | None = None
    partner: Rendered | None = None

    @property
    def digest(self) -> str:
        """The same for the same tokens, in whatever file they stand."""
        return digest(repr(([s.tokens_T.tolist() for s in self.sequences], self.label)))


class Method(Protocol):
    """shape: what its examples are.

    Everything about a batch depends on its items alone, and on what `prepare` has left in the folder of the run: a run
    that resumes from a checkpoint goes on with the same numbers.
    """

    shape: Shape

    def make_objective(self, load: Load = load_policy) -> Objective:
        """Load its model, and say what it is trained for: on whichever rank that is."""

    async def prepare(
        self, trainer: Trainer, items: Iterable[Item], held_out: Sequence[Item], folder: Path, observer: Observer
    ) -> None:
        """Before the first step, and when a run goes on: what must be known of all items that will be trained on, and
        of those that are held out. The trainer has the weights that the run begins with. observer: receives the
        progress, where that takes its time."""

    async def batch(self, trainer: Trainer, items: Sequence[Item]) -> Batch:
        """What one step trains on."""

    async def evaluate(self, trainer: Trainer, items: Sequence[Item]) -> FloatArray:
        """One number for each item: what `measure` of the config calls it."""


def sample_of(group: int, index: int, sequence: Rendered, weight: float = 0.0, unit: int | None = None) -> Sample:
    """A sequence whose loss tokens weigh the same: `sample_of(0, 1, rendered, weight=1 / 32)`."""
    mask_T = sequence.mask_T
    weight_T = mask_T.astype(np.float32) * np.float32(weight)
    return Sample(group, index, sequence.tokens_T, sequence.prompt_length, mask_T, weight_T, unit=unit)


def pair_of(group: int, item: Item, weight: float = 0.0) -> tuple[Sample, Sample]:
    """The chosen and the rejected answer of the batch's pair `group`; each has the weight of the pair."""
    chosen, rejected = (sample_of(group, i, sequence, weight, unit=group) for i, sequence in enumerate(item.sequences))
    return _placed(chosen), _placed(rejected)


def _placed(sample: Sample) -> Sample:
    return sample.with_columns(**{PLACE: sample.spread(np.float32(2 * sample.group + sample.index))})


def better(difference: npt.NDArray[Any]) -> FloatArray:
    """1 where it is positive, 0 where it is negative, ½ for a tie: a policy that has not moved knows nothing."""
    return np.asarray((np.sign(difference) + 1) / 2, dtype=np.float32)
