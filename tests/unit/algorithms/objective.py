"""Both halves of an algorithm as one object: the stages on groups, the loss of tokens, and what is steered."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from kitae.algorithms.advantages import ADVANTAGES
from kitae.algorithms.config import AlgorithmConfig
from kitae.algorithms.control import Control, Signal
from kitae.algorithms.group_stages import Candidate, GroupStages
from kitae.algorithms.loss import PolicyLoss
from kitae.algorithms.loss_tokens import TokenBatch
from kitae.algorithms.requirements import Trait, traits_of
from kitae.observe.meter import Kind, Meter, Sum, Totals
from kitae.types import Sample

GROUP_ADVANTAGES = [name for name, function in ADVANTAGES.items() if Trait.TOKENS not in traits_of(function)]
TOKEN_ADVANTAGES = ["returns", "greedy", "gae"]
NO_BASELINE = {"reward", "one", "role-mean", *TOKEN_ADVANTAGES}


class Objective(GroupStages):
    def __init__(self, config: AlgorithmConfig, max_tokens: int) -> None:
        super().__init__(config, max_tokens)
        self.control = Control(config)
        self._loss = PolicyLoss(config, max_tokens)

    @property
    def kl_coef(self) -> float:
        return self.control.coefficients.kl

    @property
    def entropy_coef(self) -> float:
        return self.control.coefficients.entropy

    @property
    def wants_entropy_gradient(self) -> bool:
        return self._loss.entropy_gradient

    def advantages(self, candidates: Sequence[Candidate], kl_coef: float | None = None) -> list[Candidate]:
        return super().advantages(candidates, self.kl_coef if kl_coef is None else kl_coef)

    def loss(self, tokens: TokenBatch, meter: Meter) -> Tensor:
        return self._loss(tokens, self.control.coefficients, meter)

    def finish_step(self, signals: Mapping[Signal, float], responses: int) -> dict[str, float]:
        """Move what is under control; the coefficients that the step used."""
        used = self.control.used
        measured = {signal: Sum(Kind.MEAN, (value, 1.0)) for signal, value in signals.items()}
        self.control.finish_step(Totals(measured), responses)
        return used

    def state(self) -> dict[str, Any]:
        return {**super().state(), "coefficients": self.control.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self.control.load_state(state["coefficients"])


def as_candidates(samples: Iterable[Sample]) -> list[Candidate]:
    """Each sample as a rollout of one chain that is trained on."""
    return [Candidate((s,), score=0.0, reward=0.0, baseline=None, kept=True) for s in samples]
