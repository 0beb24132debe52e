"""Both halves of an algorithm as one object: the stages on groups, and the loss of tokens."""

from collections.abc import Sequence

from torch import Tensor

from kitae.algorithms.config import AlgorithmConfig
from kitae.algorithms.control import Control
from kitae.algorithms.groups import Candidate, GroupStages
from kitae.algorithms.loss import PolicyLoss
from kitae.algorithms.tokens import TokenBatch
from kitae.observe.meter import Meter
from kitae.types import Sample


class Objective(GroupStages):
    def __init__(self, config: AlgorithmConfig, max_tokens: int) -> None:
        super().__init__(config, max_tokens)
        self.control = Control(config)
        self._loss = PolicyLoss(config, max_tokens)

    def advantages(self, candidates: Sequence[Candidate], kl_coef: float | None = None) -> list[Candidate]:
        return super().advantages(candidates, self.control.coefficients.kl if kl_coef is None else kl_coef)

    def trained(self, candidates: Sequence[Candidate]) -> tuple[Sample, ...]:
        """S3 and S7."""
        return self.weighted(self.advantages(candidates))

    def loss(self, tokens: TokenBatch, meter: Meter) -> Tensor:
        return self._loss(tokens, self.control.coefficients, meter)
