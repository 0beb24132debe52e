"""From the settings to a trainer, a learner and a teacher: the one place that knows every kind of them."""

import os
from collections.abc import Callable

from kitae.algorithms.control import Control
from kitae.algorithms.group_stages import GroupStages
from kitae.clients.service import Service
from kitae.config.root import DistilConfig, RLConfig, Root
from kitae.errors import ModelError
from kitae.models.load import load_policy
from kitae.models.policy import Policy
from kitae.observe.token_numbers import MOST_TOKENS, TokenChoice
from kitae.trainer.base import OutsideTeacher, Trainer
from kitae.trainer.build_worker import learning_worker, make_critic, supervised_worker
from kitae.trainer.collective_ops import Ranks
from kitae.trainer.config import LearningConfig
from kitae.trainer.learner import Learner
from kitae.trainer.local_trainer import LocalTrainer
from kitae.trainer.objectives import Objective
from kitae.trainer.parallel.distributed_trainer import POOL as TRAINER
from kitae.trainer.parallel.distributed_trainer import RankedTrainer
from kitae.trainer.teacher.frozen_teacher import Teacher, load_teacher
from kitae.trainer.teacher.served_teacher import ServedTeacher
from kitae.trainer.teacher.teacher_process import TeacherPool
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


def inside_teacher(config: RLConfig, student: Policy) -> Teacher | None:
    """A teacher in this process, if the run has one."""
    if isinstance(config, DistilConfig) and student.vision is not None:
        raise ModelError(f"method.teacher must teach a model of text, got the student {student.source}, which sees")
    if not isinstance(config, DistilConfig) or not config.method.teacher.path:
        return None
    if config.method.teacher.place == "process":
        return None
    return load_teacher(config.model, config.method.teacher.path, student, config.training, config.sampling.temperature)


def outside_teacher(config: RLConfig, student: Policy, note: Callable[[str], None]) -> OutsideTeacher | None:
    """A teacher behind a server or in a process of its own, if the run has one."""
    return served_teacher(config) or _teacher_process(config, student, note)


def _teacher_process(config: RLConfig, student: Policy, note: Callable[[str], None]) -> TeacherPool | None:
    if not isinstance(config, DistilConfig) or config.method.teacher.place != "process":
        return None
    teacher = config.method.teacher
    return TeacherPool(
        config.model,
        teacher.path,
        student,
        config.training,
        config.sampling.temperature,
        device=teacher.device,
        threads=teacher.threads,
        note=note,
    )


def served_teacher(config: RLConfig) -> ServedTeacher | None:
    if not isinstance(config, DistilConfig) or not config.method.teacher.url:
        return None
    teacher = config.method.teacher
    service = Service(
        base_url=teacher.url,
        model=teacher.model,
        key_env=teacher.key_env,
        concurrency=teacher.concurrency,
        cache=teacher.cache,
    )
    return ServedTeacher(service)
