"""Places for processes on the nodes of a Ray cluster: bundles of placement groups, found, used again, given back."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from kitae.workers.base import LaunchError, LaunchSpec
from kitae.workers.config import ClusterConfig
from kitae.workers.demand import Demand, PlacementGroup, Supplier, hopeless, lone_group, pool_of, refusal

_POLL = 0.2  # seconds between two looks at a place that is awaited


@dataclass(frozen=True, slots=True)
class RayPlace:
    """For one process: `RayPlace("engines", group, bundle=0)`; lone: its group is for it alone, and ends with it."""

    pool: str
    group: Any
    bundle: int
    lone: bool = False


class RayPlaces:
    """fixed: the cluster does not grow, so a demand that it cannot meet is refused at once."""

    def __init__(self, config: ClusterConfig, ray: Any, *, fixed: bool) -> None:
        self.config = config
        self._ray = ray
        self._fixed = fixed
        self._free: dict[str, list[RayPlace]] = {}
        self._groups: set[Any] = set()
        self._closed = False

    def machines(self) -> list[Supplier]:
        """The nodes that live, with what they have and what of it is free."""
        from ray._private.state import available_resources_per_node  # nothing public tells it by node

        free = available_resources_per_node()
        return [
            Supplier(
                f"{node['NodeManagerAddress']} [{node['NodeID'][:8]}]",
                _supply(node["Resources"]),
                _supply(free.get(node["NodeID"], {})),
                node["Labels"],
            )
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    async def find(self, wanted: Sequence[PlacementGroup], deadline: float) -> None:
        """Places for all of them, or `LaunchError`: those that were found already stay until the cluster is closed."""
        if self._fixed:
            machines = self.machines()
            for each in wanted:
                if why := hopeless(each, machines):
                    raise LaunchError(refusal(each, machines, why))
        groups = [self._reserve(each) for each in wanted]
        for each, group in zip(wanted, groups, strict=True):
            await self._settle(each, group, deadline)
            for pool, bundles in each.slots.items():
                self._free.setdefault(pool, []).extend(RayPlace(pool, group, bundle) for bundle in bundles)

    def _reserve(self, wanted: PlacementGroup) -> Any:
        labels = dict(wanted.labels)
        if wanted.here:
            labels["ray.io/node-id"] = self._ray.get_runtime_context().get_node_id()
        group = self._ray.util.placement_group(
            [_resources(bundle) for bundle in wanted.bundles],
            strategy=wanted.place.replace("-", "_").upper(),
            bundle_label_selector=[labels] * len(wanted.bundles) if labels else None,
        )
        self._groups.add(group)
        return group

    async def _settle(self, wanted: PlacementGroup, group: Any, deadline: float) -> None:
        """`group.ready` would be simpler, but waits for a process of Ray's, too, which takes long on a busy machine."""
        while self._table(group)["state"] != "CREATED":
            if asyncio.get_running_loop().time() > deadline:
                self._release(group)
                machines = self.machines()
                why = hopeless(wanted, machines) or f"too little of it is free, within {self.config.patience:g} s"
                raise LaunchError(refusal(wanted, machines, why))
            await asyncio.sleep(_POLL)

    def _table(self, group: Any) -> Mapping[str, Any]:
        if self._closed:
            raise LaunchError("the cluster is closed")
        found: Mapping[str, Any] = self._ray.util.placement_group_table(group)
        return found

    async def take(self, spec: LaunchSpec) -> RayPlace:
        """A place on a node that lives: one that is free, or one more."""
        deadline = asyncio.get_running_loop().time() + self.config.patience
        free = self._free.setdefault(spec.pool, [])
        if not free:
            await self.find([lone_group(self.config, spec.pool)], deadline)
            return replace(self._free[spec.pool].pop(), lone=True)
        place = free.pop(next((i for i, place in enumerate(free) if self._stands(place)), 0))
        try:
            await self._until_it_stands(spec, place, deadline)
        except BaseException:
            self.give_back(place)
            raise
        return place

    async def _until_it_stands(self, spec: LaunchSpec, place: RayPlace, deadline: float) -> None:
        """Ray finds another node for a bundle whose node is gone."""
        while not self._stands(place):
            if asyncio.get_running_loop().time() > deadline:
                asked = replace(lone_group(self.config, place.pool), place=pool_of(self.config, place.pool).place)
                why = f"no place for {spec.name}, whose node is gone, within {self.config.patience:g} s"
                raise LaunchError(refusal(asked, self.machines(), why))
            await asyncio.sleep(_POLL)

    def _stands(self, place: RayPlace) -> bool:
        node = self._table(place.group)["bundles_to_node_id"].get(place.bundle)
        return any(each["NodeID"] == node and each["Alive"] for each in self._ray.nodes())

    def give_back(self, place: RayPlace) -> None:
        if place.lone:
            self._release(place.group)
        else:
            self._free[place.pool].insert(0, place)

    def close(self) -> None:
        """Nobody finds a place any more."""
        self._closed = True

    def release_all(self) -> None:
        for group in list(self._groups):
            self._release(group)

    def _release(self, group: Any) -> None:
        self._groups.discard(group)
        if self._ray.is_initialized():  # else Ray might start a cluster to ask
            with suppress(Exception):  # it is gone with the cluster
                self._ray.util.remove_placement_group(group)


def _supply(resources: Mapping[str, float]) -> Demand:
    return Demand(*(resources.get(name, 0.0) for name in ("CPU", "GPU", "memory")))


def _resources(bundle: Demand) -> dict[str, float]:
    asked = {"CPU": bundle.cpus, "GPU": bundle.gpus, "memory": float(int(bundle.memory))}
    return {name: value for name, value in asked.items() if value}
