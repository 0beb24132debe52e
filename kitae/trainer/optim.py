"""AdamW on fp32 master weights, whatever dtype the modules compute in.

Where the modules are fp32 already, they are their own masters. Otherwise each trainable parameter has an fp32 copy:
gradients are added up there after every backward pass, and the new values are rounded back into the modules.
Of sharded parameters, masters and moments are this rank's shards: AdamW knows no other element. On request they lie in
the memory of the host.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from kitae.kernels.devices import training_kernels
from kitae.kernels.memory import set_master
from kitae.trainer.config import LearningConfig
from kitae.trainer.ranks import Alone, Ranks, local


def learning_rate(config: LearningConfig, update: int, total_updates: int) -> float:
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


@dataclass(frozen=True, slots=True)
class Update:
    """`Update(norm=0.7, rate=1e-5, applied=True)`: the gradient's norm before clipping; whether the weights moved."""

    norm: float
    rate: float
    applied: bool


class Optimizer:
    """host: masters and moments lie there, wherever the parameters are."""

    def __init__(
        self,
        named: Iterable[tuple[str, torch.nn.Parameter]],
        config: LearningConfig,
        total_updates: int,
        *,
        host: bool = False,
    ) -> None:
        self.config = config
        self.total_updates = total_updates
        self.updates = 0
        trainable = [(name, p) for name, p in named if p.requires_grad]
        self.names = [name for name, _ in trainable]
        self.parameters = [p for _, p in trainable]
        self.masters = [_copy(p) if host else _master(p) for p in self.parameters]
        self._apart = [host or p.dtype != torch.float32 for p in self.parameters]
        for parameter, master, apart in zip(self.parameters, self.masters, self._apart, strict=True):
            if apart:
                parameter.register_post_accumulate_grad_hook(_add_into(master))  # type: ignore[no-untyped-call]
                if master.device.type == "cpu" and not isinstance(parameter, DTensor):
                    set_master(parameter, master)
        devices = {m.device.type for m in self.masters}
        kernels = {training_kernels(m.device, m.dtype) for m in self.masters}
        common = kernels.pop() if len(kernels) == 1 else None
        self._one_pass = None if common is None or host else common.adamw
        fused = devices <= {"cpu", "cuda"}
        self.adamw = torch.optim.AdamW(
            self.masters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=fused
        )

    def step(self, ranks: Ranks | None = None, *, skip: bool = False) -> Update:
        """Clip, update, round back; gradients are cleared. A gradient that is not finite leaves the weights alone.

        ranks: those that have the other parts of the gradient; None: this is all of it. skip: the loss was not finite,
        so the gradient means nothing whatever it is.
        """
        self._take_gradients()
        found = [(m.grad, p) for m, p in zip(self.masters, self.parameters, strict=True) if m.grad is not None]
        norm = (ranks or Alone()).norm(found)
        rate = learning_rate(self.config, self.updates, self.total_updates)
        if self._one_pass is not None and not skip:
            finite = self._update_in_one_pass(norm, rate)
        else:
            finite = math.isfinite(norm.item()) and not skip
            if finite:
                self._update(norm.item(), rate)
        self.adamw.zero_grad(set_to_none=True)
        self.updates += 1
        return Update(norm.item(), rate, finite)

    def _take_gradients(self) -> None:
        """Of shards that are their own masters: torch may have moved them, and has the gradients in its own tensors."""
        for parameter, master, apart in zip(self.parameters, self.masters, self._apart, strict=True):
            if isinstance(parameter, DTensor) and not apart:
                master.data = local(parameter)
                master.grad = None if parameter.grad is None else local(parameter.grad)
                parameter.grad = None

    def _update(self, norm: float, rate: float) -> None:
        if norm > self.config.clip_norm:
            grads = [m.grad for m in self.masters if m.grad is not None]
            torch._foreach_mul_(grads, self.config.clip_norm / (norm + 1e-6))
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        with torch.no_grad():
            apart = [i for i, is_apart in enumerate(self._apart) if is_apart]
            if apart:
                torch._foreach_copy_([local(self.parameters[i]) for i in apart], [self.masters[i] for i in apart])

    @torch.no_grad()
    def _update_in_one_pass(self, norm: Tensor, rate: float) -> bool:
        """The same as `_update`, launched before the host knows the norm; returns whether it was finite."""
        assert self._one_pass is not None
        limit = self.config.clip_norm
        scale = torch.where(norm > limit, limit / (norm + 1e-6), 1.0).where(norm.isfinite(), torch.nan)
        settings = self.adamw.param_groups[0]
        touched = []
        for parameter, master, apart in zip(self.parameters, self.masters, self._apart, strict=True):
            if master.grad is not None:
                state = self.adamw.state[master]
                if not state:
                    zeros = (torch.zeros_like(master, memory_format=torch.contiguous_format) for _ in range(2))
                    state.update(zip(("step", "exp_avg", "exp_avg_sq"), (torch.tensor(0.0), *zeros), strict=True))
                touched.append(state)
                if not master.numel():  # a rank may have no element of a short parameter
                    continue
                rounded = local(parameter) if apart else master
                self._one_pass(
                    rounded, master, master.grad, state["exp_avg"], state["exp_avg_sq"], scale,
                    step=int(state["step"]) + 1, rate=rate, betas=settings["betas"], eps=settings["eps"],
                    weight_decay=settings["weight_decay"],
                )  # fmt: skip
        finite = math.isfinite(norm.item())
        for state in touched:
            state["step"] += int(finite)
        return finite

    def state(self) -> dict[str, Tensor]:
        """Masters and moments by name, flat: `{"master.model.norm.weight": …, "exp_avg.model.norm.weight": …}`.

        Sharded as the parameters are.
        """
        tensors = {}
        for name, parameter, master in zip(self.names, self.parameters, self.masters, strict=True):
            tensors[f"master.{name}"] = _sharded_like(parameter, master.detach())
            for key, value in self.adamw.state.get(master, {}).items():
                tensors[f"{key}.{name}"] = value if key == "step" else _sharded_like(parameter, value)
        return tensors

    def blank(self, names: Collection[str]) -> dict[str, Tensor]:
        """Tensors for a state with these names, to be filled and given to `load_state`."""
        tensors: dict[str, Tensor] = {}
        for name, parameter, master in zip(self.names, self.parameters, self.masters, strict=True):
            for key in ("master", "exp_avg", "exp_avg_sq"):
                if f"{key}.{name}" in names:
                    tensors[f"{key}.{name}"] = _sharded_like(parameter, torch.empty_like(master, requires_grad=False))
            if f"step.{name}" in names:
                tensors[f"step.{name}"] = torch.zeros(())
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        self.updates = updates
        self._take_gradients()
        with torch.no_grad():
            for name, parameter, master in zip(self.names, self.parameters, self.masters, strict=True):
                master.copy_(local(tensors[f"master.{name}"]))
                local(parameter).copy_(master)
                moments: dict[str, Any] = {
                    key: local(tensors[f"{key}.{name}"]).to(master.device if key != "step" else "cpu")
                    for key in ("step", "exp_avg", "exp_avg_sq")
                    if f"{key}.{name}" in tensors
                }
                if moments:
                    self.adamw.state[master] = moments


def _master(parameter: torch.nn.Parameter) -> Tensor:
    if parameter.dtype != torch.float32:
        return local(parameter).detach().float()
    return local(parameter) if isinstance(parameter, DTensor) else parameter


def _copy(parameter: torch.nn.Parameter) -> Tensor:
    """On the host."""
    return local(parameter).detach().to("cpu", torch.float32, copy=True)


def _sharded_like(parameter: Tensor, own: Tensor) -> Tensor:
    """Of the same layout over ranks. By its constructor: others would move it to the device of the mesh."""
    if not isinstance(parameter, DTensor):
        return own
    return DTensor(own, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _add_into(master: Tensor) -> Any:
    kernels = training_kernels(master.device, master.dtype)
    accumulate = None if kernels is None else kernels.accumulate

    def hook(parameter: Tensor) -> None:
        if parameter.grad is None:  # a kernel has added it already
            return
        gradient = local(parameter.grad).to(master.device)
        if accumulate is not None:
            master.grad = accumulate(master.grad, gradient)
        elif master.grad is None:
            master.grad = gradient.to(torch.float32, copy=True)
        else:
            master.grad += gradient
        parameter.grad = None

    return hook
