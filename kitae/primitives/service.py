"""The primitives without an event loop of one's own: each call returns when it is done.

    with kitae.primitives.open("smollm2-135m") as service:
        model = service.create_lora(rank=8)
        model.forward_backward([Datum(tokens, targets, {"weights": weights})], "cross_entropy")
        model.optim_step(AdamParams(learning_rate=1e-4))
        answers = model.sampler().sample(prompt, max_tokens=32, n=4)

Calls may come from several threads: what they ask for at the same time is computed together.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Self, TypedDict, TypeVar, Unpack

from kitae.engines.base import SamplingParams
from kitae.engines.config import EngineConfig
from kitae.loop_thread import LoopThread
from kitae.models.config import ModelConfig
from kitae.primitives.core import Core, SampledAnswer, Snapshot
from kitae.primitives.datum import Datum
from kitae.primitives.passes import PassResult
from kitae.primitives.trained_model import AdamParams, TrainedModel

T = TypeVar("T")


class Sampling(TypedDict, total=False):
    """How answers are sampled: n to a prompt. stop_tokens: None: those that end a turn of this model."""

    max_tokens: int
    n: int
    temperature: float
    top_p: float
    top_k: int
    stop: Sequence[str]
    stop_tokens: Sequence[int] | None
    seed: int | None


_SAMPLING = Sampling(max_tokens=64, n=1, temperature=1.0, top_p=1.0, top_k=0, stop=(), stop_tokens=None, seed=None)


class Sampler:
    """A snapshot to sample from; later updates of the model do not change it."""

    def __init__(self, service: "Workbench", snapshot: Snapshot) -> None:
        self._service, self._snapshot = service, snapshot

    def sample(self, prompt: Sequence[int], **settings: Unpack[Sampling]) -> list[SampledAnswer]:
        """Answers to the tokens of a prompt."""
        return self.sample_many([prompt], **settings)[0]

    def sample_many(self, prompts: Sequence[Sequence[int]], **settings: Unpack[Sampling]) -> list[list[SampledAnswer]]:
        """Answers to each prompt, all decoded together."""
        s, core = _SAMPLING | settings, self._service.core
        if unknown := settings.keys() - Sampling.__annotations__.keys():
            raise TypeError(f"sample takes {', '.join(Sampling.__annotations__)}, got {', '.join(sorted(unknown))}")
        ends = core.stop_tokens() if s["stop_tokens"] is None else tuple(s["stop_tokens"])
        params = SamplingParams(
            s["temperature"], s["max_tokens"], s["top_p"], s["top_k"], stop_tokens=ends, stop_strings=tuple(s["stop"])
        )
        first = s["seed"]

        async def all_of_them() -> list[list[SampledAnswer]]:
            seeds = [None if first is None else first + i for i in range(len(prompts))]
            asked = (core.sample(self._snapshot, p, params, s["n"], own) for p, own in zip(prompts, seeds, strict=True))
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
        self._thread = LoopThread("kitae-primitives")

        async def make() -> Core:
            return Core.load(model, engine)

        try:
            self.core = self.wait(make())
        except BaseException:
            self._thread.stop()
            raise
        self.tokenizer = self.core.policy.tokenizer

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self._thread.wait(work)

    def create_lora(self, rank: int = 32, *, seed: int = 0) -> Trainable:
        return Trainable(self, self.wait(self.core.lora(rank, seed=seed)))

    def create_full(self) -> Trainable:
        """A model whose weights learn themselves: it has a copy of its own, and so has each of its samplers."""
        return Trainable(self, self.wait(self.core.full()))

    def base_sampler(self) -> Sampler:
        return Sampler(self, self.core.base)

    def close(self) -> None:
        if self._thread.is_open:
            self.wait(self.core.close())
            self._thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open(model: str = "smollm2-135m", *, engine: EngineConfig | None = None, **settings: Any) -> Workbench:
    """A service on a model: a folder, a hub id or a short name. settings: others of `[model]`, such as dtype."""
    return Workbench(ModelConfig(path=model, **settings), engine or EngineConfig())
