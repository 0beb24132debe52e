"""A model that learns, on one rank: its objective, its gradients, its optimizer. Policy and critic are one each."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from kitae.data.packing import Row
from kitae.models.router_terms import RouterCoefficients, RouterTerms, chosen_shares
from kitae.models.routing import RouterLoad, RouterShape, record_routing, replay_routing
from kitae.observe.meter import Kind, Meter, Sum, Totals
from kitae.trainer.base import Conditions, Mark
from kitae.trainer.collective_ops import Ranks
from kitae.trainer.config import LearningConfig
from kitae.trainer.forward import MicroBatch, checkpoint_activations, training_mode
from kitae.trainer.objectives import Objective, Reading
from kitae.trainer.optim import Optimizer
from kitae.types import ExpertArray, FloatArray


class Trained:
    """name: put before the numbers of its optimizer. total_updates: for the schedule of the learning rate. routers: of
    the terms for them, where there are any."""

    def __init__(
        self,
        objective: Objective,
        config: LearningConfig,
        ranks: Ranks,
        *,
        total_updates: int,
        name: str = "",
        routers: RouterCoefficients | None = None,
    ) -> None:
        self.objective = objective
        self._routers = routers
        self.config = config
        self.name = name
        self._ranks = ranks
        self._finite: list[Tensor] = []  # whether the losses since the last update are
        checkpoint_activations(objective.policy, config)
        self.optimizer = Optimizer(objective.model.named_parameters(), config, total_updates, host=ranks.host)

    @property
    def pending(self) -> bool:
        """Whether there are gradients to apply."""
        return bool(self._finite)

    def forward_backward(self, rows: Iterable[Row], conditions: Conditions) -> Totals:
        """Add the gradient of these rows; the numbers of their tokens."""
        meter, load = Meter(), RouterLoad()
        policy, tokens, rows = self.objective.policy, 0, list(rows)
        terms = self._terms(rows)
        with training_mode(policy, self.config):
            for row in rows:
                micro = MicroBatch.of(row, policy.device)
                with self._routed(micro, load), load.watch(policy.model), terms.watch() if terms else nullcontext():
                    loss = self.objective.loss(micro, conditions, meter) if row.loss_tokens else self._nothing(micro)
                    if terms and row.loss_tokens:
                        loss = loss + _added(terms, micro, meter)
                    self._finite.append(loss.detach().isfinite())
                    loss.backward()  # type: ignore[no-untyped-call]
                tokens += len(row.tokens_T) if row.loss_tokens else 0
        for name, value in load.numbers().items():
            meter.mean(f"{self.name}{name}", value)
        return meter.totals() + Totals.of(Kind.COUNT, **{f"{self.name}train_tokens": tokens})

    def _terms(self, rows: Sequence[Row]) -> RouterTerms | None:
        """For the passes over all rows of a batch."""
        if self._routers is None:
            return None
        policy = self.objective.policy
        if not self._routers.balance:
            return RouterTerms(policy.model, self._routers)
        f_LE = chosen_shares(rows, RouterShape.of(policy.model)).to(policy.device)
        return RouterTerms(policy.model, self._routers, f_LE)

    def _routed(self, micro: MicroBatch, load: RouterLoad | None = None) -> AbstractContextManager[None]:
        """A pass over it chooses the experts that it says, if it says any. load: hears what it would have chosen."""
        if micro.experts_TLK is None:
            return nullcontext()
        return replay_routing(self.objective.policy.model, micro.experts_TLK, load)

    def _nothing(self, micro: MicroBatch) -> Tensor:
        """The loss of a row without loss tokens. It is computed, because the other ranks wait for this one's part."""
        return self.objective.outputs(micro).sum()

    def optim_step(self) -> Totals:
        finite, self._finite = all(bool(f) for f in self._finite), []
        update = self.optimizer.step(self._ranks, skip=not self._ranks.every(finite))
        numbers = Totals.of(Kind.TOTAL, **{f"{self.name}grad_norm": update.norm, f"{self.name}lr": update.rate})
        skipped = Sum(Kind.COUNT, (float(not update.applied),))
        return numbers + Totals({f"{self.name}skipped_updates": skipped, Mark.SKIPPED: skipped})

    def outputs(self, rows: Sequence[Row]) -> list[FloatArray]:
        """By the experts that the rows say, if they say any."""
        return outputs(self.objective, rows, self._routed)

    def routed_outputs(self, rows: Sequence[Row]) -> tuple[list[FloatArray], list[ExpertArray]]:
        """And which experts were chosen at each position of the row."""
        found, experts = [], []
        for row in rows:
            with record_routing(self.objective.policy.model) as record:
                found += self.outputs([row])
            experts.append(record.experts_TLK.cpu().numpy())
        return found, experts


def _added(terms: RouterTerms, micro: MicroBatch, meter: Meter) -> Tensor:
    loss, numbers = terms.of(micro.source_N, micro.weight_N)
    for name, value in numbers.items():
        meter.total(name, value)
    return loss


def outputs(
    reading: Reading,
    rows: Sequence[Row],
    around: Callable[[MicroBatch], AbstractContextManager[None]] = lambda micro: nullcontext(),
) -> list[FloatArray]:
    """One number for each loss token of each row. No gradients. around: each pass."""
    found = []
    with torch.no_grad():
        for row in rows:
            micro = MicroBatch.of(row, reading.policy.device, columns=())
            with around(micro):
                found.append(reading.outputs(micro).float().cpu().numpy())
    return found
