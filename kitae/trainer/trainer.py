"""The trainer: forward, backward, update, on the policy's own modules. It knows tokens and weights, no algorithm.

Contract: `forward_backward` adds the gradients of a batch, `optim_step` applies and clears them. A batch's gradient
does not depend on how it is cut into micro-batches, because every loss token carries its weight.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from safetensors.torch import load_file, save_file
from torch import Tensor

from kitae.algorithms.tokens import TokenBatch
from kitae.models.policy import Policy
from kitae.observe.meter import Meter
from kitae.trainer.config import TrainingConfig
from kitae.trainer.forward import checkpoint_activations, each_token, log_probs, micro_batches, training_mode
from kitae.trainer.optim import Optimizer
from kitae.types import Batch, FloatArray, Sample

STATE_FILE = "optimizer.safetensors"


class TokenObjective(Protocol):
    """What the trainer needs of an algorithm: the loss of a micro-batch's tokens."""

    def loss(self, tokens: TokenBatch, meter: Meter) -> Tensor: ...


class Trainer:
    def __init__(
        self,
        policy: Policy,
        config: TrainingConfig,
        *,
        temperature: float,
        entropy_grad: bool = False,
        idle_steps: int = 0,
    ) -> None:
        """idle_steps: steps of the run in which this model is not trained; the schedule passes over them."""
        self.policy = policy
        self.config = config
        self.temperature = temperature
        self._finite: list[Tensor] = []  # whether the losses since the last update are
        self.entropy_grad = entropy_grad
        self.optimizer = Optimizer(
            policy.model.named_parameters(), config, (config.steps - idle_steps) * config.minibatches * config.epochs
        )
        checkpoint_activations(policy, config)

    def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Log-probs of each sample's loss tokens under the current weights, zero elsewhere: `[T]` per sample."""
        return each_token(
            samples,
            self.config,
            self.policy.device,
            lambda micro: log_probs(self.policy, micro, self.config, self.temperature)[0],
        )

    def forward_backward(self, batch: Batch, objective: TokenObjective, version: int = 0) -> dict[str, float]:
        """Add the gradient of the batch; returns the metrics of its tokens. version: the one being trained."""
        began = time.perf_counter()
        meter = Meter()
        row_tokens = 0
        with training_mode(self.policy, self.config):
            for micro in micro_batches(batch.samples, self.config, self.policy.device):
                logp_N, entropy_N = log_probs(
                    self.policy, micro, self.config, self.temperature, entropy_grad=self.entropy_grad
                )
                tokens = TokenBatch(
                    logp_N=logp_N,
                    entropy_N=entropy_N,
                    # With one update per batch the old policy is the current one.
                    logp_old_N=logp_N.detach() if micro.logp_old_N is None else micro.logp_old_N,
                    logp_mu_N=micro.logp_mu_N,
                    advantage_N=micro.advantage_N,
                    weight_N=micro.weight_N,
                    sample_N=micro.sample_N,
                    sequences=len(micro.samples),
                    logp_ref_N=micro.logp_ref_N,
                    lag_N=version - micro.version_N,
                    score_N=micro.score_N,
                    cov_rank_N=micro.cov_rank_N,
                )
                loss = objective.loss(tokens, meter)
                self._finite.append(loss.detach().isfinite())
                loss.backward()  # type: ignore[no-untyped-call]
                row_tokens += len(micro.tokens_T)
        metrics = meter.result()  # waits for the device
        return {**metrics, "train_seconds": time.perf_counter() - began, "train_tokens": float(row_tokens)}

    def optim_step(self) -> dict[str, float]:
        finite, self._finite = all(bool(f) for f in self._finite), []
        return self.optimizer.step(skip=not finite)

    def export_weights(self) -> dict[str, Tensor]:
        """The trainable parameters by name, as the modules hold them: shared memory, not copies."""
        return dict(zip(self.optimizer.names, (p.detach() for p in self.optimizer.parameters), strict=True))

    def save_state(self, folder: Path) -> None:
        tensors = {name: t.cpu().contiguous() for name, t in self.optimizer.state().items()}
        save_file(tensors, folder / STATE_FILE, metadata={"updates": str(self.optimizer.updates)})

    def load_state(self, folder: Path, updates: int) -> None:
        self.optimizer.load_state(load_file(folder / STATE_FILE), updates)
