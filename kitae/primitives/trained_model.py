"""A model that learns: an adapter over weights that all share, or weights of its own; its optimizer; its files.

FOLDER/adapter_config.json, adapter_model.safetensors     an adapter, as peft reads it
FOLDER/model.safetensors                                  weights of its own
FOLDER/optimizer.safetensors                              masters and moments, where training shall go on
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kitae.errors import StoreError
from kitae.models.adapters import Adapter, read_adapter
from kitae.models.policy import Policy
from kitae.models.written_folder import written_whole
from kitae.trainer.config import LearningConfig
from kitae.trainer.optim import Optimizer, Update, UpdatePace

_CONFIG, _ADAPTER, _WHOLE, _OPTIMIZER = (
    "adapter_config.json", "adapter_model.safetensors", "model.safetensors", "optimizer.safetensors",
)  # fmt: skip
_UPDATES = "updates"


@dataclass(frozen=True, slots=True)
class AdamParams:
    """Of one update: `AdamParams(learning_rate=1e-4)`. grad_clip_norm 0: gradients are not clipped."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def pace(self) -> UpdatePace:
        limit = self.grad_clip_norm if self.grad_clip_norm > 0 else math.inf
        return UpdatePace(self.learning_rate, (self.beta1, self.beta2), self.eps, self.weight_decay, limit)


class TrainedModel:
    """Synchronous; its callers run it in one thread. adapter: None where the weights of `policy` learn themselves."""

    def __init__(self, policy: Policy, adapter: Adapter | None) -> None:
        self.policy, self.adapter = policy, adapter
        self._forget_moments()

    def _forget_moments(self) -> None:
        named: Any = self.adapter.named() if self.adapter else dict(self.policy.model.named_parameters())
        self.optimizer = Optimizer(named.items(), LearningConfig(), 1)

    @property
    def updates(self) -> int:
        return self.optimizer.updates

    def update(self, params: AdamParams) -> Update:
        return self.optimizer.step(pace=params.pace())

    def drop_gradients(self) -> None:
        for parameter, master in zip(self.optimizer.parameters, self.optimizer.masters, strict=True):
            parameter.grad = master.grad = None

    def save(self, folder: Path, *, optimizer: bool) -> None:
        """Write a folder, which appears when it is whole."""
        with written_whole(folder) as scratch:
            scratch.mkdir()
            if self.adapter is not None:
                _write_adapter(self.adapter, self.policy, scratch)
            else:
                state = {name: p.detach().cpu().contiguous() for name, p in self.policy.model.named_parameters()}
                save_file(state, scratch / _WHOLE)
            if optimizer:
                state = {name: t.cpu().contiguous() for name, t in self.optimizer.state().items()}
                save_file(state | {_UPDATES: torch.tensor(self.updates)}, scratch / _OPTIMIZER)

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Take what was saved; without the optimizer, its moments begin again."""
        saved = read_weights(folder)
        if isinstance(saved, Adapter) != (self.adapter is not None):
            kinds = "an adapter", "weights of a whole model"
            raise StoreError(f"{folder} must hold {kinds[self.adapter is None]}, got {kinds[self.adapter is not None]}")
        values = saved.named() if isinstance(saved, Adapter) else saved
        own = dict(zip(self.optimizer.names, self.optimizer.parameters, strict=True))
        if {n: t.shape for n, t in values.items()} != {n: p.shape for n, p in own.items()}:
            raise StoreError(f"{folder} must hold weights of the same names and shapes as the model that loads them")
        if not optimizer:
            with torch.no_grad():
                for name, parameter in own.items():
                    parameter.copy_(values[name])
            self._forget_moments()
            return
        if not (folder / _OPTIMIZER).is_file():
            raise StoreError(f"{folder} has no state of an optimizer: it was saved to sample from")
        state = load_file(folder / _OPTIMIZER)
        self._forget_moments()
        self.optimizer.load_state(state, int(state.pop(_UPDATES)))


def _write_adapter(adapter: Adapter, policy: Policy, folder: Path) -> None:
    names = sorted({name.rpartition(".")[2] for name in adapter.factors})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": policy.source, "bias": "none",
        "r": adapter.rank, "lora_alpha": adapter.alpha, "lora_dropout": 0.0, "target_modules": names,
        "inference_mode": True,
    }  # fmt: skip
    (folder / _CONFIG).write_text(json.dumps(config, indent=2))
    save_file({name: t.detach().cpu().contiguous() for name, t in adapter.named().items()}, folder / _ADAPTER)


def read_weights(folder: Path) -> Adapter | Mapping[str, Tensor]:
    """What `save` wrote, on the processor: an adapter, or the weights of a whole model by name."""
    if (folder / _WHOLE).is_file():
        whole: Mapping[str, Tensor] = load_file(folder / _WHOLE)
        return whole
    if not (folder / _CONFIG).is_file():
        raise StoreError(f"{folder} must hold saved weights, got no {_CONFIG} and no {_WHOLE}")
    return read_adapter(folder)
