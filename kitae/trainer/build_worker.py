"""From the settings to a worker: the models of a rank, their objectives, and how they are sharded."""

import torch

from kitae.algorithms.config import AlgorithmConfig
from kitae.algorithms.group_stages import GroupStages
from kitae.algorithms.loss import PolicyLoss
from kitae.config.root import DistilConfig, RLConfig
from kitae.models.config import WHOLE
from kitae.models.load import Load, load_policy
from kitae.models.load_in_shards import empty_policy
from kitae.models.policy import Policy
from kitae.models.router_terms import RouterCoefficients
from kitae.models.routing import check_routers
from kitae.models.scalar import ScalarModel
from kitae.offline.config import JSD
from kitae.trainer.base import Role
from kitae.trainer.collective_ops import Alone, Ranks
from kitae.trainer.config import LearningConfig, TrainingConfig
from kitae.trainer.objectives import Objective, PolicyGradient, Values
from kitae.trainer.parallel.mesh import Mesh
from kitae.trainer.parallel.sharding import shard
from kitae.trainer.reference_policy import Reference
from kitae.trainer.teacher.frozen_teacher import Teacher, TeacherDivergence
from kitae.trainer.trainable_model import TrainableModel
from kitae.trainer.training_worker import Worker


def sharded_worker(config: RLConfig, mesh: Mesh) -> Worker:
    """The worker of one rank of a distributed trainer: every model is sharded before anything is built on it."""
    policy, critic = empty_policy(config.model, config.run.seed), make_critic(config, empty_policy)
    shard(policy, mesh)
    if critic is not None:
        shard(critic, mesh)
    return learning_worker(config, policy, critic, None, mesh.ranks)


def make_critic(config: RLConfig, load: Load = load_policy) -> ScalarModel | None:
    """A critic, if the algorithm reads values."""
    if not GroupStages(config.algorithm, config.sampling.max_tokens).wants_values:
        return None
    plain = config.model.model_copy(update={**WHOLE, "exact": False})
    return ScalarModel(load(plain, config.run.seed))


def learning_worker(
    config: RLConfig, policy: Policy, critic: ScalarModel | None, teacher: Teacher | None, ranks: Ranks | None = None
) -> Worker:
    groups = GroupStages(config.algorithm, config.sampling.max_tokens)
    return reinforced(
        policy,
        config.training,
        config.algorithm,
        max_tokens=config.sampling.max_tokens,
        temperature=config.sampling.temperature,
        reference=groups.wants_reference,
        critic=critic,
        teacher=teacher,
        divergence=config.method.divergence if isinstance(config, DistilConfig) else None,
        ranks=ranks,
    )


def reinforced(
    policy: Policy,
    training: TrainingConfig,
    algorithm: AlgorithmConfig,
    *,
    max_tokens: int,
    temperature: float,
    reference: bool = False,
    critic: ScalarModel | None = None,
    teacher: Teacher | None = None,
    divergence: JSD | None = None,
    ranks: Ranks | None = None,
) -> Worker:
    """A worker that learns from rewards. reference: whether it needs a reference policy. critic: given if the algorithm
    reads values. divergence: how the stages measure the distance from the teacher, where they read it."""
    ranks = ranks or Alone()
    if algorithm.of_mixtures:
        check_routers(policy.model, lambda: policy.score(torch.zeros(2, dtype=torch.long, device=policy.device)))
    updates, warmup = training.minibatches * training.epochs, (algorithm.critic.warmup or 0) if critic else 0
    apart = None
    if divergence is not None:
        assert teacher is not None
        apart = TeacherDivergence(teacher, training, beta=divergence.beta, temperature=divergence.temperature)
    gradient = PolicyGradient(policy, training, temperature, PolicyLoss(algorithm, max_tokens), apart)
    start = Reference(policy, algorithm, training, temperature) if reference else None
    total = (training.steps - warmup) * updates
    trained = {Role.POLICY: TrainableModel(gradient, training, ranks, total_updates=total, routers=_routers(algorithm))}
    if critic is not None:
        assert algorithm.critic.lr is not None and algorithm.critic.clip is not None
        config = training.model_copy(update={"lr": algorithm.critic.lr})
        trained[Role.CRITIC] = TrainableModel(
            Values(critic, algorithm.critic.clip),
            config,
            ranks,
            total_updates=training.steps * updates,
            name="critic_",
        )
    return Worker(policy, training, trained, reference=start, teacher=teacher, ranks=ranks)


def _routers(a: AlgorithmConfig) -> RouterCoefficients | None:
    found = RouterCoefficients(a.experts.z_coef, a.experts.balance_coef)
    return found if found.z or found.balance else None


def supervised_worker(objective: Objective, training: LearningConfig, ranks: Ranks | None = None) -> Worker:
    """A worker for one objective. A model that is to be sharded must be sharded already."""
    ranks = ranks or Alone()
    trained = {Role.POLICY: TrainableModel(objective, training, ranks, total_updates=training.steps)}
    return Worker(objective.policy, training, trained, ranks=ranks)


def spread_worker(objective: Objective, training: LearningConfig, mesh: Mesh) -> Worker:
    """A rank's worker for an objective whose model is not sharded yet."""
    model = objective.model
    shard(model if isinstance(model, ScalarModel) else objective.policy, mesh)
    return supervised_worker(objective, training, mesh.ranks)
