"""A model that learns, on one rank: its objective, gradients and optimizer. The policy is one, and so is the critic."""

from collections.abc import Callable, Collection, Iterable, Sequence
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
from kitae.trainer.objectives import Objective, TokenScorer
from kitae.trainer.optim import Optimizer
from kitae.types import ExpertArray, FloatArray


class TrainableModel:
    """name: a prefix for its metrics. total_updates: the length of the learning-rate schedule. routers: coefficients of
    the loss terms for expert routers, where there are any."""

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
        self._finite: list[Tensor] = []  # for each loss since the last update, whether it is finite
        checkpoint_activations(objective.policy, config)
        self.optimizer = Optimizer(objective.model.named_parameters(), config, total_updates, host=ranks.host)

    @property
    def pending(self) -> bool:
        """Whether there are gradients to apply."""
        return bool(self._finite)

    def forward_backward(self, rows: Iterable[Row], conditions: Conditions) -> Totals:
        """Add the gradient of these rows. Returns the metrics of their tokens."""
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
        """The router terms for one batch, whose balance term is taken over all rows."""
        if self._routers is None:
            return None
        policy = self.objective.policy
        if not self._routers.balance:
            return RouterTerms(policy.model, self._routers)
        f_LE = chosen_shares(rows, RouterShape.of(policy.model)).to(policy.device)
        return RouterTerms(policy.model, self._routers, f_LE)

    def _routed(self, micro: MicroBatch, load: RouterLoad | None = None) -> AbstractContextManager[None]:
        """A context in which passes choose the experts recorded in the micro-batch, if it has any.

        load: receives the experts that the router would have chosen.
        """
        if micro.experts_TLK is None:
            return nullcontext()
        return replay_routing(self.objective.policy.model, micro.experts_TLK, load)

    def _nothing(self, micro: MicroBatch) -> Tensor:
        """The loss of a row without loss tokens. It is computed because other ranks wait for this one's collectives."""
        return self.objective.outputs(micro).sum()

    def optim_step(self) -> Totals:
        finite, self._finite = all(bool(f) for f in self._finite), []
        update = self.optimizer.step(self._ranks, skip=not self._ranks.every(finite))
        numbers = Totals.of(Kind.TOTAL, **{f"{self.name}grad_norm": update.norm, f"{self.name}lr": update.rate})
        skipped = Sum(Kind.COUNT, (float(not update.applied),))
        return numbers + Totals({f"{self.name}skipped_updates": skipped, Mark.SKIPPED: skipped})

    def outputs(self, rows: Sequence[Row]) -> list[FloatArray]:
        """The objective's numbers for each row, with the experts that the rows have recorded, if any."""
        return outputs(self.objective, rows, self._routed)

    def routed_outputs(self, rows: Sequence[Row]) -> tuple[list[FloatArray], list[ExpertArray]]:
        """The same, and the experts that were chosen at each position of each row."""
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
    scorer: TokenScorer,
    rows: Sequence[Row],
    around: Callable[[MicroBatch], AbstractContextManager[None]] = lambda micro: nullcontext(),
    columns: Collection[str] = (),
) -> list[FloatArray]:
    """The scorer's numbers for the loss tokens of each row, without gradients. around: makes a context for each forward
    pass. columns: those that the scorer reads."""
    found = []
    with torch.no_grad():
        for row in rows:
            micro = MicroBatch.of(row, scorer.policy.device, columns)
            with around(micro):
                found.append(scorer.outputs(micro).float().cpu().numpy())
    return found
