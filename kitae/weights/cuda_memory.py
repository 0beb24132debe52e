"""Memory of a CUDA device that other processes can open, by the driver itself.

The allocator of torch can share its blocks too, but each handle once, and counts who has let go of it; a handle of our
own can be opened by any number of engines, whenever they come.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from kitae.errors import EngineError

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
    """How torch is told of memory that is not its own."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 3}
