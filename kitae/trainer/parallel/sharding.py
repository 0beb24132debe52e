"""Spread a model over the ranks of a mesh: wide layers over tensor peers, experts over theirs, and all of it by FSDP2.

Parameters keep their names and dtypes, so optimizer, checkpoints and engines see the model as one process has it.
Gradients are added up over ranks in fp32, never averaged: a loss is a plain sum over the rows of all ranks. Each layer
is gathered for its own pass and freed after it. Embeddings, head and norms are whole on each tensor peer, and all peers
compute the same with them; over data and sequence ranks they are sharded like the rest.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from kitae.errors import ConfigError
from kitae.models.policy import Policy
from kitae.models.scalar import ScalarModel
from kitae.trainer.parallel.mesh import Mesh
from kitae.trainer.parallel.tensor_parallel import pattern, split_layers

_DISPATCH = "ep_dispatch_experts"  # the style that sends tokens to experts, so ranks may have different tokens


def shard(model: Policy | ScalarModel, mesh: Mesh) -> None:
    """Shard a model, before anything is built on it (worker, optimizer). All ranks must have the same weights."""
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
    for module in (*layers_of(policy), *own, model):
        _fully_shard(module, mesh.shards, mesh)
    if isinstance(model, Policy):
        register_fsdp_forward_method(model, "score")
    else:
        policy.head.to("meta")  # nothing computes with it, and it would be whole on every rank
    policy.spread(mesh.device, parallel.tensor, mesh.sequence)


def layers_of(policy: Policy) -> Iterable[nn.Module]:
    """The decoder's layers, each of which is gathered on its own."""
    decoder: Any = policy.decoder
    return next(m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == policy.layers)


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
