"""From the settings to the teacher of a run, wherever it is."""

from collections.abc import Callable

from kitae.clients.service import Service
from kitae.config.root import DistilConfig, RLConfig
from kitae.models.policy import Policy
from kitae.trainer.base import OutsideTeacher
from kitae.trainer.teacher.frozen_teacher import Teacher, load_teacher
from kitae.trainer.teacher.served_teacher import ServedTeacher
from kitae.trainer.teacher.teacher_process import TeacherPool


def inside_teacher(config: RLConfig, student: Policy) -> Teacher | None:
    """A teacher in this process, if the run has one."""
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
