"""Settings of a cluster: where the parts of a run are, and how many there are of each."""

from typing import Literal, Self

from pydantic import Field, model_validator

from kitae.section import Section

POOLS = ("trainer", "engines", "verifiers")


class PoolConfig(Section):
    """What each process of a pool gets, and where."""

    cpus: float = Field(1.0, ge=0, description="Processor cores of a process.")
    gpus: float | None = Field(
        None,
        ge=0,
        description="GPUs of a process; less than 1: it shares one. Not set: one for a rank or an engine where the "
        "cluster has GPUs, none for a verifier.",
    )
    memory_gb: float = Field(0.0, ge=0, description="Memory of a process; 0: not counted.")
    place: Literal["pack", "spread", "strict-pack", "strict-spread"] = Field(
        "pack", description="On few machines or on many; strict: or not at all."
    )
    labels: dict[str, str] = Field({}, description="Labels that a machine must have, e.g. { accelerator = 'h200' }.")
    colocate_with: str = Field("", description="Another pool, whose places this one shares: colocated.")


class ClusterConfig(Section):
    """The same run in several processes, on one machine or many. Without this section there is one process."""

    backend: Literal["none", "local", "ray"] = Field(
        "none", description="none: one process; local: processes on this machine; ray: on a Ray cluster."
    )
    address: str = Field("", description="Of a running Ray cluster (auto, HOST:PORT); not set: one is started here.")
    nodes: int = Field(1, ge=1, le=64, description="Nodes of a Ray cluster that is started here.")
    patience: float = Field(30.0, gt=0, description="Seconds in which places must be found, else the run is refused.")
    ranks: int = Field(1, ge=1, le=65536, description="Processes that train, each with a shard of the weights.")
    tensor: int = Field(1, ge=1, description="Ranks that share each product (tensor parallelism).")
    sequence: int = Field(1, ge=1, description="Ranks that share each row of tokens (sequence parallelism).")
    expert: int = Field(1, ge=1, description="Ranks that share the experts of each layer (expert parallelism).")
    offload: Literal["none", "optimizer", "all"] = Field(
        "none", description="What waits in host memory while it is not needed: the optimizer's state, or weights too."
    )
    verifiers: int = Field(
        0,
        ge=0,
        le=4096,
        description="Processes with verifier.workers each that check answers; 0: beside the controller.",
    )
    collectives: Literal["auto", "nccl", "gloo"] = Field(
        "auto",
        description="What ranks add up what they computed with, and transport 'broadcast' sends by; auto: nccl where "
        "each process has a GPU of its own, else gloo, through host memory.",
    )
    transport: Literal["auto", "memory", "ipc", "broadcast", "file", "http"] = Field(
        "auto", description="How weights get to engines; auto: memory on one machine, http on several."
    )
    pools: dict[str, PoolConfig] = Field({}, description="Pools by name: trainer, engines, verifiers.")

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if self.backend == "none" and (self.ranks > 1 or self.verifiers):
            raise ValueError(
                f"cluster.ranks = {self.ranks} and verifiers = {self.verifiers} need cluster.backend = 'local' or "
                "'ray', got 'none'"
            )
        if self.backend != "ray" and (self.address or self.nodes > 1 or self.pools):
            raise ValueError(f"cluster.address, nodes and pools need cluster.backend = 'ray', got {self.backend!r}")
        if self.address and self.nodes > 1:
            raise ValueError(f"cluster.nodes is of a cluster that is started here, got {self.nodes} and an address")
        if self.ranks % (self.tensor * self.sequence):
            raise ValueError(
                f"cluster.ranks must be a multiple of tensor × sequence = {self.tensor * self.sequence}, got "
                f"{self.ranks}"
            )
        for name, pool in self.pools.items():
            if name not in POOLS:
                raise ValueError(f"cluster.pools must be some of {', '.join(POOLS)}, got {name!r}")
            if pool.colocate_with and (pool.colocate_with not in POOLS or pool.colocate_with == name):
                raise ValueError(f"cluster.pools.{name}.colocate_with must be another pool, got {pool.colocate_with!r}")
            if pool.colocate_with and pool.colocate_with in self.pools and self.pools[pool.colocate_with].colocate_with:
                raise ValueError(
                    f"cluster.pools.{name}.colocate_with must be a pool with places of its own, got "
                    f"{pool.colocate_with!r}, which shares those of another"
                )
        return self

    @property
    def spread(self) -> bool:
        """Whether a run has more than one process of its own."""
        return self.backend != "none"
