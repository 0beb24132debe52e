"""A process of its own for a model: one worker of a template, which is asked one thing at a time.

Neither the model's work nor its end touches the run. A worker that died, or took too long, is ended; the next question
goes to a fresh one. On a CPU that is a fork of the template, which has loaded the model; see
`kitae.models.load`.
"""

import itertools
import json
from collections.abc import Mapping
from typing import Any

from kitae.errors import KitaeError
from kitae.workers.templates.template import Template
from kitae.workers.templates.worker_handle import OutOfTimeError, TemplateWorker, WorkerDied

_START_LIMIT = 600.0  # seconds to load a model: large ones come from slow disks
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # or it could not be forked


class ModelProcess:
    """`ModelProcess("kitae.verifiers.reward_model_process", {"path": …}, what="reward model's process",
    error=VerifierError, deadline=180.0)`, then any number of `ask`, one after the other, and `close`.

    module, setup, what, error: those of its template. deadline: seconds of its own time for a question. restarts: how
    often a worker was lost.
    """

    def __init__(
        self, module: str, setup: Mapping[str, Any], *, what: str, error: type[KitaeError], deadline: float
    ) -> None:
        self._template = Template(
            module,
            setup,
            read=lambda greeting: greeting,
            hear=lambda words: None,
            what=what,
            error=error,
            start_limit=_START_LIMIT,
            environment=_ENVIRONMENT,
        )
        self.deadline = deadline
        self.restarts = 0
        self._worker: TemplateWorker | None = None
        self._numbers = itertools.count(1)

    @property
    def pid(self) -> int | None:
        """Of the worker that answers; None: there is none just now."""
        return None if self._worker is None else self._worker.pid

    async def ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """The answer, without its `id`; `WorkerDied`, which says why, where the worker was lost."""
        if self._worker is None:
            self._worker = await self._template.spawn()
        worker, number = self._worker, next(self._numbers)
        try:
            return await worker.ask(json.dumps({"id": number, **job}).encode() + b"\n", number, self.deadline)
        except EOFError:
            why = f"its process died: {await worker.post_mortem()}"
        except WorkerDied as broken:
            why = f"its process died: {broken}"
        except OutOfTimeError:
            why = f"it took longer than its deadline of {self.deadline:g} s"
        await self._end()
        self.restarts += 1
        raise WorkerDied(why)

    async def close(self) -> None:
        await self._end()
        await self._template.close()

    async def _end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.kill()
