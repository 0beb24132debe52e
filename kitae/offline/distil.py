"""Distillation on a file: the divergence from a teacher at each trained token of demonstrations."""

from kitae.config.root import DistilFileConfig
from kitae.models.load import load_policy
from kitae.offline.demonstrations import Demonstrations
from kitae.trainer.objectives import Objective
from kitae.trainer.teacher.frozen_teacher import Distilled, TeacherDivergence, load_teacher


class FileDistillation(Demonstrations):
    """Every token of a batch counts the same. What a demonstration says is only where teacher and student look."""

    def __init__(self, config: DistilFileConfig) -> None:
        self._config = config

    def make_objective(self) -> Objective:
        config = self._config
        method, training = config.method, config.training
        policy = load_policy(config.model, config.run.seed)
        teacher = load_teacher(config.model, method.teacher.path, policy, training, temperature=1.0)
        apart = TeacherDivergence(teacher, training, beta=method.beta, temperature=method.temperature)
        return Distilled(policy, training, apart)
