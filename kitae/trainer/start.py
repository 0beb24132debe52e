"""From the settings to a trainer and a learner: the one place that knows every kind of trainer."""

from kitae.algorithms.control import Control
from kitae.algorithms.groups import GroupStages
from kitae.config.root import RLConfig
from kitae.models.load import load_policy
from kitae.models.policy import Policy
from kitae.models.scalar import ScalarModel
from kitae.observe.tokens import TokenChoice
from kitae.trainer.base import Trainer
from kitae.trainer.learner import Learner
from kitae.trainer.local import LocalTrainer
from kitae.trainer.worker import Worker


def start_trainer(config: RLConfig, policy: Policy) -> LocalTrainer:
    """A reference and a critic are made only if the algorithm reads them."""
    groups = GroupStages(config.algorithm, config.sampling.max_tokens)
    plain = config.model.model_copy(update={"lora_rank": 0, "exact": False})
    worker = Worker(
        policy,
        config.training,
        config.algorithm,
        max_tokens=config.sampling.max_tokens,
        temperature=config.sampling.temperature,
        reference=groups.wants_reference,
        critic=ScalarModel(load_policy(plain, config.run.seed)) if groups.wants_values else None,
    )
    return LocalTrainer(worker)


def make_learner(config: RLConfig, trainer: Trainer) -> Learner:
    groups = GroupStages(config.algorithm, config.sampling.max_tokens)
    recorded = TokenChoice(config.observe.tokens, config.observe.tokens_per_step, config.run.seed)
    return Learner(trainer, groups, Control(config.algorithm), config.training, config.run.seed, recorded)
