"""The worker process of a teacher, which scores rows of samples (`kitae.trainer.teacher.teacher_process` asks it).

    setup  {"model": {…}, "rows", "token_budget", "temperature"}
    score  the samples of one row (`kitae.trainer.sample_wire`), and "threads"  ►  logp, float32 [N]

model: the settings by which the teacher is loaded. A row is laid out as in the trainer, so its log-probs are those that
a teacher in the trainer's process would give, bit for bit.
"""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from kitae.workers.frames import Frame
from kitae.workers.serve import Reply, Send, Served, serve

if TYPE_CHECKING:
    from kitae.trainer.teacher.frozen_teacher import Teacher


def main(setup: dict[str, Any], stream: socket.socket) -> None:
    """In a worker process (`kitae.workers.worker_main`)."""

    async def make(send: Send) -> TeacherWorker:
        return TeacherWorker(_load(setup))

    serve(stream, make)


def _load(setup: dict[str, Any]) -> "Teacher":
    from kitae.models.config import ModelConfig
    from kitae.models.load import load_policy
    from kitae.trainer.config import LearningConfig
    from kitae.trainer.teacher.frozen_teacher import Teacher

    training = LearningConfig(token_budget=setup["token_budget"])
    return Teacher(load_policy(ModelConfig(**setup["model"])), training, setup["temperature"], setup["rows"])


class TeacherWorker(Served):
    """One row at a time, in a thread of its own, so that the process goes on giving signs of life."""

    def __init__(self, teacher: "Teacher") -> None:
        self._teacher = teacher
        self._computing = ThreadPoolExecutor(1, "kitae-teacher")
        self.ordered = {"score": self._score}

    async def _score(self, frame: Frame) -> Reply:
        return await asyncio.get_running_loop().run_in_executor(self._computing, self._compute, frame)

    def _compute(self, frame: Frame) -> Reply:
        import torch

        from kitae.data.packing import lay_out
        from kitae.trainer.sample_wire import samples_of_wire
        from kitae.trainer.trainable_model import outputs

        torch.set_num_threads(frame.header["threads"])
        (part,), _ = samples_of_wire(frame.header, frame.arrays)
        (logp_N,) = outputs(self._teacher, [lay_out(part)])
        return {}, {"logp": logp_N}
