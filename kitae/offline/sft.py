"""Supervised fine-tuning: the mean negative log-likelihood of the trained tokens of a batch."""

from kitae.config.root import SFTConfig
from kitae.models.load import load_policy
from kitae.offline.demonstrations import Demonstrations
from kitae.trainer.objectives import Likelihood, Objective


class SFT(Demonstrations):
    """Every token of a batch counts the same, whichever example it is of."""

    sign = -1.0

    def __init__(self, config: SFTConfig) -> None:
        self._config = config

    def make_objective(self) -> Objective:
        config, policy = self._config, load_policy(self._config.model, self._config.run.seed)
        dft = config.method.loss == "dft"
        return Likelihood(policy, config.training, temperature=1.0, by_probability=dft)
