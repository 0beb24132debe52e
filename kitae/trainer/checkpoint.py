"""The state of sharded models in a folder: every rank writes its shards, and any number of ranks can read them.

torch's distributed checkpoints. Tensors are found by name and place in the whole, so two ranks may go on from what four
have saved, and one process without any group too.
"""

import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.state_dict_saver import async_save

from kitae.errors import StoreError

FOLDER = "sharded"


def begin_save(state: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup) -> Callable[[], None]:
    """Returns when all is copied, so that the tensors may change; what it returns waits until the files are complete.

    All ranks must call both. group: nobody else may use it meanwhile.
    """
    saving: Any = async_save(dict(state), checkpoint_id=folder, process_group=group)

    def wait() -> None:
        saving.result()

    return wait


def load(
    folder: Path, blank: Callable[[Collection[str]], dict[str, Tensor]], group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """What `blank` makes for the names that were saved, filled. All ranks must call it; group None: there is one."""
    names = FileSystemReader(folder).read_metadata().state_dict_metadata.keys()
    state = blank(names)
    if missing := sorted(names ^ state.keys()):
        raise StoreError(
            f"{folder} must hold what is trained and nothing else, but differs in {missing[0]} and {len(missing) - 1} "
            f"others"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is meant
        read(state, checkpoint_id=folder, process_group=group, no_dist=group is None)
    return state
