"""A teacher in a process of its own: it says what it would say beside the student, and its end costs nothing."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_workers import column_of, make_worker

from kitae.errors import ModelError
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.policy import Policy
from kitae.models.tiny import make_tiny
from kitae.trainer.base import Batch, Column
from kitae.trainer.config import TrainingConfig
from kitae.trainer.local_trainer import LocalTrainer
from kitae.trainer.teacher.frozen_teacher import Teacher, beside
from kitae.trainer.teacher.teacher_process import TeacherPool, TeacherProcess
from kitae.types import FloatArray, Sample
from kitae.workers.process_status import state_of

pytestmark = pytest.mark.usefixtures("warm_posts")

TRAINING = TrainingConfig(token_budget=40)
PROMPT = (5, 80, 33, 7)
COLUMNS = ("logp_mu", "version", "score", "advantage")


def sample(group: int, index: int, length: int) -> Sample:
    drawn = np.random.default_rng((group, index)).integers(3, 259, length).tolist()
    tokens_T = np.array([*PROMPT, group + 10, *drawn])
    mask_T = np.arange(len(tokens_T)) > len(PROMPT)
    columns = {name: np.zeros(len(tokens_T), dtype=np.float32) for name in COLUMNS}
    return Sample(group, index, tokens_T, len(PROMPT) + 1, mask_T, mask_T.astype(np.float32), columns)


SAMPLES = [sample(group, index, 5 + 4 * group + index) for group in range(4) for index in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the teacher: another architecture, size and seed than the student's."""
    return make_tiny(tmp_path_factory.mktemp("teacher") / "qwen3", "qwen3", seed=5, hidden=32)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """Of the student."""
    path = make_tiny(tmp_path_factory.mktemp("student") / "llama", "llama", seed=1)
    return ModelConfig(path=str(path), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def student(settings: ModelConfig) -> Policy:
    return load_policy(settings)


def here(settings: ModelConfig, folder: Path, student: Policy, temperature: float) -> list[FloatArray]:
    """The same log-probs, of a teacher in this process."""
    teacher = Teacher(load_policy(beside(settings, str(folder))), TRAINING, temperature, rows=259)
    worker = make_worker(student, TRAINING, temperature=temperature, teacher=teacher)
    return [c[s.mask_T] for s, c in zip(SAMPLES, column_of(worker, SAMPLES, Column.TEACHER), strict=True)]


def with_teacher(teacher: TeacherPool, work: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        try:
            await work()
        finally:
            await teacher.close()

    asyncio.run(run())


def test_it_says_what_it_would_say_in_the_trainers_process_even_if_it_dies_over_it(
    settings: ModelConfig, folder: Path, student: Policy
) -> None:
    notes: list[str] = []
    expected = [x.tolist() for x in here(settings, folder, student, 0.7)]
    teacher = TeacherPool(settings, str(folder), student, TRAINING, 0.7, note=notes.append)
    trainer = LocalTrainer(make_worker(student, TRAINING), teacher)

    async def work() -> None:
        await trainer.start()
        found = await teacher.score(SAMPLES)
        assert [x.tolist() for x in found] == expected and found[0].dtype == np.float32
        assert teacher.restarts == 0

        os.kill(pid(), signal.SIGSTOP)  # so that a row is on its way when the process dies
        asked = asyncio.create_task(trainer.annotate(SAMPLES, [Column.OLD, Column.TEACHER]))
        await asyncio.sleep(0.5)
        os.kill(pid(), signal.SIGKILL)
        annotated = await asked
        assert [s.loss("logp_teacher").tolist() for s in annotated] == expected
        assert all(np.isfinite(s.loss("logp_old")).all() for s in annotated)
        assert "a teacher was lost" in notes[0] and "killed by signal 9" in notes[0]
        assert notes[1:] == ["teacher 0 has joined: 1 of 1 serve"]
        batch = Batch(tuple(annotated))
        assert (await trainer.forward_backward(batch)).numbers()["teacher_restarts"] == 1
        assert (await trainer.forward_backward(batch)).numbers()["teacher_restarts"] == 0, "each is counted once"

        wrong = SAMPLES[0].tokens_T.copy()
        wrong[0] = -5  # no token: the model raises, and the process goes on
        with pytest.raises(ModelError, match=r"the teacher could not score samples of 10 tokens: IndexError"):
            await teacher.score([replace(SAMPLES[0], tokens_T=wrong)])
        assert teacher.restarts == 1
        assert [x.tolist() for x in await teacher.score(SAMPLES)] == expected, "others are scored all the same"

        left = pid()
        await trainer.close()
        assert state_of(left) == "", "it ends with the trainer"

    def pid() -> int:
        return teacher.members[0].remote.pid

    with_teacher(teacher, work)


@pytest.mark.thorough
def test_what_ends_three_processes_ends_the_run(settings: ModelConfig, folder: Path, student: Policy) -> None:
    teacher = TeacherPool(settings, str(folder), student, TRAINING, 0.7, note=lambda text: None)

    async def join_and_stop(process: TeacherProcess, join: Callable[[TeacherProcess], Awaitable[None]]) -> None:
        os.kill(process.remote.pid, signal.SIGSTOP)  # so that a row is on its way when the process dies
        await join(process)

    async def work() -> None:
        await teacher.start()
        teacher.admit = join_and_stop
        os.kill(teacher.members[0].remote.pid, signal.SIGSTOP)
        asked = asyncio.create_task(teacher.score(SAMPLES[:1]))
        while not asked.done():
            await asyncio.sleep(0.05)
            for process in teacher.members:
                os.kill(process.remote.pid, signal.SIGKILL)
        with pytest.raises(ModelError, match="no teacher is left: teacher 0 was lost 3 times within 3600 s"):
            await asked
        assert teacher.restarts == 3

    with_teacher(teacher, work)


def test_a_model_that_cannot_be_loaded_is_refused_at_the_start(
    settings: ModelConfig, folder: Path, student: Policy, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in folder.iterdir():
        (broken / file.name).write_bytes(
            file.read_bytes()[:100] if file.suffix == ".safetensors" else file.read_bytes()
        )
    teacher = TeacherPool(settings, str(broken), student, TRAINING, 1.0)

    async def work() -> None:
        with pytest.raises(ModelError, match=r"^method.teacher '.*broken': cannot load .*broken"):
            await teacher.start()

    with_teacher(teacher, work)


def test_its_threads_are_those_of_the_trainer_unless_it_has_its_own(
    settings: ModelConfig, folder: Path, student: Policy
) -> None:
    """And two that compute on the same processors take turns."""
    usual, own = (TeacherPool(settings, str(folder), student, TRAINING, 1.0, threads=n) for n in (0, 3))
    assert usual.takes_turns and usual.threads == torch.get_num_threads() and own.threads == 3
    trainers = [LocalTrainer(make_worker(student, TRAINING), teacher) for teacher in (usual, own)]

    async def use() -> None:
        for trainer in trainers:
            await trainer.use_threads(2)
            await trainer.close()

    asyncio.run(use())
    assert (usual.threads, own.threads) == (2, 3)
