"""How a model and its rows are spread over ranks, and which rank is which.

    rank = (data · sequence + place in the sequence group) · tensor + place in the tensor group

Ranks of a tensor group compute one row together, each with a part of every wide layer. Ranks of a sequence group
compute one row together, each with a part of its tokens. The data ranks are what remains, and share the rows out.
Weights, gradients and the optimizer's state are sharded over data and sequence ranks alike.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from kitae.errors import ConfigError
from kitae.models.policy import Policy
from kitae.models.state_seam import mixers_of
from kitae.trainer.collective_ops import Distributed

Offload = Literal["none", "optimizer", "all"]
OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "all")


@dataclass(frozen=True, slots=True)
class Parallel:
    """`Parallel(ranks=8, tensor=2, sequence=2)`: 8 ranks, of which groups of 4 compute a row together.

    offload: what lies in host memory: nothing, the optimizer's state, or all of it, the weights included.
    """

    ranks: int = 1
    tensor: int = 1
    sequence: int = 1
    expert: int = 1
    offload: Offload = "none"

    def __post_init__(self) -> None:
        for name in ("ranks", "tensor", "sequence", "expert"):
            if getattr(self, name) < 1:
                raise ConfigError(f"cluster.{name} must be at least 1, got {getattr(self, name)}")
        if self.offload not in OFFLOADS:
            raise ConfigError(f"cluster.offload must be one of {', '.join(OFFLOADS)}, got {self.offload!r}")
        if self.ranks % self.peers:
            raise ConfigError(f"cluster.ranks must be a multiple of tensor x sequence = {self.peers}, got {self.ranks}")
        if self.expert > 1 and self.tensor > 1:
            raise ConfigError(f"cluster.expert > 1 needs tensor = 1, got expert {self.expert} and tensor {self.tensor}")
        if self.ranks % self.expert:
            raise ConfigError(f"cluster.ranks must be a multiple of expert = {self.expert}, got {self.ranks}")

    @property
    def peers(self) -> int:
        """How many ranks compute a row together."""
        return self.tensor * self.sequence

    @property
    def data(self) -> int:
        """How many ranks, or groups of peers, have rows of their own."""
        return self.ranks // self.peers

    def check(self, policy: Policy) -> None:
        """Raise unless this model's heads can be divided over the ranks."""
        name, tensor, sequence = policy.source, self.tensor, self.sequence
        if policy.vision is not None:
            raise ConfigError(f"cluster.ranks must be 1 for a model that sees, got {name}: its tower is not sharded")
        if self.peers > 1 and mixers_of(policy.model):
            raise ConfigError(
                f"cluster.tensor and cluster.sequence must be 1 for {name}, whose layers carry a state through a whole "
                f"row; got {tensor} and {sequence}"
            )
        if policy.kv_heads % tensor:
            raise ConfigError(
                f"cluster.tensor must divide the key-value heads of {name}, {policy.kv_heads}; got tensor = {tensor}"
            )
        if policy.heads % self.peers:
            raise ConfigError(
                f"cluster.tensor x sequence must divide the attention heads of {name}, {policy.heads}; "
                f"got {tensor} x {sequence}"
            )
        kv_heads = policy.kv_heads // tensor
        if kv_heads % sequence and sequence % kv_heads:
            raise ConfigError(
                f"cluster.sequence must divide the key-value heads that {name} has on a rank, {kv_heads}, or be a "
                f"multiple of them; got sequence = {sequence}"
            )
        if policy.exact and tensor > 1:
            raise ConfigError(f"model.exact needs cluster.tensor = 1: its sums have a fixed order; got {tensor}")


class Mesh:
    """The groups of ranks within torch's process group, which must exist and have `parallel.ranks` members.

    device: what this rank computes on. ranks: the collective operations of workers. This rank has the rows `data_rank`
    of `data_size`. All ranks must create it at the same time.
    """

    def __init__(self, parallel: Parallel, device: torch.device) -> None:
        if dist.get_world_size() != parallel.ranks:
            raise ConfigError(
                f"cluster.ranks must be as many as there are processes, {dist.get_world_size()}, got {parallel.ranks}"
            )
        self.parallel = parallel
        self.device = device
        self.rank = dist.get_rank()
        self.data_rank, self.data_size = self.rank // parallel.peers, parallel.data
        both = _grid(device, parallel.tensor, "shard", "tensor")
        self.shards, self.tensor = both["shard"], both["tensor"]
        self.sequence = _sequence_group(parallel)
        experts = _grid(device, parallel.expert, "copy", "expert") if parallel.expert > 1 else None
        self.experts: DeviceMesh | None = experts and experts["expert"]
        self.expert_shards: DeviceMesh | None = experts and experts["copy"]
        control, saving = (dist.new_group(backend="gloo") for _ in range(2))
        self.ranks = Distributed(device, control, saving, peers=parallel.peers, host=parallel.offload == "optimizer")


def _grid(device: torch.device, inner: int, *names: str) -> DeviceMesh:
    """All ranks as a grid of two dimensions; ranks of the inner one are successive."""
    return init_device_mesh(device.type, (dist.get_world_size() // inner, inner), mesh_dim_names=names)


def _sequence_group(parallel: Parallel) -> dist.ProcessGroup | None:
    """This rank's sequence group; None: it computes whole rows."""
    if parallel.sequence == 1:
        return None
    ranks = torch.arange(parallel.ranks).view(parallel.data, parallel.sequence, parallel.tensor)
    groups = ranks.transpose(1, 2).reshape(-1, parallel.sequence).tolist()
    own: dist.ProcessGroup
    own, _ = dist.new_subgroups_by_enumeration(groups)  # type: ignore[no-untyped-call]
    return own
