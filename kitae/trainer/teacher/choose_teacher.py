"""From the settings to the teacher of a run, wherever it is."""

from collections.abc import Callable

from kitae.clients.service import Service
from kitae.config.root import DistilConfig, RLConfig
from kitae.models.policy import Policy
from kitae.trainer.base import OutsideTeacher
from kitae.trainer.teacher.frozen_teacher import Teacher, load_teacher
from kitae.trainer.teacher.served_teacher import ServedTeacher
from kitae.trainer.teacher.teacher_process import TeacherProcess


def inside_teacher(config: RLConfig, student: Policy) -> Teacher | None:
    """A teacher in this process, if the run has one."""
    if not isinstance(config, DistilConfig) or not config.method.teacher or config.method.teacher_place == "process":
        return None
    return load_teacher(config.model, config.method.teacher, student, config.training, config.sampling.temperature)


def outside_teacher(config: RLConfig, student: Policy, note: Callable[[str], None]) -> OutsideTeacher | None:
    """A teacher behind a server or in a process of its own, if the run has one."""
    return served_teacher(config) or _teacher_process(config, student, note)


def _teacher_process(config: RLConfig, student: Policy, note: Callable[[str], None]) -> TeacherProcess | None:
    if not isinstance(config, DistilConfig) or config.method.teacher_place != "process":
        return None
    m = config.method
    return TeacherProcess(
        config.model,
        m.teacher,
        student,
        config.training,
        config.sampling.temperature,
        device=m.teacher_device,
        threads=m.teacher_threads,
        note=note,
    )


def served_teacher(config: RLConfig) -> ServedTeacher | None:
    if not isinstance(config, DistilConfig) or not config.method.teacher_url:
        return None
    m = config.method
    service = Service(
        base_url=m.teacher_url,
        model=m.teacher_model,
        key_env=m.teacher_key_env,
        concurrency=m.teacher_concurrency,
        cache=m.teacher_cache,
    )
    return ServedTeacher(service)
