"""AdamW on fp32 master weights, whatever dtype the modules compute in.

Where the modules are fp32 already, they are their own masters. Otherwise each trainable parameter has an fp32 copy:
gradients are added up there after every backward pass, and the new values are rounded back into the modules.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from kitae.config import TrainingConfig
from kitae.kernels import ops


def learning_rate(config: TrainingConfig, update: int, total_updates: int) -> float:
    """Rate of optimizer step `update` (counted from 0): linear warm-up, then constant, linear or cosine to 0."""
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    left = max(1, total_updates - config.warmup_steps)
    progress = min(1.0, (update - config.warmup_steps) / left)
    if config.schedule == "linear":
        return config.lr * (1 - progress)
    return config.lr * 0.5 * (1 + math.cos(math.pi * progress))


class Optimizer:
    def __init__(
        self, named: Iterable[tuple[str, torch.nn.Parameter]], config: TrainingConfig, total_updates: int
    ) -> None:
        self.config = config
        self.total_updates = total_updates
        self.updates = 0
        trainable = [(name, p) for name, p in named if p.requires_grad]
        self.names = [name for name, _ in trainable]
        self.parameters = [p for _, p in trainable]
        self.masters = [p if p.dtype == torch.float32 else p.detach().float() for p in self.parameters]
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                parameter.register_post_accumulate_grad_hook(_add_into(master))  # type: ignore[no-untyped-call]
        fused = all(m.device.type in ("cpu", "cuda") for m in self.masters)
        self.adamw = torch.optim.AdamW(
            self.masters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=fused
        )

    def step(self, skip: bool = False) -> dict[str, float]:
        """Clip, update, round back; gradients are cleared. A gradient that is not finite leaves the weights alone.

        skip: the loss was not finite, so the gradient means nothing whatever it is.
        """
        grads = [m.grad for m in self.masters if m.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads).item()
        rate = learning_rate(self.config, self.updates, self.total_updates)
        finite = math.isfinite(norm) and not skip
        if finite:
            if norm > self.config.clip_norm:
                torch._foreach_mul_(grads, self.config.clip_norm / (norm + 1e-6))
            for group in self.adamw.param_groups:
                group["lr"] = rate
            self.adamw.step()
            with torch.no_grad():
                pairs = [(p, m) for p, m in zip(self.parameters, self.masters, strict=True) if p is not m]
                if pairs:
                    torch._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs])
        self.adamw.zero_grad(set_to_none=True)
        self.updates += 1
        return {"grad_norm": norm, "lr": rate, "skipped_updates": float(not finite)}

    def state(self) -> dict[str, Tensor]:
        """Masters and moments by name, flat: `{"master.model.norm.weight": …, "exp_avg.model.norm.weight": …}`."""
        tensors = {f"master.{n}": m.detach() for n, m in zip(self.names, self.masters, strict=True)}
        for name, master in zip(self.names, self.masters, strict=True):
            for key, value in self.adamw.state.get(master, {}).items():
                tensors[f"{key}.{name}"] = value
        return tensors

    def load_state(self, tensors: dict[str, Tensor], updates: int) -> None:
        self.updates = updates
        with torch.no_grad():
            for name, parameter, master in zip(self.names, self.parameters, self.masters, strict=True):
                master.copy_(tensors[f"master.{name}"])
                parameter.copy_(master)
                moments: dict[str, Any] = {
                    key: tensors[f"{key}.{name}"].to(master.device if key != "step" else "cpu")
                    for key in ("step", "exp_avg", "exp_avg_sq")
                    if f"{key}.{name}" in tensors
                }
                if moments:
                    self.adamw.state[master] = moments


def _add_into(master: Tensor) -> Any:
    accumulate = getattr(ops.training_kernels(master.device, master.dtype), "accumulate", None)

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if accumulate is not None:
            master.grad = accumulate(master.grad, parameter.grad)
        elif master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad += parameter.grad
        parameter.grad = None

    return hook
