"""Ranks publish what they hold: nothing is gathered, and engines read from all of them."""

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from transport_rigs import same, through_json, zeros

from kitae.errors import EngineError
from kitae.trainer.collective_ops import Distributed, local
from kitae.weights.base import Address, Manifest
from kitae.weights.from_shards import address_of, merged, own_blocks, told
from kitae.weights.transports import make_publisher, make_receiver

RANKS = 4
LIMIT = 4096


def whole_weights(version: int) -> dict[str, Tensor]:
    """Rows that do not divide, fewer rows than ranks, columns, and what all ranks have."""
    shapes = {"embed": (97, 33), "few": (3, 5), "wide": (64, 64), "norm": (7,)}
    made = {n: torch.randn(s, generator=torch.Generator().manual_seed(7)).bfloat16() for n, s in shapes.items()}
    for tensor in made.values():
        tensor.view(-1)[: 2 * version] += version
    return made


def publish_and_fetch(kind: str, mode: str, folder: Path) -> list[dict[str, Any]]:
    """What each rank published; rank 0 is an engine too."""
    group = dist.new_group(backend="gloo")
    ranks = Distributed(torch.device("cpu"), group, group)
    mesh = init_device_mesh("cpu", (RANKS,))
    at = {"folder": str(folder / f"rank-{ranks.rank}")} if kind == "file" else {}
    publisher = make_publisher(kind, mode, limit=LIMIT, **at)  # type: ignore[arg-type]

    def shards(version: int) -> dict[str, Tensor]:
        cut = {"embed": Shard(0), "few": Shard(0), "wide": Shard(1)}
        tensors = whole_weights(version)
        return {n: distribute_tensor(t, mesh, [cut[n]]) if n in cut else t for n, t in tensors.items()}

    blocks = own_blocks(shards(0), ranks)
    own = {"address": asdict(publisher.address), "blocks": told(blocks, shards(0))}
    address = address_of(json.loads(json.dumps(ranks.everyone(own))))
    loaded = zeros(whole_weights(0))
    receiver = make_receiver(address, loaded) if ranks.rank == 0 else None
    found: list[dict[str, Any]] = []
    for version in range(3):
        mine = shards(version)
        with CommDebugMode() as seen:
            manifest = publisher.publish(version, {name: local(mine[name]) for name in blocks})
        manifests = ranks.everyone(manifest)
        if receiver is not None:
            assert receiver.fetch(through_json(merged(manifests))) == ()
            assert same(whole_weights(version), loaded), version
        sent = {"names": sorted(blocks), "bytes": manifest.bytes, "gathered": seen.get_total_counts()}
        found = ranks.everyone({**sent, "mode": merged(manifests).mode})
    if receiver is not None:
        receiver.close()
    dist.barrier(group)
    publisher.close()
    return found


@pytest.mark.parametrize(("kind", "mode"), [("http", "full"), ("memory", "delta"), ("file", "delta")])
def test_each_rank_sends_its_part_and_receives_nothing(kind: str, mode: str, tmp_path: Path) -> None:
    size = sum(tensor.nbytes for tensor in whole_weights(0).values())
    found = on_ranks(tmp_path, publish_and_fetch, kind, mode, tmp_path, size=RANKS)
    assert all(each["gathered"] == 0 for each in found)
    assert [("norm" in each["names"], "few" in each["names"]) for each in found] == [
        (True, True), (False, True), (False, True), (False, False),
    ], "what all have is published once, and nothing where there is nothing"  # fmt: skip
    if mode == "full":
        assert sum(each["bytes"] for each in found) == size
        assert all(each["bytes"] == pytest.approx(size / RANKS, rel=0.05) for each in found)
    else:
        assert found[0]["mode"] == "delta" and sum(each["bytes"] for each in found) < size / 4


def shard_of(version: int, name: str, publisher: Any) -> Manifest:
    found: Manifest = publisher.publish(version, {name: whole_weights(version)[name]})
    return found


def test_what_does_not_fit_changes_nothing() -> None:
    tensors = whole_weights(0)
    publishers = [make_publisher("http", "full") for _ in range(2)]
    origins = [
        {
            "address": asdict(each.address),
            "blocks": {name: [[*tensors[name].shape], [[0, n] for n in tensors[name].shape]]},
        }
        for each, name in zip(publishers, ("embed", "wide"), strict=True)
    ]
    loaded = zeros(tensors)
    receiver = make_receiver(address_of(origins), loaded)
    first, second = map(partial(shard_of, 0), ("embed", "wide"), publishers)
    wrong = replace(second, entries=(replace(second.entries[0], name="unknown"), *second.entries[1:]))
    with pytest.raises(EngineError, match="names an unknown parameter 'unknown'"):
        receiver.fetch(merged([first, wrong]))
    with pytest.raises(EngineError, match="must come from 2 publishers, got 1"):
        receiver.fetch(merged([first]))
    assert all(not tensor.any() for tensor in loaded.values())
    broken = replace(second, buckets=(replace(second.buckets[0], checksum=1), *second.buckets[1:]))
    assert receiver.fetch(merged([first, broken])) == (len(first.buckets),)
    assert receiver.fetch(merged([first, second])) == () and torch.equal(loaded["wide"], tensors["wide"])
    for name, wanted, message in (
        ("other", [3], "unknown parameter 'other'"),
        ("norm", [8], r"must have shape \(7,\)"),
    ):
        bad = {"address": origins[0]["address"], "blocks": {name: [wanted, [[0, 3]]]}}
        with pytest.raises(EngineError, match=message):
            make_receiver(Address("shards", {"origins": [bad]}), loaded)
    receiver.close()
    for each in publishers:
        each.close()
