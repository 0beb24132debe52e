"""Spread a model over the ranks of a mesh: wide layers over tensor peers, experts over theirs, and all of it by FSDP2.

Parameters keep their names and dtypes, so optimizer, checkpoints and engines see the model as one process has it.
Gradients are added up over ranks in fp32, never averaged: a loss is a plain sum over the rows of all ranks. Each layer
is gathered for its own pass and freed after it. Embeddings, head and norms are whole on each tensor peer, and all peers
compute the same with them; over data and sequence ranks they are sharded like the rest.

Tensor peers have some columns or rows of each wide layer each. The plan is that of transformers (`base_model_tp_plan`).
Heads and MLP channels are split; what passes between layers is whole on every rank. Adapters are split like the layer
that they belong to. Parameters are registered as shards of the whole ones; the computation uses plain products of the
local parts, with a sum over ranks after the rows, and in the backward pass before the columns.
"""

import re
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import linear

from kitae.errors import ConfigError
from kitae.models.fuse import unfuse
from kitae.models.load_in_shards import fill_policy
from kitae.models.parts import layers_of
from kitae.models.policy import Policy
from kitae.models.scalar import ScalarModel
from kitae.trainer.parallel.collectives import sum_gradient, sum_parts
from kitae.trainer.parallel.mesh import Mesh

_DISPATCH = "ep_dispatch_experts"  # the style that sends tokens to experts, so ranks may have different tokens


def shard(model: Policy | ScalarModel, mesh: Mesh) -> None:
    """Shard a model, before anything is built on it (worker, optimizer). All ranks must have the same weights, or
    none: then each reads its own."""
    policy = model if isinstance(model, Policy) else model.policy
    parallel = mesh.parallel
    parallel.check(policy)
    if parallel.tensor > 1:
        split_layers(policy, mesh.tensor)
    if mesh.experts is not None:
        assert mesh.expert_shards is not None
        for experts in split_experts(policy, mesh.experts, mesh.tensor):
            _fully_shard(experts, mesh.expert_shards, mesh)
    own = [] if model is policy else [model.head]  # of another dtype than the decoder
    for module in (*layers_of(policy.base), *own, model):
        _fully_shard(module, mesh.shards, mesh)
    register_fsdp_forward_method(model, "within")
    if isinstance(model, Policy):
        register_fsdp_forward_method(model, "score")
    else:
        policy.head.to("meta")  # nothing computes with it, and it would be whole on every rank
    policy.spread(mesh.device, parallel.tensor, mesh.sequence)
    if policy.unfilled is not None:
        fill_policy(policy, model.within, host=parallel.offload == "all", scalar=model is not policy)


def _fully_shard(module: nn.Module, over: DeviceMesh, mesh: Mesh) -> None:
    offload = OffloadPolicy()
    if mesh.parallel.offload == "all":
        offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
    # Parameters are freed after the forward pass, those of the root too: the next pass must see an update in between.
    sharded = fully_shard(
        module,
        mesh=over,
        reshard_after_forward=True,
        mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32),
        offload_policy=offload,
    )
    assert isinstance(sharded, FSDPModule)
    # Both calls, for every module: gloo refuses the factor alone, and set at the root alone it leaves layers averaged.
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


def split_experts(policy: Policy, group: DeviceMesh, tensor: DeviceMesh) -> list[nn.Module]:
    """Split the experts over the group. Returns the modules that hold them. tensor: the ranks with the same rows."""
    decoder: Any = policy.decoder
    config = policy.base.config.get_text_config()
    plan: dict[str, str] = getattr(config, "base_model_ep_plan", None) or {}
    name = type(policy.base).__name__
    if _DISPATCH not in plan.values():
        raise ConfigError(f"cluster.expert > 1 needs a model with a plan that sends tokens to experts, got {name}")
    if policy.model is not policy.base:
        raise ConfigError("cluster.expert > 1 needs model.lora_rank = 0")
    try:  # the first name came with 5.23
        from transformers.distributed.expert_parallel import EPImplementation, apply_expert_parallelism  # noqa: F401
    except ImportError:
        from transformers import __version__

        raise ConfigError(f"cluster.expert > 1 needs transformers 5.23 or newer, got {__version__}") from None
    experts = [m for n, m in decoder.named_modules() if plan.get(pattern(n)) == _DISPATCH]
    for count in {int(m.num_experts) for m in experts}:
        if count % group.size():
            raise ConfigError(f"cluster.expert must divide the experts of {name}, {count}; got {group.size()}")
    named = [*decoder.named_parameters(), *decoder.named_modules()]  # in this order: dispatch counts a rank's experts
    apply_expert_parallelism(decoder, group, tensor, {n: plan[pattern(n)] for n, _ in named if pattern(n) in plan})
    return experts


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
