"""From the settings to a trainer and a learner: the one place that knows every kind of trainer."""

import os
from collections.abc import Callable

from kitae.algorithms.control import Control
from kitae.algorithms.group_stages import GroupStages
from kitae.config.root import RLConfig, Root
from kitae.models.load import load_policy
from kitae.models.policy import Policy
from kitae.observe.token_numbers import MOST_TOKENS, TokenChoice
from kitae.trainer.base import Trainer
from kitae.trainer.build_worker import learning_worker, make_critic, supervised_worker
from kitae.trainer.collective_ops import Ranks
from kitae.trainer.config import LearningConfig
from kitae.trainer.learner import Learner
from kitae.trainer.local_trainer import LocalTrainer
from kitae.trainer.objectives import Objective
from kitae.trainer.parallel.distributed_trainer import POOL as TRAINER
from kitae.trainer.parallel.distributed_trainer import RankedTrainer
from kitae.trainer.teacher.choose_teacher import inside_teacher, outside_teacher, served_teacher
from kitae.workers.base import Cluster
from kitae.workers.config import ClusterConfig, PoolConfig


def start_trainer(
    config: RLConfig, cluster: Cluster | None, note: Callable[[str], None]
) -> tuple[Policy | None, Trainer]:
    """The trainer, and the policy if it is in this process. With remote machines there is always at least one rank."""
    if cluster is not None and (cluster.remote or config.cluster.ranks > 1):
        return None, ranked_trainer(config, cluster)
    policy = load_policy(config.model, config.run.seed)
    return policy, local_trainer(config, policy, note)


def local_trainer(config: RLConfig, policy: Policy, note: Callable[[str], None] = lambda text: None) -> LocalTrainer:
    """A trainer in this process. Reference and critic are made only if the algorithm reads them, a teacher only if the
    run has one.

    note: receives messages about a teacher's process.
    """
    teacher = inside_teacher(config, policy)
    worker = learning_worker(config, policy, make_critic(config), teacher)
    return LocalTrainer(worker, outside_teacher(config, policy, note))


def ranked_trainer(config: RLConfig, cluster: Cluster) -> RankedTrainer:
    """A trainer whose ranks are processes of their own."""
    threads = _rank_threads(config.cluster, cluster, beside=config.engine.count)
    return RankedTrainer(
        config, "kitae.trainer.parallel.rank_process", cluster, served_teacher(config), threads=threads
    )


def ranked_stage(config: Root, module: str, cluster: Cluster) -> RankedTrainer:
    """The same for an objective that the `main` of `module` makes on each rank."""
    return RankedTrainer(config, module, cluster, threads=_rank_threads(config.cluster, cluster))


def _rank_threads(config: ClusterConfig, cluster: Cluster, beside: int = 0) -> int:
    """As many threads as fit beside the other ranks and processes; beside: how many of the latter there are."""
    if cluster.remote:
        return max(1, int(config.pools.get(TRAINER, PoolConfig()).cpus))
    return max(1, len(os.sched_getaffinity(0)) // (config.ranks + beside))


def make_learner(config: RLConfig, trainer: Trainer) -> Learner:
    groups = GroupStages(config.algorithm, config.sampling.max_tokens)
    recorded = TokenChoice(config.observe.tokens, MOST_TOKENS, config.run.seed)
    return Learner(trainer, groups, Control(config.algorithm), config.training, config.run.seed, recorded)


def supervised(objective: Objective, training: LearningConfig, ranks: Ranks | None = None) -> LocalTrainer:
    """A trainer of one model for one objective, with one update in each step."""
    return LocalTrainer(supervised_worker(objective, training, ranks))
