"""What threads of the processor work with: memory that stays in the process, weights side by side, OpenMP threads.

By default the C library gives every large block back to the system as soon as it is freed, and the next training step
takes the same gigabytes again, page fault by page fault: a quarter of the step's time on a small CPU.

Each thread that computes also gets a team of OpenMP threads and keeps it. While there are more of them than cores, the
threads of all teams sleep between any two kernels, even if only one team works: waking them up took a seventh of a
training step on two cores. So a thread that is going to wait dismisses its team first; its next kernel makes another.
"""

import ctypes
import functools
import gc
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from kitae.kernels.adamw import Rest

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8  # malloc.h
_MASTER = "kitae_master"  # goes with the parameter, and is gone with it


@functools.cache
def keep_freed_memory() -> bool:
    """Make glibc reuse large blocks instead of returning them to the system. With other C libraries nothing happens."""
    if not _is_glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = {
        _M_MMAP_THRESHOLD: 32 * 2**20,  # the largest it accepts
        _M_TRIM_THRESHOLD: 2**31 - 1,
        _M_TOP_PAD: 256 * 2**20,
        _M_ARENA_MAX: 1,  # the arenas of other threads cannot grow large blocks
    }
    return all(mallopt(name, value) for name, value in settings.items())


@contextmanager
def gc_frozen() -> "Iterator[None]":
    """A context in which the garbage collector ignores all objects that existed before it.

    With models loaded, one full collection would stop all threads for a quarter of a second or more, the engine's too.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _is_glibc() -> bool:
    return platform.system() == "Linux" and platform.libc_ver()[0] == "glibc"


def return_freed_memory() -> None:
    """Return free memory to the system, also between blocks in use: the next user may need blocks of other sizes."""
    if _is_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def give_back(tensor: "Tensor") -> None:
    """Free the memory of a tensor and of its views; nobody may read them before `take_again`."""
    tensor.untyped_storage().resize_(0)


def take_again(tensor: "Tensor") -> None:
    """Allocate memory for a tensor whose own was freed by `give_back`; its contents are undefined."""
    if not tensor.untyped_storage().nbytes():
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())


def together(parameters: "Sequence[Tensor]") -> "Tensor | None":
    """A view of the tensors, one after the other along the first dimension, if they lie so in memory."""
    first = parameters[0].detach()
    ends = [p.data_ptr() + p.numel() * p.element_size() for p in parameters]
    if any(p.data_ptr() != end for p, end in zip(parameters[1:], ends, strict=False)):
        return None
    rows = sum(len(p) for p in parameters)
    end = (first.storage_offset() + rows * first[0].numel()) * first.element_size()
    if end > first.untyped_storage().nbytes():
        return None
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def joined(parameters: "Sequence[Tensor]") -> "Tensor":
    """The tensors joined along the first dimension: a view if they lie so in memory, else a copy."""
    import torch

    view = together(parameters)
    return torch.cat([p.detach() for p in parameters]) if view is None else view


def lay_together(parameters: "Sequence[Tensor]") -> "Tensor":
    """Move parameters into one tensor and make them views of it, unless they are already."""
    import torch

    whole = joined(parameters)
    if whole.data_ptr() != parameters[0].data_ptr():
        for p, place in zip(parameters, torch.split(whole, [len(p) for p in parameters]), strict=True):
            p.data = place
    return whole


def set_master(parameter: "Tensor", master: "Tensor | Rest") -> None:
    """Let kernels add gradients of the parameter directly to the gradient of its fp32 master from now on.

    The master is on the same device; the parameter may be its own master.
    """
    vars(parameter)[_MASTER] = None if master is parameter else master  # a tensor that knows itself is freed late


def _master_of(parameter: "Tensor") -> "Tensor | Rest":
    return parameter if vars(parameter)[_MASTER] is None else vars(parameter)[_MASTER]


def has_master(parameter: "Tensor") -> bool:
    return _MASTER in vars(parameter)


def keep(ctx: Any, *tensors: "Tensor | None") -> None:
    """Save tensors for the backward pass of an autograd function, which reads them with `kept`."""
    ctx.save_for_backward(*tensors)
    ctx.with_masters = {i: t for i, t in enumerate(tensors) if t is not None and has_master(t)}


def kept(ctx: Any) -> "list[Tensor]":
    """The tensors that `keep` saved. Parameters with a master are the very same objects.

    Where activations are recomputed, torch would return other tensors in their place, which have no master.
    """
    import torch

    if torch.is_grad_enabled():
        raise RuntimeError("fused modules have no second derivative (create_graph = True), model.plain = true has")
    return [ctx.with_masters.get(i, t) for i, t in enumerate(ctx.saved_tensors)]


def gradient_of(parameter: "Tensor") -> "Tensor | None":
    """The fp32 gradient of the parameter's master, to be added to in place; None: it has no master."""
    import torch

    if not has_master(parameter):
        return None
    master = _master_of(parameter)
    if master.grad is None:
        master.grad = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
    return master.grad


def gradient_over(parameters: "Sequence[Tensor]") -> "tuple[Tensor, bool] | None":
    """The fp32 gradients of the parameters' masters as one tensor along the first dimension, and whether it is filled.

    None if a parameter has no master or does not learn, or if the gradients do not lie next to each other.
    """
    import torch

    if not all(has_master(p) and p.requires_grad for p in parameters):
        return None
    masters = [_master_of(p) for p in parameters]
    if all(m.grad is None for m in masters):
        rows, first = [len(p) for p in parameters], parameters[0]
        whole = torch.empty(sum(rows), *first.shape[1:], dtype=torch.float32, device=first.device)
        for master, part in zip(masters, torch.split(whole, rows), strict=True):
            master.grad = part
        return whole, False
    lying = together([g for p in parameters if (g := gradient_of(p)) is not None])
    return None if lying is None else (lying, True)


def add_gradient(parameter: "Tensor", part: "Tensor") -> "Tensor | None":
    """The gradient of a parameter for autograd; None if it has been added to that of the parameter's master."""
    into = gradient_of(parameter)
    if into is None:
        return part.to(parameter.dtype)
    into += part
    return None


_HARD = 2  # omp_pause_hard of omp.h


def dismiss_team() -> None:
    """End the threads that help the calling one; nothing happens where there are none."""
    _pause()(_HARD)


@functools.cache
def _pause() -> Callable[[int], Any]:
    """The function of the runtime that torch has loaded, which Kitae's kernels use too; older runtimes lack it."""
    import torch

    library = ctypes.CDLL(torch._C.__file__)
    return getattr(library, "omp_pause_resource_all", lambda _: None)
