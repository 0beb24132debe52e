"""Weights through the memory of a device: the rules that need none. The rest is in tests/gpu."""

import pytest
import torch
from transport_rigs import HostMemory, weights, zeros

from kitae.errors import EngineError
from kitae.weights.ipc import CudaMemory, IpcPublisher, IpcReceiver


def test_there_is_no_delta() -> None:
    with pytest.raises(
        EngineError, match="weights by ipc are always sent in full: the mode must be 'full', got 'delta'"
    ):
        IpcPublisher("delta", memory=HostMemory())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_there_must_be_a_device() -> None:
    with pytest.raises(EngineError, match="weights by ipc need a CUDA device, and this process has none"):
        CudaMemory()


def test_the_memory_is_opened_once_and_closed_at_the_end() -> None:
    opened, closed = [], []

    class Counting(HostMemory):
        def open(self, handle: str, size: int) -> torch.Tensor:
            opened.append(handle)
            return super().open(handle, size)

        def close(self, data: torch.Tensor) -> None:
            closed.append(len(data))

    memory, source = HostMemory(), weights()
    publisher = IpcPublisher(memory=memory, limit=1024)
    receiver = IpcReceiver(publisher.address, zeros(source), Counting())
    for version in range(3):
        assert receiver.fetch(publisher.publish(version, source)) == ()
    assert opened == [str(memory.path)] and not closed
    receiver.close()
    publisher.close()
    assert len(closed) == 1 and not memory.path.exists()


def test_a_publisher_that_is_gone() -> None:
    source = weights()
    publisher = IpcPublisher(memory=HostMemory())
    manifest = publisher.publish(0, source)
    receiver = IpcReceiver(publisher.address, zeros(source), HostMemory())
    publisher.close()
    with pytest.raises(EngineError, match="the publisher of weights by ipc does not answer"):
        receiver.fetch(manifest)
    receiver.close()
