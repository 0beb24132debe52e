"""Tensor parallelism: every rank of a group has some columns or rows of each wide layer, as the model's own plan says.

The plan is that of transformers (`base_model_tp_plan`). Heads and MLP channels are split; what lies between two layers
is whole on every rank. Adapters are split as the layer that they belong to.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from kitae.errors import ConfigError
from kitae.models.fuse import unfuse
from kitae.models.policy import Policy


class Shared(ParallelStyle):  # type: ignore[misc]
    """A module whose parameters are whole on every rank, but see only its heads: their gradients are added up."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        inner: Callable[..., Any] = module.forward
        group = device_mesh.get_group()

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            whole = dict(self._parameters)
            shared = {n: p if p is None else _SumGradient.apply(p, group) for n, p in whole.items()}
            self._parameters.update(shared)  # type: ignore[arg-type]
            try:
                return inner(*args, **kwargs)
            finally:
                self._parameters.update(whole)

        module.forward = MethodType(forward, module)
        return module


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "replicated_with_grad_allreduce": Shared,
}
"""By the names that plans have for them."""


def split_layers(policy: Policy, peers: DeviceMesh) -> None:
    """Fused modules read whole weights, so layers, attention and MLPs run as their classes define them from now on."""
    decoder: Any = policy.decoder
    plan = _plan_of(policy)
    unfuse(decoder)
    for name, module in list(decoder.named_modules()):
        style = plan.get(pattern(name))
        if style is not None:
            for part in _parts(module, columns=style.startswith("colwise")):
                parallelize_module(part, peers, STYLES[style]())


def _plan_of(policy: Policy) -> dict[str, str]:
    """What the plan says of the modules that this model has."""
    decoder: Any = policy.decoder
    named = (*decoder.named_modules(), *decoder.named_parameters())
    names = {pattern(name) for name, _ in named}
    plan: dict[str, str] = getattr(policy.base.config.get_text_config(), "base_model_tp_plan", None) or {}
    used = {pattern: style for pattern, style in plan.items() if pattern in names}
    unknown = sorted(set(used.values()) - set(STYLES))
    if not used or unknown:
        found = f"the styles {', '.join(unknown)}" if unknown else "none"
        raise ConfigError(
            f"tensor > 1 needs a model whose plan has the styles {', '.join(STYLES)} and no others; "
            f"{type(policy.base).__name__} has {found}"
        )
    return used


def pattern(name: str) -> str:
    """`layers.3.mlp` → `layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _parts(module: Any, *, columns: bool) -> Iterator[nn.Module]:
    """A layer; of one with adapters, what it wraps and the adapters' factors on the side that is split."""
    if not hasattr(module, "base_layer"):
        yield module
        return
    yield module.base_layer
    yield from (module.lora_B if columns else module.lora_A).values()
