"""The trainer: forward, backward, update, on the policy's own modules. It knows tokens and weights, no algorithm.

Contract: `forward_backward` adds the gradients of a batch, `optim_step` applies and clears them. A batch's gradient
does not depend on how it is cut into micro-batches, because every loss token carries its weight.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kitae.algorithms.objective import TokenBatch
from kitae.config import TrainingConfig
from kitae.data.packing import MicroBatch, collate, pack
from kitae.models.policy import Policy
from kitae.observe.meter import Meter
from kitae.trainer.attention import PackedAttention
from kitae.trainer.logprobs import token_logprobs
from kitae.trainer.optim import Optimizer
from kitae.types import Batch, FloatArray, Sample

STATE_FILE = "optimizer.safetensors"


class TokenObjective(Protocol):
    """What the trainer needs of an algorithm: the loss of a micro-batch's tokens."""

    def loss(self, tokens: TokenBatch, meter: Meter) -> Tensor: ...


class Trainer:
    def __init__(
        self, policy: Policy, config: TrainingConfig, *, temperature: float, entropy_grad: bool = False
    ) -> None:
        self.policy = policy
        self.config = config
        self.temperature = temperature
        self.entropy_grad = entropy_grad
        self.optimizer = Optimizer(
            policy.model.named_parameters(), config, config.steps * config.minibatches * config.epochs
        )
        if config.checkpoint_activations:
            policy.model.gradient_checkpointing_enable({"use_reentrant": False})
            if policy.model is not policy.base:
                policy.model.enable_input_require_grads()

    def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Log-probs of each sample's loss tokens under the current weights, zero elsewhere: `[T]` per sample."""
        found: dict[tuple[int, int], FloatArray] = {}
        with torch.no_grad():
            for micro in self._micro_batches(samples):
                logp_N, _ = self._forward(micro)
                for s, values in zip(micro.samples, micro.split(logp_N.cpu().numpy()), strict=True):
                    logp_T = np.zeros(s.length, dtype=np.float32)
                    logp_T[s.mask_T] = values
                    found[s.group, s.index] = logp_T
        return [found[s.group, s.index] for s in samples]

    def forward_backward(self, batch: Batch, objective: TokenObjective) -> dict[str, float]:
        """Add the gradient of the batch; returns the metrics of its tokens."""
        began = time.perf_counter()
        meter = Meter()
        row_tokens = 0
        with self._training_mode():
            for micro in self._micro_batches(batch.samples):
                logp_N, entropy_N = self._forward(micro)
                tokens = TokenBatch(
                    logp_N=logp_N,
                    entropy_N=entropy_N,
                    # With one update per batch the old policy is the current one.
                    logp_old_N=logp_N.detach() if micro.logp_old_N is None else micro.logp_old_N,
                    logp_mu_N=micro.logp_mu_N,
                    advantage_N=micro.advantage_N,
                    weight_N=micro.weight_N,
                )
                objective.loss(tokens, meter).backward()  # type: ignore[no-untyped-call]
                row_tokens += len(micro.tokens_T)
        seconds = time.perf_counter() - began
        return {**meter.result(), "train_seconds": seconds, "train_tokens": float(row_tokens)}

    def optim_step(self) -> dict[str, float]:
        return self.optimizer.step()

    def export_weights(self) -> dict[str, Tensor]:
        """The trainable parameters by name, as the modules hold them: shared memory, not copies."""
        return dict(zip(self.optimizer.names, (p.detach() for p in self.optimizer.parameters), strict=True))

    def save_state(self, folder: Path) -> None:
        tensors = {name: t.cpu().contiguous() for name, t in self.optimizer.state().items()}
        save_file(tensors, folder / STATE_FILE, metadata={"updates": str(self.optimizer.updates)})

    def load_state(self, folder: Path, updates: int) -> None:
        self.optimizer.load_state(load_file(folder / STATE_FILE), updates)

    def _micro_batches(self, samples: Sequence[Sample]) -> Iterator[MicroBatch]:
        share = self.config.share_prompts
        for part in pack(samples, self.config.token_budget, share):
            yield collate(part, self.policy.device, share)

    def _forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        context = PackedAttention(micro.spans, self.policy.device, self.policy.heads)
        hidden_TH = self.policy.hidden(micro.tokens_T, micro.positions_T, context)
        return token_logprobs(
            self.policy,
            hidden_TH[micro.source_N],
            micro.target_N,
            temperature=self.temperature,
            chunk=self.config.logit_chunk,
            entropy_grad=self.entropy_grad,
        )

    @contextmanager
    def _training_mode(self) -> Iterator[None]:
        """Modules recompute activations only in training mode; dropout stays off because models are loaded without."""
        self.policy.model.train(self.config.checkpoint_activations)
        try:
            yield
        finally:
            self.policy.model.eval()
