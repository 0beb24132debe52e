"""Sharded tensors are published like others, one after the other."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transport_rigs import change, same, weights, zeros

from kitae.models.whole import walk, whole
from kitae.weights import publisher as publisher_module
from kitae.weights.http_transport import HttpPublisher, HttpReceiver


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_shards_arrive_as_the_tensors_they_are_of(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    source = {name: tensor for name, tensor in weights().items() if tensor.dim()}
    asked: list[tuple[int, ...]] = []

    def noted(tensor: Tensor) -> Tensor:
        assert isinstance(tensor, DTensor)
        asked.append(tuple(tensor.shape))
        return whole(tensor)

    monkeypatch.setattr(publisher_module, "whole", noted)
    publisher, loaded = HttpPublisher("delta", limit=1024), zeros(source)
    receiver = HttpReceiver.at(publisher.address, loaded)
    for version in range(3):
        shards = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in source.items()}
        manifest = publisher.publish(version, shards)
        assert receiver.fetch(manifest) == () and same(source, loaded)
        assert manifest.mode == ("delta" if version else "full")
        change(source)
    assert asked == [tuple(tensor.shape) for tensor in source.values()] * 3, (
        "once each, in order: other ranks walk along"
    )
    receiver.close()
    publisher.close()


def test_others_walk_along(mesh: DeviceMesh) -> None:
    tensor = torch.arange(6.0, requires_grad=True)
    assert whole(tensor).requires_grad is False and whole(tensor).data_ptr() == tensor.data_ptr()
    walk([tensor, distribute_tensor(tensor.detach(), mesh, [Shard(0)])])
