"""The user's own reward model as a verifier: one process that scores for the whole run.

    score() ─► queue ─► collect for a few milliseconds ─► one batch at a time ─► the process ─► scores
                 ▲                                              │ it died, or took longer than its deadline
                 └──── each of the batch once more, alone ◄─────┤ kill it, fork a fresh one
                                                                └─► was alone already: an error

So whatever a response does to the process, it costs the score of that response only. When the pool starts, the model is
loaded and the process is tested, and problems are raised there.
"""

import asyncio
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kitae.errors import KitaeError, VerifierError
from kitae.types import Score
from kitae.verifiers.base import Verifier
from kitae.verifiers.judge import mapped_reward, reward_model, talk_of
from kitae.workers.templates.model_process import ModelProcess
from kitae.workers.templates.worker_handle import WorkerDied

_COLLECT = 0.005  # seconds to wait for more responses of the same batch
_BATCH = 32  # answers
_PROBE = {"messages": [{"role": "user", "content": "Hello"}], "response": "Hello!"}
_HERE = {"model", "device", "dtype", "threads", "question_key", "center", "spread", "squash", "clip", "deadline"}
_ONLY_HERE = {"device", "dtype", "threads"}


def prepare(params: Mapping[str, Any]) -> Verifier:
    """The verifier `reward_model` for these params: with a `base_url` it asks a server, else it runs the model here."""
    verifier = Verifier("reward_model", reward_model, "error", gold=False, right_is_one=False)
    if params.get("base_url"):
        if wrong := sorted(params.keys() & _ONLY_HERE):
            raise VerifierError(f"{wrong[0]} is for a reward model that runs here, but base_url names a server")
        return verifier
    if wrong := sorted(params.keys() - _HERE - {"base_url"}):
        raise VerifierError(f"{wrong[0]} is for a reward model behind a server: it needs base_url")
    service = RewardService(**{name: value for name, value in params.items() if name != "base_url"})
    return Verifier("reward_model", service.score, "error", gold=False, right_is_one=False, companion=service)


@dataclass(slots=True)
class _Asked:
    """alone: it must have a batch of its own, because the process of a larger one ended"""

    talk: Mapping[str, Any]
    answer: asyncio.Future[float]
    alone: bool = False


class RewardService:
    """`service = RewardService(model="runs/reward-001")`, then `start`, any number of `score`, `close`.

    model: a folder, a run that trained one, or a hub id. device: auto, cpu, cuda:1 …; dtype: auto, bfloat16 or float32.
    threads: of the process, on a CPU. deadline: seconds of processor time that a batch may take.
    """

    def __init__(
        self,
        *,
        model: str,
        device: str = "auto",
        dtype: str = "auto",
        threads: int = 1,
        question_key: str = "question",
        center: float = 0.0,
        spread: float = 1.0,
        squash: str = "none",
        clip: float = 0.0,
        deadline: float = 180.0,
    ) -> None:
        if dtype not in ("auto", "bfloat16", "float32"):
            raise VerifierError(f"dtype must be auto, bfloat16 or float32, got {dtype!r}")
        if not threads >= 1:
            raise VerifierError(f"threads must be at least 1, got {threads}")
        if not deadline > 0:
            raise VerifierError(f"deadline must be above 0 seconds, got {deadline}")
        self._value = mapped_reward(center, spread, squash, clip)
        self._model, self._question_key = model, question_key
        self.process = ModelProcess(
            "kitae.verifiers.reward_model_process",
            {"path": model, "device": device, "dtype": dtype, "threads": threads},
            what="reward model's process",
            error=VerifierError,
            deadline=deadline,
        )
        self._queue: deque[_Asked] = deque()
        self._arrived = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the model and score a greeting. Raises `VerifierError` if that fails."""
        from kitae.models.classifier import check_classifier
        from kitae.models.load import find_model

        try:
            folder = find_model(self._model)
            assert folder is not None
            check_classifier(folder)
            (probe,) = await self._ask([_PROBE])
        except (KitaeError, WorkerDied) as error:
            await self.close()
            raise VerifierError(f"reward_model {self._model!r}: {error}") from None
        if isinstance(probe, str):
            await self.close()
            raise VerifierError(f"reward_model {self._model!r} must score a greeting: {probe}")
        self._serving = asyncio.create_task(self._serve())

    async def score(self, response: str, reference: Any, context: Mapping[str, Any], **_: Any) -> Score:
        """The params are known from the start."""
        try:
            asked = _Asked(talk_of(response, context, self._question_key), asyncio.get_running_loop().create_future())
            self._queue.append(asked)
            self._arrived.set()
            raw = await asked.answer
            value = self._value(raw)
        except VerifierError as error:
            return Score.error(f"reward_model: {error}")
        return Score(value, {"reward_model": value, "reward_raw": raw})

    async def close(self) -> None:
        """Close the service. Responses that still wait for a score get an error."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        while self._queue:
            _refuse(self._queue.popleft(), "it was closed")
        await self.process.close()

    async def _serve(self) -> None:
        """Score one batch after the other until cancelled."""
        while True:
            await self._arrived.wait()
            await asyncio.sleep(_COLLECT)
            while batch := self._take():
                try:
                    await self._judge(batch)
                except asyncio.CancelledError:
                    for asked in batch:
                        _refuse(asked, "it was closed")
                    raise
            self._arrived.clear()

    def _take(self) -> list[_Asked]:
        """The next batch: responses whose callers still wait. A response marked `alone` is a batch of its own."""
        batch: list[_Asked] = []
        while self._queue and len(batch) < _BATCH:
            if self._queue[0].alone and batch:
                break
            asked = self._queue.popleft()
            if not asked.answer.done():
                batch.append(asked)
                if asked.alone:
                    break
        return batch

    async def _judge(self, batch: list[_Asked]) -> None:
        try:
            results = await self._ask([asked.talk for asked in batch])
        except VerifierError as error:  # no process could be started
            for asked in batch:
                _refuse(asked, str(error))
            return
        except WorkerDied as error:
            self._lose(batch, str(error))
            return
        for asked, result in zip(batch, results, strict=True):
            if isinstance(result, str):
                _refuse(asked, result)
            elif not asked.answer.done():
                asked.answer.set_result(result)

    def _lose(self, batch: list[_Asked], why: str) -> None:
        """Retry each response of the batch alone, to find out which one ended the process."""
        if len(batch) == 1:
            _refuse(batch[0], why)
            return
        for asked in reversed(batch):
            asked.alone = True
            self._queue.appendleft(asked)

    async def _ask(self, talks: list[Mapping[str, Any]]) -> list[float | str]:
        """For each conversation a score, or the reason why there is none."""
        reply = await self.process.ask({"talks": talks})
        return [_number(result) for result in reply["results"]]


def _number(result: Mapping[str, Any]) -> float | str:
    if "error" in result:
        return str(result["error"])
    score = float(result["score"])
    return score if math.isfinite(score) else f"a score must be finite, got {score}"


def _refuse(asked: _Asked, reason: str) -> None:
    if not asked.answer.done():
        asked.answer.set_exception(VerifierError(reason))
