"""What moves from step to step: coefficients, and the signals that they are steered by.

The trainer measures signals, the driver moves coefficients, and the next batch carries them to the trainer.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum

from kitae.algorithms.config import AlgorithmConfig
from kitae.algorithms.regularisers import adapt_entropy, adapt_kl
from kitae.observe.meter import Totals


class Signal(Enum):
    """Keys of what a loss measures in order to steer; see `kitae.observe.meter`."""

    KL = "KL(π_old ‖ π_ref) in nats per response"
    ENTROPY = "entropy in nats per token"


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Of the terms of a loss: `Coefficients(kl=0.05, entropy=0.0)`."""

    kl: float = 0.0
    entropy: float = 0.0


class Control:
    """The coefficients of a run, fixed or steered to a target."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config
        self.coefficients = Coefficients(config.kl.coef, config.entropy.coef)
        self._bonus = self.coefficients.entropy  # what is steered; it acts only while the entropy is below its target

    @property
    def used(self) -> dict[str, float]:
        """The coefficients in use, by the names of their metrics."""
        found = {"kl_coef": self.coefficients.kl} if self.coefficients.kl else {}
        if self.config.entropy.coef or self.config.entropy.target:
            found["entropy_coef"] = self.coefficients.entropy
        return found

    def finish_step(self, totals: Totals, responses: int) -> None:
        """Move what is under control; `responses` were trained on."""
        c, steered, bonus = self.coefficients, self.config.kl, self.config.entropy
        kl, entropy = totals[Signal.KL], totals[Signal.ENTROPY]
        if c.kl and steered.target and steered.horizon and kl is not None:
            c = replace(c, kl=adapt_kl(c.kl, kl, steered.target, responses, steered.horizon))
        if bonus.target and bonus.rate and entropy is not None:
            self._bonus = adapt_entropy(self._bonus, entropy, bonus.target, bonus.rate)
            c = replace(c, entropy=self._bonus if entropy < bonus.target else 0.0)
        self.coefficients = c

    def state(self) -> dict[str, float]:
        return {**asdict(self.coefficients), "bonus": self._bonus}

    def load_state(self, state: Mapping[str, float]) -> None:
        self.coefficients = Coefficients(state["kl"], state["entropy"])
        self._bonus = state["bonus"]
