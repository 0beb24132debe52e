"""AdamW on fp32 master weights, whatever dtype the modules compute in.

Where the modules are fp32 already, they are their own masters. Otherwise gradients are added up in fp32 after every
backward pass, and the new values are rounded into the modules. A parameter in bfloat16 is the upper half of its master,
and only the lower half is kept beside it, so nothing else may write to the parameter. Other dtypes have an fp32 copy.
For sharded parameters, masters and moments are this rank's shards, as AdamW treats each element alone. On request
masters (as copies) and moments lie in host memory.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from kitae.kernels.adamw import Rest, adamw, split, whole
from kitae.kernels.allocation import set_master
from kitae.kernels.base import AdamWPace, AdamWPart, AdamWStep
from kitae.kernels.devices import training_kernels
from kitae.trainer.collective_ops import Alone, Ranks, local
from kitae.trainer.config import LearningConfig

_EPS = 1e-8
_HOOK = "kitae_hook"
_KEPT = {"master": torch.float32, "weight": torch.bfloat16, "rest": torch.int16}  # a master is one, or the other two


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
class UpdatePace:
    """What one update goes by: `UpdatePace(1e-4, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0, clip_norm=1.0)`."""

    rate: float
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = _EPS
    weight_decay: float = 0.0
    clip_norm: float = math.inf

    @classmethod
    def of(cls, config: LearningConfig, update: int, total_updates: int) -> "UpdatePace":
        rate = learning_rate(config, update, total_updates)
        return cls(rate, config.betas, _EPS, config.weight_decay, config.clip_norm)


@dataclass(frozen=True, slots=True)
class Update:
    """`Update(norm=0.7, rate=1e-5, applied=True)`: the gradient's norm before clipping; whether the weights moved."""

    norm: float
    rate: float
    applied: bool


class Optimizer:
    """host: masters and moments lie in host memory, wherever the parameters are."""

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
            _hook(parameter, _add_into(master) if apart else None)
            beside = not host or parameter.device.type == "cpu"
            if beside and not isinstance(parameter, DTensor):
                set_master(parameter, master)
        self._dtype = getattr(torch, config.moments)
        self._moments: list[_Moments | None] = [None] * len(self.masters)

    def step(self, ranks: Ranks | None = None, *, skip: bool = False, pace: UpdatePace | None = None) -> Update:
        """Clip, update, round back, and clear the gradients. A gradient that is not finite leaves the weights alone.

        ranks: those that hold the other parts of the gradient; None: this is all of it. skip: the loss was not finite,
        so the weights stay as they are whatever the gradient is. pace: None: that of the settings.
        """
        self._take_gradients()
        found = [(m.grad, p) for m, p in zip(self.masters, self.parameters, strict=True) if m.grad is not None]
        norm = (ranks or Alone()).norm(found)
        pace = pace or UpdatePace.of(self.config, self.updates, self.total_updates)
        limit = pace.clip_norm
        scale = torch.where(norm > limit, limit / (norm + 1e-6), 1.0).where(norm.isfinite(), torch.nan)
        touched = self._update(scale * torch.nan if skip else scale, pace)
        # The host asks for the norm only when all kernels are launched.
        finite = math.isfinite(norm.item()) and not skip
        for moments in touched:
            moments.steps += int(finite)
        for master in self.masters:
            master.grad = None
        self.updates += 1
        return Update(norm.item(), pace.rate, finite)

    def _take_gradients(self) -> None:
        """Point fp32 masters of shards to torch's current tensors and gradients, which it may have replaced."""
        for parameter, master, apart in zip(self.parameters, self.masters, self._apart, strict=True):
            if isinstance(parameter, DTensor) and isinstance(master, Tensor) and not apart:
                master.data = local(parameter)
                master.grad = None if parameter.grad is None else local(parameter.grad)
                parameter.grad = None

    @torch.no_grad()
    def _update(self, scale: Tensor, pace: UpdatePace) -> list["_Moments"]:
        """Update every master that has a gradient, times `scale`; a scale of NaN changes nothing."""
        touched, rounded = [], []
        alike: dict[tuple[AdamWStep, int, torch.device], list[AdamWPart]] = {}
        for i, (parameter, master) in enumerate(zip(self.parameters, self.masters, strict=True)):
            if master.grad is None:
                continue
            moments = self._moments[i] = self._moments[i] or _Moments.none(master.grad, self._dtype)
            touched.append(moments)
            if not master.grad.numel():  # a rank may have no element of a short parameter
                continue
            own = local(parameter)
            weight, rest = (own, master.bits) if isinstance(master, Rest) else (master, None)
            part = AdamWPart(weight, rest, master.grad, moments.mean, moments.square)
            alike.setdefault((_step_of(part), moments.steps, master.grad.device), []).append(part)
            if self._apart[i] and isinstance(master, Tensor):
                rounded.append((own, master))
        for (step, before, device), parts in alike.items():
            now = AdamWPace(before + 1, pace.rate, pace.betas, pace.eps, pace.weight_decay)
            step(parts, scale.to(device), now)
        for own, master in rounded:
            own.copy_(master)
        return touched

    def state(self) -> dict[str, Tensor]:
        """Masters and moments in one flat table: `{"master.model.norm.weight": …, "exp_avg.model.norm.weight": …}`.

        They are sharded as the parameters are. A master in two halves is `weight.…` and `rest.…`, not `master.…`.
        """
        tensors = {}
        for i, (name, parameter, master) in enumerate(zip(self.names, self.parameters, self.masters, strict=True)):
            if isinstance(master, Rest):
                tensors[f"weight.{name}"] = _sharded_like(parameter, local(parameter).detach())
                tensors[f"rest.{name}"] = _sharded_like(parameter, master.bits)
            else:
                tensors[f"master.{name}"] = _sharded_like(parameter, master.detach())
            if (moments := self._moments[i]) is not None:
                tensors[f"step.{name}"] = torch.tensor(float(moments.steps))
                tensors[f"exp_avg.{name}"] = _sharded_like(parameter, moments.mean)
                tensors[f"exp_avg_sq.{name}"] = _sharded_like(parameter, moments.square)
        return tensors

    def blank(self, names: Collection[str]) -> dict[str, Tensor]:
        """Tensors for a state with these names, to be filled and given to `load_state`."""
        tensors: dict[str, Tensor] = {}
        dtypes = _KEPT | {"exp_avg": self._dtype, "exp_avg_sq": self._dtype}
        for name, parameter, master in zip(self.names, self.parameters, self.masters, strict=True):
            for key, dtype in dtypes.items():
                if f"{key}.{name}" in names:
                    own = torch.empty_like(_held(master), dtype=dtype, requires_grad=False)
                    tensors[f"{key}.{name}"] = _sharded_like(parameter, own)
            if f"step.{name}" in names:
                tensors[f"step.{name}"] = torch.zeros(())
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        self.updates = updates
        self._take_gradients()
        with torch.no_grad():
            for i, (name, parameter, master) in enumerate(zip(self.names, self.parameters, self.masters, strict=True)):
                _load(local(parameter), master, _found(name, tensors))
                if f"step.{name}" in tensors:
                    mean, square = (
                        local(tensors[f"{key}.{name}"]).to(_held(master).device, self._dtype).contiguous()
                        for key in ("exp_avg", "exp_avg_sq")
                    )
                    self._moments[i] = _Moments(int(tensors[f"step.{name}"]), mean, square)


@dataclass(slots=True)
class _Moments:
    """AdamW's running averages for one master, after so many steps."""

    steps: int
    mean: Tensor
    square: Tensor

    @classmethod
    def none(cls, grad: Tensor, dtype: torch.dtype) -> "_Moments":
        mean, square = (torch.zeros(grad.shape, dtype=dtype, device=grad.device) for _ in range(2))
        return cls(0, mean, square)


def _step_of(part: AdamWPart) -> AdamWStep:
    """Which AdamW to use: kernels need contiguous memory; torch does everything else."""
    kernels = training_kernels(part.grad.device, torch.float32)
    if kernels is None or kernels.adamw is None or not part.parameter.is_contiguous():
        return adamw
    return kernels.adamw


def _found(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """The master, from either saved form: the parameter's dtype and device may have changed since."""
    if f"rest.{name}" in tensors:
        return whole(local(tensors[f"weight.{name}"]), local(tensors[f"rest.{name}"]))
    return local(tensors[f"master.{name}"])


def _load(own: Tensor, master: Tensor | Rest, value: Tensor) -> None:
    """Set a parameter and its master."""
    if isinstance(master, Rest):
        upper, rest = split(value)
        own.copy_(upper)
        master.bits.copy_(rest)
    else:
        master.copy_(value)
        own.copy_(master)


def _master(parameter: torch.nn.Parameter) -> Tensor | Rest:
    if parameter.dtype == torch.bfloat16:
        return Rest(torch.zeros(local(parameter).shape, dtype=torch.int16, device=local(parameter).device))
    if parameter.dtype != torch.float32:
        return local(parameter).detach().float()
    return local(parameter) if isinstance(parameter, DTensor) else parameter


def _held(master: Tensor | Rest) -> Tensor:
    return master.bits if isinstance(master, Rest) else master


def _copy(parameter: torch.nn.Parameter) -> Tensor:
    """An fp32 copy on the host."""
    return local(parameter).detach().to("cpu", torch.float32, copy=True)


def _sharded_like(parameter: Tensor, own: Tensor) -> Tensor:
    """A local tensor as a shard, with the parameter's layout. Other ways to make one move it to the mesh's device."""
    if not isinstance(parameter, DTensor):
        return own
    return DTensor(own, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _hook(parameter: torch.nn.Parameter, function: Any) -> None:
    """Add a gradient hook in place of an earlier optimizer's, which would otherwise take the gradients."""
    known = vars(parameter)
    if (earlier := known.pop(_HOOK, None)) is not None:
        earlier.remove()
    if function is not None:
        known[_HOOK] = parameter.register_post_accumulate_grad_hook(function)  # type: ignore[no-untyped-call]


def _add_into(master: Tensor | Rest) -> Any:
    device = _held(master).device
    kernels = training_kernels(device, torch.float32)
    accumulate = None if kernels is None else kernels.accumulate

    def hook(parameter: Tensor) -> None:
        if parameter.grad is None:  # a kernel has added the gradient already
            return
        gradient = local(parameter.grad).to(device)
        if accumulate is not None:
            master.grad = accumulate(master.grad, gradient)
        elif master.grad is None:
            master.grad = gradient.to(torch.float32, copy=True)
        else:
            master.grad += gradient
        parameter.grad = None

    return hook
