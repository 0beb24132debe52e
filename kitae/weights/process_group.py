"""A process group of torch.distributed made for the occasion, apart from that of the trainer's ranks."""

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

Backend = Literal["gloo", "nccl"]


class BroadcastGroup:
    """Rank 0 sends, the others receive. Nothing here waits longer than `deadline` seconds: what takes longer, as what
    fails because another has, is a RuntimeError, and then the group is of no more use."""

    def __init__(self, key: str, group: Any, backend: Backend, deadline: float) -> None:
        self.key = key
        self._group = group
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        self._deadline = timedelta(seconds=deadline)

    @classmethod
    def make(
        cls, store: Store, key: str, rank: int, size: int, *, backend: Backend, deadline: float
    ) -> "BroadcastGroup":
        """Meet the others: all of them must, with the same key."""
        made: list[BroadcastGroup | Exception] = []

        def meet() -> None:
            try:
                here = isinstance(store, TCPStore) and store.host.startswith("127.")
                group = _make_group(PrefixStore(key, store), rank, size, backend, deadline, here)
                made.append(cls(key, group, backend, deadline))
            except Exception as error:
                made.append(error)

        # Gloo tries several times for as long: a thread that is left behind ends by itself.
        thread = threading.Thread(target=meet, name="broadcast group", daemon=True)
        thread.start()
        thread.join(deadline)
        if not made:
            raise RuntimeError(f"the {size} processes of a broadcast did not meet within {deadline:g} s")
        if isinstance(made[0], Exception):
            raise RuntimeError(f"the {size} processes of a broadcast did not meet: {made[0]}") from made[0]
        return made[0]

    def send(self, data: Tensor) -> None:
        self._broadcast(data.to(self._device))

    def receive(self, size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        data = torch.empty(size, dtype=dtype, device=self._device)
        self._broadcast(data)
        return data

    def close(self) -> None:
        """The others notice."""
        with suppress(RuntimeError):
            self._group.abort()

    def _broadcast(self, data: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._deadline
        self._group.broadcast([data], options).wait(self._deadline)
        if data.is_cuda:
            torch.cuda.current_stream(data.device).synchronize()


def choose_backend(gpus: Sequence[str], wanted: Backend | Literal["auto"]) -> Backend:
    """gpus: of each member; "": it has none. `choose_backend(["GPU-1a", "GPU-2b"], "auto")` is "nccl"."""
    if wanted != "auto":
        return wanted
    return "nccl" if all(gpus) and len(set(gpus)) == len(gpus) else "gloo"


def gpu_name(device: torch.device) -> str:
    """Names a GPU among those of all machines; "": the device is none."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def current_device() -> torch.device:
    """What this process computes on."""
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.device("cuda", torch.cuda.current_device()) if in_use else torch.device("cpu")


def host_store(host: str, deadline: float) -> TCPStore:
    """Where the members of groups meet; it ends with its owner. It listens on this address alone: torch by itself
    listens on all that the machine has, and asks nobody for a secret."""
    taken = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port, patience = taken.getsockname()[1], timedelta(seconds=deadline)
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=patience, master_listen_fd=taken.detach()
    )


def join_store(host: str, port: int, deadline: float) -> TCPStore:
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=deadline))


def _make_group(store: Store, rank: int, size: int, backend: Backend, deadline: float, here: bool) -> Any:
    """torch's own types do not know the methods that both have. here: all members are on this machine."""
    if backend == "gloo" and here:
        gloo: Any = dist.ProcessGroupGloo
        wanted = gloo._Options()
        wanted._devices, wanted._timeout = [gloo.create_device(hostname="127.0.0.1")], timedelta(seconds=deadline)
        return gloo(store, rank, size, wanted)
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=deadline))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=deadline)
    return dist.ProcessGroupNCCL(store, rank, size, options)
