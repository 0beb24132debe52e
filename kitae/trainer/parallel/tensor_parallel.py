"""Tensor parallelism: each rank of a group has some columns or rows of each wide layer, as the model's own plan says.

The plan is that of transformers (`base_model_tp_plan`). Heads and MLP channels are split; what passes between layers is
whole on every rank. Adapters are split like the layer that they belong to. Parameters are registered as shards of the
whole ones; the computation uses plain products of the local parts, with a sum over ranks after the rows, and in the
backward pass before the columns.
"""

import re
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import linear

from kitae.errors import ConfigError
from kitae.models.fuse import unfuse
from kitae.models.policy import Policy
from kitae.trainer.parallel.collectives import sum_gradient, sum_parts


def split_layers(policy: Policy, peers: DeviceMesh) -> None:
    """Split the layers, which from now on run as their classes define them: fused modules would read whole weights."""
    decoder: Any = policy.decoder
    plan = _plan_of(policy)
    unfuse(decoder)
    for name, module in list(decoder.named_modules()):
        style = plan.get(pattern(name))
        if style is not None:
            STYLES[style](module, peers)


def pattern(name: str) -> str:
    """`layers.3.mlp` → `layers.*.mlp`, the form used in plans."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _plan_of(policy: Policy) -> dict[str, str]:
    """The part of the plan that concerns the modules of this model."""
    decoder: Any = policy.decoder
    names = {pattern(name) for name, _ in (*decoder.named_modules(), *decoder.named_parameters())}
    plan: dict[str, str] = getattr(policy.base.config.get_text_config(), "base_model_tp_plan", None) or {}
    used = {each: style for each, style in plan.items() if each in names}
    unknown = sorted(set(used.values()) - set(STYLES))
    if not used or unknown:
        raise ConfigError(
            f"cluster.tensor > 1 needs a model whose plan has the styles {', '.join(STYLES)} and no others; "
            f"{type(policy.base).__name__} has {', '.join(unknown) or 'no plan'}"
        )
    return used


def _columns(module: Any, peers: DeviceMesh) -> None:
    """Split the outputs of a linear layer; of its adapters, those of the second factor."""
    for part in (module.base_layer, *module.lora_B.values()) if hasattr(module, "base_layer") else (module,):
        _shard(part, "weight", 0, peers)
        if part.bias is not None:
            _shard(part, "bias", 0, peers)
        part.forward = MethodType(_through_columns, part)


def _rows(module: Any, peers: DeviceMesh) -> None:
    """Split the inputs of a linear layer; of its adapters, those of the first factor."""
    for part in (module.base_layer, *module.lora_A.values()) if hasattr(module, "base_layer") else (module,):
        _shard(part, "weight", 1, peers)
        part.forward = MethodType(_through_rows, part)


def _shard(module: nn.Module, name: str, dim: int, peers: DeviceMesh) -> None:
    """Keep this rank's part of a parameter that each rank has as a whole."""
    whole: Any = getattr(module, name)
    part = distribute_tensor(whole.detach(), peers, [Shard(dim)], src_data_rank=None)
    setattr(module, name, nn.Parameter(part, requires_grad=whole.requires_grad))


def _through_columns(self: Any, x: Tensor) -> Tensor:
    weight: DTensor = self.weight
    bias = None if self.bias is None else self.bias.to_local()
    return linear(sum_gradient(x, _group(weight)), weight.to_local(), bias)


def _through_rows(self: Any, x: Tensor) -> Tensor:
    weight: DTensor = self.weight
    out = sum_parts(linear(x, weight.to_local()), _group(weight))
    return out if self.bias is None else out + self.bias


def _group(weight: DTensor) -> dist.ProcessGroup:
    return weight.device_mesh.get_group()


def _shared(module: nn.Module, peers: DeviceMesh) -> None:
    """A module with whole parameters, which sees only this rank's heads: its gradients are summed over ranks."""
    inner: Callable[..., Any] = module.forward
    group = peers.get_group()

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        whole = dict(self._parameters)
        summed: dict[str, Any] = {n: p if p is None else sum_gradient(p, group) for n, p in whole.items()}
        self._parameters.update(summed)
        try:
            return inner(*args, **kwargs)
        finally:
            self._parameters.update(whole)

    module.forward = MethodType(forward, module)


STYLES: Mapping[str, Callable[[nn.Module, DeviceMesh], None]] = {
    "colwise": _columns,
    "rowwise": _rows,
    "replicated_with_grad_allreduce": _shared,
}
"""How to split a module, by the names that plans use."""
