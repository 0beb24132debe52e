"""Weights through the memory of a GPU: from the trainer's process to engines' processes on the same machine.

The image is one piece of memory on the publisher's device, beside the allocator of torch. Receivers open it once, by a
handle that the publisher gives them by HTTP, and copy from device to device: nothing goes through the host but the sums
of blocks for the checksums. The trainer's own tensors are not shared: it may change them while engines still copy.

There is no delta: looking for what changed costs more than copying everything. The device holds the weights once more.

The memory is opened by the CUDA driver itself. The allocator of torch can share its blocks too, but each handle once,
and counts who has let go of it; a handle of our own can be opened by any number of engines, whenever they come.
"""

import ctypes
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch import Tensor

from kitae.errors import EngineError
from kitae.weights.base import Address, Bucket, Manifest, Mode
from kitae.weights.bucket_server import ChunkServer, Shop
from kitae.weights.http_transport import Downloads, Haste
from kitae.weights.layout import LIMIT, starts
from kitae.weights.publisher import BucketPublisher
from kitae.weights.receiver import PullReceiver


class DeviceMemory(Protocol):
    """Memory of a device that another process can open by its handle. `synchronize` waits for all work on it."""

    device: torch.device

    def allocate(self, size: int) -> tuple[Tensor, str]: ...
    def free(self, data: Tensor) -> None: ...
    def open(self, handle: str, size: int) -> Tensor: ...
    def close(self, data: Tensor) -> None: ...
    def synchronize(self) -> None: ...


class IpcPublisher(BucketPublisher, Shop):
    """A `BucketPublisher` over memory of the current CUDA device. `close` it after the engines that fetch from it.

    memory: another one, which the receivers must have too.
    """

    bucket_store: "_DeviceBuckets"

    def __init__(self, mode: Mode = "full", *, memory: DeviceMemory | None = None, limit: int = LIMIT) -> None:
        if mode != "full":
            raise EngineError(f"weights by ipc are always sent in full: the mode must be 'full', got {mode!r}")
        super().__init__(_DeviceBuckets(memory or CudaMemory()), mode, limit=limit)
        self._secret = secrets.token_urlsafe(32)
        self._server = ChunkServer(self, self._secret)

    @property
    def address(self) -> Address:
        url = f"http://127.0.0.1:{self._server.port}"
        return Address("ipc", {"source": url, "secret": self._secret, "haste": asdict(Haste(connections=1))})

    def close(self) -> None:
        self._server.close()
        super().close()

    def call(self, member: str, what: str, body: dict[str, Any]) -> dict[str, Any] | None:
        return {"handle": self.bucket_store.handle, "size": len(self.bucket_store.image)} if what == "handle" else None


class _DeviceBuckets:
    """Implements `kitae.weights.publisher.BucketStore`: buckets that follow each other and are written in place."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.device = memory.device
        self.image = torch.empty(0, dtype=torch.uint8)
        self.handle = ""
        self._memory = memory
        self._sizes: Sequence[int] = ()
        self._starts: tuple[int, ...] = ()

    def reserve(self, sizes: Sequence[int]) -> None:
        self._sizes, self._starts = sizes, starts(sizes)
        self.image, self.handle = self._memory.allocate(max(1, self._starts[-1]))

    def read(self, number: int) -> Tensor:
        return self.image[self._starts[number] : self._starts[number] + self._sizes[number]]

    def draft(self, number: int, *, anew: bool) -> Tensor:
        return self.read(number)

    def put(self, number: int, bucket: Bucket) -> None:
        pass

    def put_delta(self, buckets: Sequence[Bucket], data: Sequence[Tensor]) -> None:
        assert not buckets

    def announce(self, manifest: Manifest) -> None:
        self._memory.synchronize()  # nobody reads what is half written

    def close(self) -> None:
        if self.handle:
            image, self.image = self.image, torch.empty(0, dtype=torch.uint8)
            self._memory.free(image)


class IpcReceiver(PullReceiver):
    """From the memory of an `IpcPublisher`, which it opens when it first fetches."""

    @classmethod
    def at(cls, address: Address, parameters: Mapping[str, Tensor]) -> "IpcReceiver":
        found = next((p.device for p in parameters.values() if p.is_cuda), None)
        return cls(address, parameters, CudaMemory(found))

    def __init__(self, address: Address, parameters: Mapping[str, Tensor], memory: DeviceMemory) -> None:
        settings = address.settings
        downloads = Downloads(settings["source"], settings["secret"], Haste(**settings["haste"]))
        super().__init__(_DeviceReader(downloads, memory), parameters)


class _DeviceReader:
    def __init__(self, downloads: Downloads, memory: DeviceMemory) -> None:
        self._downloads = downloads
        self._memory = memory
        self._image: Tensor | None = None

    def image(self, manifest: Manifest, wanted: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        begin = starts([bucket.bytes for bucket in manifest.buckets])
        image = self._open()
        for number in wanted:
            yield number, image[begin[number] : begin[number] + manifest.buckets[number].bytes]
        self._memory.synchronize()  # the publisher may write again

    def delta(self, manifest: Manifest) -> Iterator[tuple[int, Tensor]]:
        return iter(())  # never published

    def close(self) -> None:
        self._downloads.close()
        if self._image is not None:
            image, self._image = self._image, None
            self._memory.close(image)

    def _open(self) -> Tensor:
        if self._image is None:
            found = self._downloads.post("/handle", {})
            if found is None:
                raise EngineError("the publisher of weights by ipc does not answer")
            self._image = self._memory.open(found["handle"], found["size"])
        return self._image


_PEERS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: also from another device of the machine


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


class CudaMemory:
    """Implements `kitae.weights.ipc.DeviceMemory`. device: None: the current one."""

    def __init__(self, device: torch.device | None = None) -> None:
        if not torch.cuda.is_available():
            raise EngineError("weights by ipc need a CUDA device, and this process has none")
        index = None if device is None else device.index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._context = ctypes.c_void_p()
        self._call("cuInit", ctypes.c_uint(0), enter=False)
        number = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(self.device.index), enter=False)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number, enter=False)  # that of torch

    def allocate(self, size: int) -> tuple[Tensor, str]:
        pointer, handle = ctypes.c_uint64(), _Handle()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
        return self._tensor(pointer, size), bytes(handle.bytes).hex()

    def free(self, data: Tensor) -> None:
        self.synchronize()
        self._call("cuMemFree_v2", ctypes.c_uint64(data.data_ptr()))

    def open(self, handle: str, size: int) -> Tensor:
        pointer, opened = ctypes.c_uint64(), _Handle((ctypes.c_ubyte * 64)(*bytes.fromhex(handle)))
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), opened, ctypes.c_uint(_PEERS))
        return self._tensor(pointer, size)

    def close(self, data: Tensor) -> None:
        self.synchronize()
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(data.data_ptr()))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def _tensor(self, pointer: ctypes.c_uint64, size: int) -> Tensor:
        return torch.as_tensor(_Bytes(pointer.value or 0, size), device=self.device)

    def _call(self, name: str, *arguments: Any, enter: bool = True) -> None:
        if enter:  # whichever thread this is
            self._call("cuCtxSetCurrent", self._context, enter=False)
        if status := getattr(self._driver, name)(*arguments):
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
            raise EngineError(f"{name} failed on {self.device}: {(text.value or b'?').decode()} ({status})")


class _Bytes:
    """The interface by which torch takes memory that is not its own."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 3}
