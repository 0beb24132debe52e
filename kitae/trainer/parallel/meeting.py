"""How ranks meet: which network interface they use, and which library adds up what they computed.

NCCL needs a GPU for each rank. Where ranks share one, as when a run is tried on a small machine, gloo moves what is on
the GPU through host memory (`HostGroup`); where they have none, it does all of it.
"""

import os
import socket
import struct
import sys
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from kitae.errors import TrainerError
from kitae.weights.process_group import choose_backend, gpu_name

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915  # asks Linux for the address of an interface
_HOST = "host"  # the name under which torch knows a `HostGroup`
_CALLS = (
    "allgather", "allreduce", "allreduce_coalesced", "alltoall", "barrier", "broadcast", "gather", "reduce_scatter",
    "scatter",
    *("all_gather_single", "all_gather_single_coalesced", "all_to_all_single"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("_allgather_base", "allgather_into_tensor_coalesced", "alltoall_base"),  # the same, as torch before 2.13 has them
    *("_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
)  # fmt: skip


class HostGroup(dist.ProcessGroup):
    """A process group that moves tensors of a GPU through host memory. resident: devices whose tensors gloo takes as
    they are."""

    resident: tuple[str, ...] = ("cpu",)

    def __init__(self, made: Any, options: Any) -> None:
        """made: what torch gives to those who make a backend for it."""
        super().__init__(made.group_rank, made.group_size)  # type: ignore[call-arg]
        self._name: str = made.group_id
        place = (made.store, made.group_rank, made.group_size)
        self._gloo: Any = dist.ProcessGroup(*place)
        gloo = dist.ProcessGroup.BackendType.GLOO
        self._gloo._set_default_backend(gloo)
        self._gloo._register_backend(torch.device("cpu"), gloo, dist.ProcessGroupGloo(*place, made.timeout))

    @property
    def group_name(self) -> Any:
        return self._name

    def getBackendName(self) -> str:
        return _HOST

    def _through_host(self, call: str, *arguments: Any) -> Any:
        copies: list[tuple[Tensor, Tensor]] = []

        def on_host(given: Any) -> Any:
            if isinstance(given, list | tuple):
                return [on_host(each) for each in given]
            if not isinstance(given, Tensor) or given.device.type in self.resident:
                return given
            copies.append((given, torch.empty(given.shape, dtype=given.dtype).copy_(given)))
            return copies[-1][1]

        work = getattr(self._gloo, call)(*map(on_host, arguments))
        if copies:
            work.wait()
            for own, copy in copies:
                own.detach().copy_(copy)
        return work


def _forwarded(call: str) -> Any:
    return lambda group, *arguments: group._through_host(call, *arguments)


for _call in _CALLS:  # those that this torch has
    if hasattr(dist.ProcessGroup, _call):
        setattr(HostGroup, _call, _forwarded(_call))
dist.Backend.register_backend(_HOST, HostGroup, extended_api=True, devices=["cpu", "cuda"])


def meet(
    setup: dict[str, Any], wanted: Literal["auto", "nccl", "gloo"], device: torch.device, own: str, patience: timedelta
) -> None:
    """Make torch's process group with the other ranks. setup: of a rank. own: the address of this machine that others
    can reach; "": they are on it."""
    if own and (interface := interface_of(own)):
        for variable in _INTERFACES:
            os.environ.setdefault(variable, interface)
    store = PrefixStore(setup["meeting"], TCPStore(setup["host"], setup["port"], is_master=False, timeout=patience))
    backend = _agree(store, setup["rank"], setup["size"], wanted, device)
    dist.init_process_group(backend, store=store, timeout=patience, world_size=setup["size"], rank=setup["rank"])


def _agree(store: "Store", rank: int, size: int, wanted: str, device: torch.device) -> str:
    """The first rank decides, when it knows the devices of all."""
    store.set(f"device/{rank}", gpu_name(device))
    if rank == 0:
        devices = [store.get(f"device/{each}").decode() for each in range(size)]
        store.set("backend", choose(devices, wanted))
    chosen = store.get("backend").decode()
    if chosen.startswith("!"):
        raise TrainerError(chosen[1:])
    return chosen


def choose(devices: list[str], wanted: str) -> str:
    """The backend of torch, or "!" and why there is none. devices: of each rank; "": it has no GPU.

    `choose(["GPU-1a", "GPU-2b"], "auto")` is "cpu:gloo,cuda:nccl".
    """
    without = [rank for rank, device in enumerate(devices) if not device]
    apart = choose_backend(devices, "auto") == "nccl"
    if without and len(without) < len(devices):
        return f"!all ranks must have a GPU or none, got {len(without)} of {len(devices)} without: rank {without[0]}"
    if wanted == "nccl" and not apart:
        got = "none" if without else f"{len(set(devices))} for {len(devices)} ranks"
        return f"!cluster.collectives = 'nccl' needs a GPU for each rank, got {got}"
    if without:
        return "gloo"
    return "cpu:gloo,cuda:nccl" if apart and wanted != "gloo" else _HOST


def interface_of(address: str) -> str:
    """The network interface that has this address; "": it cannot be found."""
    if sys.platform != "linux":
        return ""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                found = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return ""
