"""The primitives on one event loop: models that learn over shared base weights, and sampling from snapshots of them.

    Core ─┬─ Passes             gradients and updates, of all models that learn
          ├─ NativeEngine       samples; the rows of a step have adapters of their own
          └─ TextScorer         log-probs of prompts

Base weights are in memory once. A snapshot is a copy of an adapter, so a model may learn while it is sampled from.
Weights of a whole model have copies of their own: one that learns, and one with an engine for each snapshot.
"""

import asyncio
import itertools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from kitae.data.chat import Chat
from kitae.engines.base import Request, SamplingParams, stream_seed
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.errors import ConfigError, RequestError
from kitae.models.adapters import ATTENTION, MLP, Adapter, adapt, fresh_adapter, to_sample_from
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.policy import Policy
from kitae.primitives.datum import Datum, token_ids
from kitae.primitives.passes import Passes, PassResult
from kitae.primitives.token_losses import Settings
from kitae.primitives.trained_model import AdamParams, TrainedModel, read_weights
from kitae.serving.text_scoring import ScoredText, TextScorer
from kitae.trainer.optim import Update

_ALPHA = 32.0
_SHARED = "all"  # who asks the same of the same weights at the same time, in one request or in several


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """`SampledAnswer(tokens=(42, 2), logprobs=(-0.1, -0.3), finish="stop")`; a stop token is one of the tokens."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """What is sampled from: an engine and a scorer, and the adapter that they add; own: whether it must be closed."""

    engine: NativeEngine
    scorer: TextScorer
    policy: Policy
    adapter: Adapter | None = None
    own: bool = False


@dataclass(slots=True)
class Core:
    """Made in the event loop that uses it; `close` it there."""

    model: ModelConfig
    config: EngineConfig
    policy: Policy
    base: Snapshot = field(init=False)
    passes: Passes = field(init=False)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    @staticmethod
    def load(model: ModelConfig, config: EngineConfig) -> "Core":
        if model.lora_rank:
            raise ConfigError(f"adapters are made one by one here, so model.lora_rank must be 0, got {model.lora_rank}")
        policy = load_policy(model)
        adapt(policy)
        return Core(model, config, policy)

    def __post_init__(self) -> None:
        self.base = Snapshot(NativeEngine(self.policy, self.config), TextScorer(self.policy), self.policy)
        self.passes = Passes()

    async def close(self) -> None:
        await self.passes.close()
        await self.base.scorer.close()
        await self.base.engine.close()

    async def lora(self, rank: int, *, seed: int = 0, parts: Sequence[str] = (ATTENTION, MLP)) -> TrainedModel:
        if rank < 1:
            raise RequestError(f"the rank of an adapter must be at least 1, got {rank}")
        if not parts:
            raise RequestError("an adapter must adapt attention or MLP, got neither; the head takes none here")
        return await self.passes.alone(
            lambda: TrainedModel(self.policy, fresh_adapter(self.policy, rank, _ALPHA, seed, parts))
        )

    async def full(self) -> TrainedModel:
        return await self.passes.alone(lambda: TrainedModel(load_policy(self.model), None))

    async def forward(
        self, model: TrainedModel, data: Sequence[Datum], loss: str, settings: Settings, *, backward: bool
    ) -> PassResult:
        return await self.passes.run(model, data, loss, settings, backward=backward)

    async def optim_step(self, model: TrainedModel, params: AdamParams) -> Update:
        return await self.passes.alone(lambda: model.update(params))

    async def save(self, model: TrainedModel, folder: Path, *, optimizer: bool = True) -> None:
        await self.passes.alone(lambda: model.save(folder, optimizer=optimizer))

    async def load_into(self, model: TrainedModel, folder: Path, *, optimizer: bool = True) -> None:
        await self.passes.alone(lambda: model.load(folder, optimizer=optimizer))

    async def made_from(self, folder: Path, *, optimizer: bool) -> TrainedModel:
        """A new model with the weights of a folder."""
        saved = await asyncio.to_thread(read_weights, folder)
        made = await self.full() if not isinstance(saved, Adapter) else await self._like(saved)
        await self.load_into(made, folder, optimizer=optimizer)
        return made

    async def _like(self, saved: Adapter) -> TrainedModel:
        def make() -> TrainedModel:
            blank = fresh_adapter(self.policy, saved.rank, saved.alpha, 0)
            factors = {name: blank.factors[name] for name in saved.factors if name in blank.factors}
            return TrainedModel(self.policy, Adapter(saved.rank, saved.alpha, factors))

        return await self.passes.alone(make)

    async def snapshot(self, model: TrainedModel) -> Snapshot:
        """The weights as they are now, to sample from."""
        if model.adapter is not None:
            adapter = model.adapter
            return self._of_adapter(await self.passes.alone(lambda: adapter.frozen(self.policy.dtype)))
        state = await self.passes.alone(lambda: {n: t.clone() for n, t in model.policy.model.state_dict().items()})
        return await self._of_weights(state)

    async def read_snapshot(self, folder: Path) -> Snapshot:
        """What `save` wrote, to sample from."""
        saved = await asyncio.to_thread(read_weights, folder)
        if not isinstance(saved, Adapter):
            return await self._of_weights(dict(saved))
        return self._of_adapter(to_sample_from(saved, self.policy))

    def _of_adapter(self, adapter: Adapter) -> Snapshot:
        return Snapshot(self.base.engine, self.base.scorer, self.policy, adapter)

    async def _of_weights(self, state: dict[str, torch.Tensor]) -> Snapshot:
        def make() -> Policy:
            policy = load_policy(self.model)
            policy.model.load_state_dict(state, strict=False)  # a tied head is there once
            return policy.requires_grad_(False)

        policy = await asyncio.to_thread(make)
        return Snapshot(NativeEngine(policy, self.config), TextScorer(policy), policy, own=True)

    async def sample(
        self, of: Snapshot, prompt: Sequence[int], params: SamplingParams, n: int = 1, seed: int | None = None
    ) -> list[SampledAnswer]:
        """n answers; the same seed draws the same ones."""
        tokens = tuple(token_ids("the prompt", np.asarray(prompt, dtype=np.int64), of.policy).tolist())
        if n < 1:
            raise RequestError(f"the number of samples must be at least 1, got {n}")
        seed = secrets.randbits(62) if seed is None else seed
        name = str(next(self._numbers))
        requests = [Request(f"{name}/{i}", tokens, params, stream_seed(seed, i), share=_SHARED) for i in range(n)]
        done = await asyncio.gather(*(of.engine.generate(request, of.adapter) for request in requests))
        return [SampledAnswer(tuple(d.tokens), tuple(d.logprobs), d.finish) for d in done]

    async def score(self, of: Snapshot, tokens: Sequence[int], top: int = 0) -> ScoredText:
        """Log-probs of all tokens but the first."""
        return await of.scorer.score(tokens, top, adapter=of.adapter)

    async def release(self, of: Snapshot) -> None:
        if of.own:
            await of.scorer.close()
            await of.engine.close()

    def stop_tokens(self) -> tuple[int, ...]:
        """Those that end an answer where a request does not say which."""
        return Chat(self.policy.tokenizer, self.policy.base.generation_config).stop_tokens
