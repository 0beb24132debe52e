"""What pools ask for, and why machines cannot give it."""

from typing import Any

import pytest

from kitae.workers.backends import counts_of
from kitae.workers.config import ClusterConfig
from kitae.workers.demand import Demand, Supplier, groups_of, hopeless, refusal, with_gpus

SMALL = Demand(2, 0, 8e9)
THREE = [
    Supplier("a", SMALL, SMALL, {"zone": "1"}),
    Supplier("b", SMALL, SMALL, {"zone": "2"}),
    Supplier("c", Demand(8, 1, 64e9), Demand(1, 1, 64e9), {"zone": "2", "accelerator": "h200"}),
]


def cluster(counts: tuple[int, int, int], **pools: dict[str, object]) -> ClusterConfig:
    """counts: ranks, engines, verifiers."""
    ranks, _, verifiers = counts
    return ClusterConfig.model_validate({"backend": "ray", "ranks": ranks, "verifiers": verifiers, "pools": pools})


def groups(config: ClusterConfig, engines: int) -> list[tuple[str, tuple[Demand, ...], dict[str, tuple[int, ...]]]]:
    return [(r.name, r.bundles, dict(r.slots)) for r in groups_of(config, counts_of(config, engines))]


def test_split_pools_have_a_group_each() -> None:
    config = cluster((2, 1, 1), trainer={"gpus": 1}, verifiers={"cpus": 4, "memory_gb": 2})
    assert groups(config, 1) == [
        ("trainer", (Demand(1, 1),) * 2, {"trainer": (0, 1)}),
        ("engines", (Demand(1),), {"engines": (0,)}),
        ("verifiers", (Demand(4, 0, 2e9),), {"verifiers": (0,)}),
    ]


def test_colocated_pools_share_bundles() -> None:
    both = {
        "trainer": {"gpus": 0.5, "cpus": 2},
        "engines": {"gpus": 0.5, "colocate_with": "trainer", "labels": {"a": "b"}},
    }
    assert groups(cluster((2, 3, 0), **both), 3) == [
        ("trainer", (Demand(4, 1.5), Demand(3, 1)), {"trainer": (0, 1), "engines": (0, 1, 0)})
    ]


def test_beside_what_is_in_the_controllers_process_is_on_its_machine() -> None:
    (group,) = groups_of(cluster((1, 2, 0), engines={"colocate_with": "trainer"}), {"engines": 2})
    assert group.here and group.name == "engines"


def test_a_bundle_asks_for_something() -> None:
    assert groups(cluster((2, 0, 0), trainer={"cpus": 0}), 0)[0][1] == (Demand(0.001),) * 2


@pytest.mark.parametrize(
    ("pool", "count", "why"),
    [
        ({"cpus": 16}, 1, "no machine has 16 CPUs, 0 GPUs"),
        ({"gpus": 2}, 1, "no machine has 1 CPUs, 2 GPUs"),
        ({"gpus": 1}, 2, "all machines together have 1 × (1 CPUs, 1 GPUs), needed are 2"),
        ({"cpus": 2}, 7, "all machines together have 6 × (2 CPUs, 0 GPUs), needed are 7"),
        ({"memory_gb": 65}, 1, "no machine has 1 CPUs, 0 GPUs, 65 GB"),
        ({"labels": {"accelerator": "b200"}}, 1, "no machine has the labels accelerator=b200"),
        ({"labels": {"zone": "2"}, "cpus": 9}, 1, "no machine with those labels has 9 CPUs, 0 GPUs"),
        ({"place": "strict-spread"}, 4, "place = 'strict-spread' asks for 4 machines, 3 of 3 have 1 CPUs, 0 GPUs"),
        ({"place": "strict-spread", "cpus": 4}, 2, "asks for 2 machines, 1 of 3 have 4 CPUs, 0 GPUs"),
        ({"place": "strict-pack", "cpus": 3}, 3, "no one machine has 3 × (3 CPUs, 0 GPUs), which place"),
    ],
)
def test_hopeless(pool: dict[str, object], count: int, why: str) -> None:
    (group,) = groups_of(cluster((1, count, 0), engines=pool), {"engines": count})
    assert why in hopeless(group, THREE)


@pytest.mark.parametrize(
    ("pool", "count"),
    [
        ({"gpus": 0.5}, 2),
        ({"cpus": 2}, 6),
        ({"labels": {"zone": "2"}}, 10),
        ({"place": "strict-spread"}, 3),
        ({"place": "strict-pack"}, 8),
        ({"cpus": 0.1}, 120),
    ],
)
def test_not_hopeless(pool: dict[str, object], count: int) -> None:
    (group,) = groups_of(cluster((1, count, 0), engines=pool), {"engines": count})
    assert hopeless(group, THREE) == ""


def test_a_refusal_names_demand_and_supply() -> None:
    (group,) = groups_of(cluster((1, 2, 0), engines={"gpus": 1, "labels": {"zone": "9"}}), {"engines": 2})
    assert refusal(group, THREE, hopeless(group, THREE)) == (
        "the cluster cannot give what is asked for: no machine has the labels zone=9\n"
        "demand\n"
        "  cluster.pools.engines (2 processes): 2 × (1 CPUs, 1 GPUs), place = 'pack', labels zone=9\n"
        "supply\n"
        "  a: 2 CPUs, 0 GPUs, 8 GB; labels zone=1\n"
        "  b: 2 CPUs, 0 GPUs, 8 GB; labels zone=2\n"
        "  c: 8 CPUs, 1 GPUs, 64 GB (free: 1 CPUs, 1 GPUs, 64 GB); labels zone=2, accelerator=h200"
    )


def test_pools_that_are_colocated_with_each_other() -> None:
    with pytest.raises(
        ValueError, match="must be a pool with places of its own, got 'engines', which shares those of another"
    ):
        cluster((2, 2, 2), engines={"colocate_with": "trainer"}, verifiers={"colocate_with": "engines"})


def test_on_other_machines_a_trainer_is_always_one_of_them() -> None:
    assert counts_of(cluster((1, 2, 3)), 2) == {"trainer": 1, "engines": 2, "verifiers": 3}
    assert counts_of(ClusterConfig(backend="local"), 1)["trainer"] == 0


def gpus(counts: tuple[int, int, int], there: int, device: str = "auto", *, fixed: bool = True, **pools: Any) -> Any:
    config = cluster(counts, **pools)
    machines = [Supplier("a", Demand(64, there), Demand(64, there))]
    found = with_gpus(config, counts_of(config, counts[1]), device, machines, fixed=fixed).pools
    return found["trainer"].gpus, found["engines"].gpus, found["verifiers"].gpus if "verifiers" in found else None


@pytest.mark.parametrize(
    ("found", "each"),
    [
        (gpus((2, 4, 1), 8), (1, 1, None)),
        (gpus((2, 4, 1), 0), (0, 0, None)),
        (gpus((2, 4, 1), 0, "cuda"), (1, 1, None)),
        (gpus((2, 4, 1), 8, "cpu"), (0, 0, None)),
        (gpus((2, 2, 1), 1), (0.25, 0.25, None)),
        (gpus((2, 2, 1), 3), (0.5, 0.5, None)),
        (gpus((2, 2, 1), 1, fixed=False), (1, 1, None)),  # more machines may come
        (gpus((4, 4, 0), 4, engines={"colocate_with": "trainer"}), (0.5, 0.5, None)),
        (gpus((2, 4, 0), 2, engines={"colocate_with": "trainer"}), (pytest.approx(1 / 3), pytest.approx(1 / 3), None)),
        (gpus((2, 2, 1), 8, engines={"gpus": 2}, verifiers={"gpus": 1}), (1, 2, 1)),
    ],
)
def test_gpus_that_are_left_open(found: tuple[float, ...], each: tuple[float, ...]) -> None:
    """One for a rank and an engine where there are GPUs; what is colocated shares one."""
    assert found == each
