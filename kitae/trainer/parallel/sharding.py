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

from kitae.models.policy import Policy
from kitae.models.scalar import ScalarModel
from kitae.trainer.parallel.expert_parallel import split_experts
from kitae.trainer.parallel.mesh import Mesh
from kitae.trainer.parallel.tensor_parallel import split_layers


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
