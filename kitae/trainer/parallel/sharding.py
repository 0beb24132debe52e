"""Spread a model over the ranks of a mesh: wide layers over tensor peers, experts over theirs, and all of it by FSDP2.

The parameters keep their names and dtypes, so optimizer, checkpoints and engines see the model that one process has.
Gradients are added up over ranks in fp32, never averaged: a loss is a plain sum over the rows of all of them. Every
layer is gathered for its own pass and freed after it. Embeddings, head and norms are whole on each tensor peer, which
all compute the same with them; over data and sequence ranks they are sharded like the rest.
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

from kitae.models.policy import Policy
from kitae.models.scalar import ScalarModel
from kitae.trainer.parallel.expert_parallel import split_experts
from kitae.trainer.parallel.mesh import Mesh
from kitae.trainer.parallel.tensor_parallel import split_layers


def shard(model: Policy | ScalarModel, mesh: Mesh) -> None:
    """Before a worker, a reference or an optimizer is made of it. All ranks must hold the same weights."""
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
    """The decoder's layers, which are gathered one at a time."""
    decoder: Any = policy.decoder
    return next(m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == policy.layers)


def _fully_shard(module: nn.Module, over: DeviceMesh, mesh: Mesh) -> None:
    offload = OffloadPolicy()
    if mesh.parallel.offload == "all":
        offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
    # Freed after the forward pass, the root too: an update between two passes must be seen by the second.
    sharded = fully_shard(
        module,
        mesh=over,
        reshard_after_forward=True,
        mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32),
        offload_policy=offload,
    )
    assert isinstance(sharded, FSDPModule)
    # Both, and of every module: a factor alone is refused by gloo, and at the root alone it leaves layers with means.
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)
