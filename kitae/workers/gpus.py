"""Which GPU each worker process on this machine computes on.

A process gets its GPUs by `CUDA_VISIBLE_DEVICES`, as those of Ray do: the GPU that comes first there is the one that
`cuda` means in it. The others stay visible, so that a process may read weights from the memory of another GPU.
"""

import os
from collections.abc import Mapping, Sequence

VISIBLE = "CUDA_VISIBLE_DEVICES"
COMPUTING = ("trainer", "engines")  # pools whose processes hold a model


class GpuShares:
    """Hands out the GPUs in turn: each process gets the one that the fewest others have.

    `GpuShares(["0", "1"], device="auto", led=True)`: the first process gets GPU 1. gpus: those of this process. device:
    `model.device`; one that is named by its number is that of all processes, and none is handed out. led: this process
    computes on its first GPU itself.
    """

    def __init__(self, gpus: Sequence[str], device: str = "auto", *, led: bool = False) -> None:
        self._users = dict.fromkeys(gpus if device in ("auto", "cuda") else (), 0)
        if led and self._users:
            self._users[gpus[0]] = 1

    def take(self) -> str:
        """The GPU of one more process; "": there is none to hand out."""
        if not self._users:
            return ""
        gpu = min(self._users, key=self._users.__getitem__)
        self._users[gpu] += 1
        return gpu

    def give_back(self, gpu: str) -> None:
        if gpu:
            self._users[gpu] -= 1

    def environment(self, gpu: str) -> Mapping[str, str]:
        """Of a process that has this GPU."""
        return {VISIBLE: ",".join([gpu, *(other for other in self._users if other != gpu)])} if gpu else {}


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, by the names that the environment has for them."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get(VISIBLE, "")
    return named.split(",")[:count] if named else [str(number) for number in range(count)]
