"""Supervised fine-tuning: the mean negative log-likelihood of the trained tokens of a batch."""

from kitae.config.root import SFTConfig
from kitae.models.load import load_policy
from kitae.stages.demonstrations import Demonstrations
from kitae.trainer.objectives import Likelihood


class SFT(Demonstrations):
    """Every token of a batch counts the same, whichever example it is of."""

    sign = -1.0

    def __init__(self, config: SFTConfig) -> None:
        policy = load_policy(config.model, config.run.seed)
        dft = config.method.loss == "dft"
        super().__init__(policy, Likelihood(policy, config.training, temperature=1.0, by_probability=dft))
