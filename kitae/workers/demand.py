"""What the pools of a run ask of a cluster, and whether its machines can give it. Pure: back-ends act on it.

A *placement group* is a set of bundles that are found together or not at all; processes have slots in its bundles.
Pools that are colocated with another share its group. A bundle is on one machine.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor

from kitae.workers.config import POOLS, ClusterConfig, PoolConfig
from kitae.workers.gpus import COMPUTING

_GB = 10**9
_TINY = 0.001  # of a core: a bundle must ask for something


@dataclass(frozen=True, slots=True)
class Demand:
    """`Demand(cpus=2, gpus=1, memory=8e9)`: of one process, a bundle or a machine; memory in bytes."""

    cpus: float = 0.0
    gpus: float = 0.0
    memory: float = 0.0

    def __add__(self, other: "Demand") -> "Demand":
        return Demand(self.cpus + other.cpus, self.gpus + other.gpus, self.memory + other.memory)

    def __mul__(self, times: int) -> "Demand":
        return Demand(self.cpus * times, self.gpus * times, self.memory * times)

    @classmethod
    def of(cls, pool: PoolConfig) -> "Demand":
        return cls(pool.cpus, pool.gpus or 0.0, pool.memory_gb * _GB)

    def times_in(self, other: "Demand") -> int:
        """How often this fits into another."""
        pairs = ((self.cpus, other.cpus), (self.gpus, other.gpus), (self.memory, other.memory))
        return min((floor(have / need + 1e-6) for need, have in pairs if need > 0), default=10**9)

    @property
    def bundle(self) -> "Demand":
        """The same, but not nothing."""
        return self if self.cpus or self.gpus or self.memory else Demand(cpus=_TINY)

    def __str__(self) -> str:
        parts = [f"{self.cpus:g} CPUs", f"{self.gpus:g} GPUs"]
        return ", ".join([*parts, f"{self.memory / _GB:.3g} GB"] if self.memory else parts)


@dataclass(frozen=True, slots=True)
class Supplier:
    """`Supplier("10.0.0.3", Demand(8, 1, 64e9), free=Demand(6, 1, 64e9), labels={"accelerator": "h200"})`."""

    name: str
    total: Demand
    free: Demand
    labels: Mapping[str, str] = field(default_factory=dict)

    def fits(self, labels: Mapping[str, str]) -> bool:
        return all(self.labels.get(key) == value for key, value in labels.items())

    def __str__(self) -> str:
        free = "" if self.free == self.total else f" (free: {self.free})"
        labels = ", ".join(f"{key}={value}" for key, value in self.labels.items() if not key.startswith("ray.io/"))
        return f"{self.name}: {self.total}{free}" + (f"; labels {labels}" if labels else "")


@dataclass(frozen=True, slots=True)
class PlacementGroup:
    """`PlacementGroup("trainer", "spread", (Demand(2),) * 4, {}, slots={"trainer": (0, 1, 2, 3), "engines": (0, 1)})`.

    slots: for each pool, the bundle of each of its processes. here: on the controller's machine.
    """

    name: str
    place: str
    bundles: tuple[Demand, ...]
    labels: Mapping[str, str]
    slots: Mapping[str, tuple[int, ...]]
    here: bool = False

    def __str__(self) -> str:
        each = " or ".join(dict.fromkeys(map(str, self.bundles)))
        pools = " and ".join(f"cluster.pools.{pool} ({len(slots)} processes)" for pool, slots in self.slots.items())
        labels = ", ".join(f"{key}={value}" for key, value in self.labels.items())
        number = f"{len(self.bundles)} × ({each})" if len(self.bundles) > 1 else each
        where = " on the controller's machine" if self.here else f", place = {self.place!r}"
        return f"{pools}: {number}{where}" + (f", labels {labels}" if labels else "")


def with_gpus(
    config: ClusterConfig, counts: Mapping[str, int], device: str, machines: Iterable[Supplier], *, fixed: bool
) -> ClusterConfig:
    """The same with the GPUs that the pools leave open: one for each rank and engine, if the cluster has any.

    Processes that are colocated share one, and so do all of them on a cluster that is `fixed` and has too few. device:
    `model.device`; on CPUs, nothing is asked for, and where it says cuda, GPUs are, even if none is there yet.
    """
    shares = {name: _neighbours(config, counts, name) for name in COMPUTING if pool_of(config, name).gpus is None}
    there = sum(machine.total.gpus for machine in machines)
    if device == "cpu" or (not there and device == "auto"):
        shares = dict.fromkeys(shares, 0)
    needed = sum(counts.get(name, 0) / share for name, share in shares.items() if share)
    crowd = ceil(needed / there - 1e-6) if fixed and there else 1
    given = {name: 1 / (share * max(1, crowd)) if share else 0.0 for name, share in shares.items()}
    pools = {name: pool_of(config, name).model_copy(update={"gpus": gpus}) for name, gpus in given.items()}
    return config.model_copy(update={"pools": {**config.pools, **pools}})


def _neighbours(config: ClusterConfig, counts: Mapping[str, int], name: str) -> int:
    """How many processes share a bundle with one of this pool, itself included, of those that hold a model."""
    host = pool_of(config, name).colocate_with if counts.get(pool_of(config, name).colocate_with) else name
    guests = [each for each in COMPUTING if each != host and pool_of(config, each).colocate_with == host]
    return 1 + sum(ceil(counts.get(each, 0) / max(1, counts.get(host, 0))) for each in guests)


def groups_of(config: ClusterConfig, counts: Mapping[str, int]) -> tuple[PlacementGroup, ...]:
    """The groups of all pools that have processes, the trainer's first."""
    hosts: dict[str, list[str]] = {}
    for name in POOLS:
        if counts.get(name):
            other = pool_of(config, name).colocate_with
            hosts.setdefault(other if counts.get(other) else name, []).append(name)
    return tuple(_group(config, host, guests, counts) for host, guests in sorted(hosts.items(), key=_order))


def lone_group(config: ClusterConfig, pool: str) -> PlacementGroup:
    """For one more process of a pool."""
    asked = pool_of(config, pool)
    return PlacementGroup(pool, "pack", (Demand.of(asked).bundle,), asked.labels, {pool: (0,)})


def pool_of(config: ClusterConfig, name: str) -> PoolConfig:
    return config.pools.get(name) or PoolConfig()


def _order(item: tuple[str, list[str]]) -> int:
    return POOLS.index(item[0])


def _group(config: ClusterConfig, host: str, pools: Sequence[str], counts: Mapping[str, int]) -> PlacementGroup:
    asked, size = pool_of(config, host), counts[host]
    slots = {name: tuple(i % size for i in range(counts[name])) for name in pools}
    bundles = [Demand()] * size
    for name, taken in slots.items():
        for slot in taken:
            bundles[slot] += Demand.of(pool_of(config, name))
    labels = {key: value for name in pools for key, value in pool_of(config, name).labels.items()}
    return PlacementGroup(
        host, asked.place, tuple(b.bundle for b in bundles), labels, slots, here=bool(asked.colocate_with)
    )


def hopeless(group: PlacementGroup, machines: Iterable[Supplier]) -> str:
    """Why the machines could not give it even if all of them were idle; nothing: they could."""
    machines = list(machines)
    right = [machine for machine in machines if machine.fits(group.labels)]
    if not right:
        missing = ", ".join(f"{key}={value}" for key, value in group.labels.items())
        return f"no machine has the labels {missing}"
    least = min(group.bundles, key=lambda bundle: (bundle.gpus, bundle.cpus, bundle.memory))
    fits = [least.times_in(machine.total) for machine in right]
    with_labels = " with those labels" if group.labels else ""
    if not any(fits):
        return f"no machine{with_labels} has {least}"
    number = len(group.bundles)
    if group.place == "strict-pack" and max(fits) < number:
        return f"no one machine{with_labels} has {number} × ({least}), which place = 'strict-pack' asks for"
    if group.place == "strict-spread" and sum(map(bool, fits)) < number:
        able = sum(map(bool, fits))
        return (
            f"place = 'strict-spread' asks for {number} machines{with_labels}, {able} of {len(machines)} have {least}"
        )
    if sum(fits) < number:
        return f"all machines{with_labels} together have {sum(fits)} × ({least}), needed are {number}"
    return ""


def refusal(group: PlacementGroup, machines: Sequence[Supplier], why: str) -> str:
    """The demand, what is wrong with it, and the supply."""
    supply = "\n".join(f"  {machine}" for machine in machines) or "  no machine"
    return f"the cluster cannot give what is asked for: {why}\ndemand\n  {group}\nsupply\n{supply}"
