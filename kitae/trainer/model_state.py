"""The state of models in a folder: one process writes one file, ranks write a shard each.

    state.safetensors    from one process
    sharded/             from ranks: a distributed checkpoint of torch

One process and any number of ranks can read either: each rank finds its parts by the tensors' names and by their place
in the whole tensors.
"""

import warnings
from collections.abc import Callable, Collection, Mapping, Set
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from kitae.errors import StoreError

FILE, FOLDER = "state.safetensors", "sharded"

Blank = Callable[[Collection[str]], dict[str, Tensor]]
"""Makes empty tensors, sharded or not, for a state with the given names."""


def save(state: Mapping[str, Tensor], folder: Path) -> None:
    """Save the state of one process."""
    save_file({name: tensor.cpu().contiguous() for name, tensor in state.items()}, folder / FILE)


def begin_save(state: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup) -> Callable[[], None]:
    """Start saving the state of all ranks. Returns as soon as the tensors are copied and may change.

    The function returned waits until the files are complete. All ranks must call both. group: must not be used for
    anything else meanwhile.
    """
    saving: Any = async_save(dict(state), checkpoint_id=folder / FOLDER, process_group=group)

    def wait() -> None:
        saving.result()

    return wait


def load(folder: Path, blank: Blank, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """The state saved in a folder, in tensors that `blank` makes. All ranks must call it; group None: one process."""
    if (folder / FOLDER).is_dir():
        return _load_shards(folder / FOLDER, blank, group)
    if not (folder / FILE).is_file():
        raise StoreError(f"{folder} must hold {FILE} or {FOLDER}/, got neither: another version of Kitae has saved it")
    return _load_file(folder / FILE, blank)


def _load_shards(folder: Path, blank: Blank, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    state = _blank(folder, FileSystemReader(folder).read_metadata().state_dict_metadata.keys(), blank)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended: there is one process
        read(state, checkpoint_id=folder, process_group=group, no_dist=group is None)
    return state


def _load_file(file: Path, blank: Blank) -> dict[str, Tensor]:
    with safe_open(file, framework="pt") as saved:
        state = _blank(file, {*saved.keys()}, blank)
        for name, tensor in state.items():
            if isinstance(tensor, DTensor):
                tensor.to_local().copy_(saved.get_slice(name)[_place(tensor)])
            else:
                tensor.copy_(saved.get_tensor(name))
    return state


def _blank(source: Path, names: Set[str], blank: Blank) -> dict[str, Tensor]:
    state = blank(names)
    if missing := sorted(names ^ state.keys()):
        raise StoreError(
            f"{source} must hold what is trained and nothing else, but differs in {missing[0]} and {len(missing) - 1} "
            f"others"
        )
    return state


def _place(tensor: DTensor) -> tuple[slice, ...]:
    """Where this rank's part lies in the whole tensor."""
    sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
