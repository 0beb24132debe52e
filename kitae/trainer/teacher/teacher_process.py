"""A teacher in a process that Kitae starts: the trainer has no part in its memory, its device or its end.

    samples ─► rows, as the trainer lays them out ─► one at a time ─► the process ─► log-probs
                                                          │ it died, or took too long
                                                          └─► the same row once more, in a fresh process

A row that ends `_TRIES` processes, one after the other, ends the run: that is no accident.
"""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import torch

from kitae.data.packing import Row, lay_out
from kitae.errors import ModelError
from kitae.models.config import ModelConfig
from kitae.models.load import pick_device, pick_dtype
from kitae.models.policy import Policy
from kitae.trainer.config import LearningConfig
from kitae.trainer.forward import pack_rows, split_rows
from kitae.trainer.teacher.frozen_teacher import beside, rows_of
from kitae.trainer.teacher.teacher_main import job_of
from kitae.types import FloatArray, Sample
from kitae.workers.templates.model_process import ModelProcess
from kitae.workers.templates.worker_handle import WorkerDied

_TRIES = 3
_DEADLINE = 1800.0  # seconds of processor time of each thread, for a row
_PROBE = Sample(0, 0, np.zeros(2, dtype=np.int64), 1, np.array([False, True]), np.zeros(2, dtype=np.float32))


class TeacherProcess:
    """Implements `kitae.trainer.base.OutsideTeacher`.

    model: what the student was loaded from; path: the teacher. device: that of the student's settings, unless given.
    threads: of the process, on a CPU; 0: as many as the trainer has. note: hears of processes that were lost.
    """

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
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        config = beside(model, path, device)
        self._path, self._training, self._note = path, training, note
        self._device = pick_device(config.device)
        self._dtype = config.dtype
        self._given = threads
        self.threads = threads or torch.get_num_threads()
        self.takes_turns = self._device.type == "cpu" and student.device.type == "cpu"
        self.process = ModelProcess(
            "kitae.trainer.teacher.teacher_main",
            {
                "model": config.model_dump(mode="json"),
                "rows": rows_of(model, path, student),
                "token_budget": training.token_budget,
                "temperature": temperature,
            },
            what="teacher's process",
            error=ModelError,
            deadline=_DEADLINE * self.threads,
        )

    @property
    def restarts(self) -> int:
        return self.process.restarts

    def use_threads(self, count: int) -> None:
        self.threads = self._given or count

    async def start(self) -> None:
        """Load the model and score something; `ModelError` where that fails."""
        try:
            await self._score(lay_out([_PROBE]))
        except ModelError as error:
            await self.close()
            raise ModelError(f"method.teacher {self._path!r}: {error}") from None

    async def score(self, samples: Sequence[Sample]) -> list[FloatArray]:
        dtype = pick_dtype(self._dtype, self._device)
        parts, rows = await asyncio.to_thread(pack_rows, samples, self._training, self._device, dtype)
        found = split_rows(parts, [await self._score(row) for row in rows])
        return [found[s.key] for s in samples]

    async def close(self) -> None:
        await self.process.close()

    async def _score(self, row: Row) -> FloatArray:
        job = job_of(row, self.threads)
        for tried in range(1, _TRIES + 1):
            try:
                return np.array((await self.process.ask(job))["logp"], dtype=np.float32)
            except WorkerDied as error:
                reason = str(error)
                if tried < _TRIES:
                    self._note(f"the teacher: {reason}. Asking a new process")
        raise ModelError(
            f"the teacher {self._path} must score a row of {len(row.tokens_T)} tokens, but {_TRIES} processes ended "
            f"over it; the last: {reason}"
        )
