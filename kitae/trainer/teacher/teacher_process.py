"""A teacher in a process that Kitae starts: the trainer has no part in its memory, its device or its end.

    samples ─► rows, as the trainer packs them ─► one at a time ─► the process ─► log-probs
                                                       │ it is lost
                                                       └─► the same row once more, in its successor

Who replaces the process, and how often, is decided in `kitae.workers.pool`.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from kitae.data.packing import pack
from kitae.errors import ModelError, WorkerLost
from kitae.models.config import ModelConfig
from kitae.models.load import pick_device, pick_dtype
from kitae.models.policy import Policy
from kitae.trainer.config import LearningConfig
from kitae.trainer.forward import split_rows, token_budget
from kitae.trainer.sample_wire import samples_to_wire
from kitae.trainer.teacher.frozen_teacher import beside, rows_of
from kitae.types import FloatArray, Sample
from kitae.workers.base import LaunchSpec
from kitae.workers.connection import CallFailed, Deadlines, RemoteWorker
from kitae.workers.pool import Replacement, WorkerPool
from kitae.workers.subprocesses import LocalCluster

_LIMITS = Deadlines(start=600.0, answer=3600.0, silence=60.0, close=10.0)
_REPLACEMENT = Replacement(retry=1.0, most=2, within=3600.0)  # what ends three processes in an hour is no accident
_PATIENCE = 3600.0  # seconds in which a successor must have loaded the model
_PROBE = Sample(0, 0, np.zeros(2, dtype=np.int64), 1, np.array([False, True]), np.zeros(2, dtype=np.float32))


class TeacherProcess:
    """A worker process with a teacher: a plain member of its pool, which is lost once."""

    def __init__(self, remote: RemoteWorker) -> None:
        self.remote = remote
        self.lost = remote.lost

    async def score(self, part: Sequence[Sample], threads: int) -> FloatArray:
        """The log-probs of the loss tokens of a row's samples. `WorkerLost` where the process is lost over it."""
        header, arrays = samples_to_wire([[replace(s, columns={}) for s in part]])
        try:
            reply = await self.remote.call("score", arrays, threads=threads, **header)
        except CallFailed as error:
            tokens = sum(s.length for s in part)
            raise ModelError(f"the teacher could not score samples of {tokens} tokens: {error}") from None
        return reply.arrays["logp"]

    async def close(self) -> None:
        await self.remote.close()


class TeacherPool(WorkerPool[TeacherProcess]):
    """Implements `kitae.trainer.base.OutsideTeacher`: one process, and after its loss another.

    model: what the student was loaded from; path: the teacher. device: that of the student's settings, unless given.
    threads: of the process, on a CPU; 0: as many as the trainer has. note: receives messages about lost processes.
    """

    what = "teacher"
    whole = "teacher"
    error = ModelError

    def __init__(
        self,
        model: ModelConfig,
        path: str,
        student: Policy,
        training: LearningConfig,
        temperature: float,
        *,
        device: str = "",
        threads: int = 0,
        note: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(self._begin, 1, patience=_PATIENCE, replacement=_REPLACEMENT, note=note)
        config = beside(model, path, device)
        self._path = path
        self._device = pick_device(config.device)
        self._budget = token_budget(training, self._device, pick_dtype(config.dtype, self._device))
        self._given = threads
        self.threads = threads or torch.get_num_threads()
        self.takes_turns = self._device.type == "cpu" and student.device.type == "cpu"
        self._cluster = LocalCluster()
        self._setup = {
            "model": config.model_dump(mode="json"),
            "rows": rows_of(model, path, student),
            "token_budget": training.token_budget,
            "temperature": temperature,
        }

    @property
    def restarts(self) -> int:
        return self.losses

    def use_threads(self, count: int) -> None:
        self.threads = self._given or count

    async def start(self) -> None:
        """Load the model and score something; `ModelError` where that fails."""
        try:
            await super().start()
            await self._score([_PROBE])
        except ModelError as error:
            await self.close()
            raise ModelError(f"method.teacher {self._path!r}: {error}") from None

    async def score(self, samples: Sequence[Sample]) -> list[FloatArray]:
        parts = await asyncio.to_thread(pack, samples, self._budget)
        found = split_rows(parts, [await self._score(part) for part in parts])
        return [found[s.key] for s in samples]

    async def _score(self, part: Sequence[Sample]) -> FloatArray:
        while True:
            await self.some()
            try:
                with self.use() as process:
                    return await process.score(part, self.threads)
            except WorkerLost:  # `some` raises when it is not replaced any more
                continue

    async def _begin(self, number: int) -> TeacherProcess:
        spec = LaunchSpec("teacher", "kitae.trainer.teacher.teacher_main", self._setup)
        try:
            return TeacherProcess(await RemoteWorker.start(self._cluster, spec, _LIMITS, ModelError))
        except WorkerLost as error:
            raise ModelError(f"its process could not start: {error}") from None
