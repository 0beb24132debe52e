"""The primitives without an event loop of one's own: each call returns when it is done.

    with kitae.primitives.open("smollm2-135m") as service:
        model = service.create_lora(rank=8)
        model.forward_backward([Datum(tokens, targets, {"weights": weights})], "cross_entropy")
        model.optim_step(AdamParams(learning_rate=1e-4))
        answers = model.sampler().sample(prompt, max_tokens=32, n=4)

Calls may come from several threads: what they ask for at the same time is computed together.
"""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from kitae.engines.base import SamplingParams
from kitae.engines.config import EngineConfig
from kitae.models.config import ModelConfig
from kitae.primitives.core import Core, SampledAnswer, Snapshot
from kitae.primitives.datum import Datum
from kitae.primitives.passes import PassResult
from kitae.primitives.trained_model import AdamParams, TrainedModel

T = TypeVar("T")


class Sampler:
    """A snapshot to sample from; later updates of the model do not change it."""

    def __init__(self, service: "Workbench", snapshot: Snapshot) -> None:
        self._service, self._snapshot = service, snapshot

    def sample(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 64,
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop: Sequence[str] = (),
        stop_tokens: Sequence[int] | None = None,
        seed: int | None = None,
    ) -> list[SampledAnswer]:
        """n answers to the tokens of a prompt. stop_tokens: None: those that end a turn of this model."""
        return self.sample_many(
            [prompt], max_tokens=max_tokens, n=n, temperature=temperature, top_p=top_p, top_k=top_k, stop=stop,
            stop_tokens=stop_tokens, seed=seed,
        )[0]  # fmt: skip

    def sample_many(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int = 64,
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop: Sequence[str] = (),
        stop_tokens: Sequence[int] | None = None,
        seed: int | None = None,
    ) -> list[list[SampledAnswer]]:
        """n answers to each prompt, all decoded together."""
        core = self._service.core
        ends = core.stop_tokens() if stop_tokens is None else tuple(stop_tokens)
        params = SamplingParams(temperature, max_tokens, top_p, top_k, stop_tokens=ends, stop_strings=tuple(stop))

        async def all_of_them() -> list[list[SampledAnswer]]:
            seeds = [None if seed is None else seed + i for i in range(len(prompts))]
            asked = (core.sample(self._snapshot, p, params, n, own) for p, own in zip(prompts, seeds, strict=True))
            return await asyncio.gather(*asked)

        return self._service.wait(all_of_them())

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Of all tokens but the first."""
        return list(self._service.wait(self._service.core.score(self._snapshot, tokens)).logprobs)

    def close(self) -> None:
        """Free what the snapshot has of its own. One of an adapter needs no closing."""
        self._service.wait(self._service.core.release(self._snapshot))


class Trainable:
    """A model that learns. Gradients add up until `optim_step`."""

    def __init__(self, service: "Workbench", model: TrainedModel) -> None:
        self._service, self.model = service, model

    def forward_backward(self, data: Sequence[Datum], loss: str = "cross_entropy", **settings: float) -> PassResult:
        core = self._service.core
        return self._service.wait(core.forward(self.model, data, loss, settings, backward=True))

    def forward(self, data: Sequence[Datum], loss: str = "cross_entropy", **settings: float) -> PassResult:
        core = self._service.core
        return self._service.wait(core.forward(self.model, data, loss, settings, backward=False))

    def optim_step(self, params: AdamParams) -> float:
        """The norm of the gradient, before it was clipped."""
        return self._service.wait(self._service.core.optim_step(self.model, params)).norm

    def sampler(self) -> Sampler:
        return Sampler(self._service, self._service.wait(self._service.core.snapshot(self.model)))

    def save(self, folder: str | Path, *, optimizer: bool = True) -> None:
        self._service.wait(self._service.core.save(self.model, Path(folder), optimizer=optimizer))

    def load(self, folder: str | Path, *, optimizer: bool = True) -> None:
        self._service.wait(self._service.core.load_into(self.model, Path(folder), optimizer=optimizer))


class Workbench:
    """One base model, its engine, and any number of models that learn."""

    def __init__(self, model: ModelConfig, engine: EngineConfig) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kitae-primitives", daemon=True)

        async def make() -> Core:
            return Core.load(model, engine)

        self._thread.start()
        try:
            self.core = self.wait(make())
        except BaseException:
            self._stop()
            raise
        self.tokenizer = self.core.policy.tokenizer

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def create_lora(self, rank: int = 32, *, seed: int = 0) -> Trainable:
        return Trainable(self, self.wait(self.core.lora(rank, seed=seed)))

    def create_full(self) -> Trainable:
        """A model whose weights learn themselves: it has a copy of its own, and so has each of its samplers."""
        return Trainable(self, self.wait(self.core.full()))

    def base_sampler(self) -> Sampler:
        return Sampler(self, self.core.base)

    def close(self) -> None:
        self.wait(self.core.close())
        self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> "Workbench":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open(model: str = "smollm2-135m", *, engine: EngineConfig | None = None, **settings: Any) -> Workbench:
    """A service on a model: a folder, a hub id or a short name. settings: others of `[model]`, such as dtype."""
    return Workbench(ModelConfig(path=model, **settings), engine or EngineConfig())
