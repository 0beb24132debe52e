"""The critic of PPO: a second model with a scalar head, trained to predict returns.

It starts as a copy of the policy's decoder; its head starts at zero, so that the first values are 0. The value of a
loss token is read from the state that predicts it, before the token is known.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kitae.models.policy import Policy
from kitae.observe.meter import Meter
from kitae.trainer.config import TrainingConfig
from kitae.trainer.forward import checkpoint_activations, each_token, micro_batches, predicting_states, training_mode
from kitae.trainer.optim import Optimizer
from kitae.types import Batch, FloatArray, Sample

STATE_FILE = "critic.safetensors"


def value_loss(value_N: Tensor, old_N: Tensor, return_N: Tensor, clip: float) -> Tensor:
    """½ max((V − G)², (clip(V, V_old ± clip) − G)²) of each token; clip 0: no clip."""
    loss_N = (value_N - return_N) ** 2
    if clip > 0:
        near_N = old_N + (value_N - old_N).clamp(-clip, clip)
        loss_N = loss_N.maximum((near_N - return_N) ** 2)
    return loss_N / 2


class Critic:
    """`model` is a policy of its own, whose LM head is never used. warmup: steps in which the policy stands still."""

    def __init__(self, model: Policy, config: TrainingConfig, *, lr: float, clip: float, warmup: int = 0) -> None:
        self.model = model
        self.config = config.model_copy(update={"lr": lr})
        self.clip = clip
        self.warmup = warmup
        checkpoint_activations(model, config)
        decoder: torch.nn.Module = model.base.get_decoder()
        width = model.head.weight.shape[1]
        self.head = torch.nn.Linear(width, 1, device=model.device, dtype=torch.float32)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        named = [(f"decoder.{n}", p) for n, p in decoder.named_parameters()]
        named += [(f"head.{n}", p) for n, p in self.head.named_parameters()]
        self.optimizer = Optimizer(named, self.config, config.steps * config.minibatches * config.epochs)

    def values(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """V of each sample's loss tokens, zero elsewhere: `[T]` per sample."""
        return each_token(
            samples, self.config, self.model.device, lambda micro: self._values(predicting_states(self.model, micro))
        )

    def forward_backward(self, batch: Batch) -> dict[str, float]:
        """Add the gradient of the value loss, averaged over all loss tokens of the batch."""
        meter = Meter()
        total = max(1, batch.loss_tokens)
        for micro in micro_batches(batch.samples, self.config, self.model.device):
            assert micro.value_N is not None and micro.return_N is not None
            with training_mode(self.model, self.config):
                value_N = self._values(predicting_states(self.model, micro))
                loss_N = value_loss(value_N, micro.value_N, micro.return_N, self.clip)
                (loss_N.sum() / total).backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                count = len(value_N)
                meter.mean("value_loss", loss_N.mean(), count)
                meter.mean("value", value_N.mean(), count)
                meter.mean("return", micro.return_N.mean(), count)
                meter.mean("value_error", (value_N - micro.return_N).abs().mean(), count)
                if self.clip:
                    moved_N = (value_N - micro.value_N).abs() > self.clip
                    meter.mean("value_clipped", moved_N.float().mean(), count)
        return meter.result()

    def optim_step(self) -> dict[str, float]:
        numbers = self.optimizer.step()
        return {"critic_grad_norm": numbers["grad_norm"], "critic_skipped_updates": numbers["skipped_updates"]}

    def save_state(self, folder: Path) -> None:
        tensors = {name: t.cpu().contiguous() for name, t in self.optimizer.state().items()}
        save_file(tensors, folder / STATE_FILE, metadata={"updates": str(self.optimizer.updates)})

    def load_state(self, folder: Path, updates: int) -> None:
        self.optimizer.load_state(load_file(folder / STATE_FILE), updates)

    def _values(self, states_NH: Tensor) -> Tensor:
        return self.head(states_NH.float())[:, 0]  # type: ignore[no-any-return]
