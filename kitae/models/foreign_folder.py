"""Models as other trainers leave them: verl's sharded checkpoints, and the output folder of a Trainer.

verl writes one file a rank, `model_world_size_N_rank_i.pt`, with a part of each tensor, and configuration and tokenizer
in `huggingface`. The parts know their place, so they are put together without processes or a network. They are read
as tensors alone, never as programs. The optimizer's state, which both keep, is left where it is.
"""

import json
import logging
import re
import shutil
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitae.errors import ModelError
from kitae.models.adapter_folder import is_adapter

if TYPE_CHECKING:
    from torch import Tensor

_SHARD = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_LOCAL = "huggingface"


def refuse_adapters(path: str) -> None:
    """Raise for a folder of peft where a whole model is meant."""
    if is_adapter(path):
        raise ModelError(f"{path!r} has adapters, and no model: merge them with: kitae export {path} OUTPUT")


def newest_checkpoint(folder: Path) -> Path | None:
    """The last `checkpoint-N` of a Trainer's output folder; None: it has none."""
    found = [p for p in folder.glob("checkpoint-*") if p.name[11:].isdigit() and (p / "config.json").is_file()]
    return max(found, key=lambda p: int(p.name[11:]), default=None)


def shards_of(folder: Path) -> Path | None:
    """The folder with verl's shards: this one, or its `actor`, where a whole step is named; None: there are none."""
    for place in (folder, folder / "actor"):
        if any(place.glob("model_world_size_*_rank_*.pt")):
            return place
    return None


def left_beside(folder: Path) -> str:
    """What of a folder is not read, in words: the state of an optimizer; "": nothing."""
    found = (*folder.glob("optimizer.pt"), *folder.glob("global_step*"), *folder.glob("optim_world_size_*"))
    if not found:
        return ""
    return f"{folder}: only the weights are taken; its optimizer ({found[0].name}) is not, so its moments start anew"


def shards_name(shards: Path) -> str:
    """A name that is another one when a file is."""
    files = sorted(path for path in shards.iterdir() if _SHARD.fullmatch(path.name))
    seen = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return f"verl-{sha256(json.dumps(seen).encode()).hexdigest()[:16]}"


def write_joined(shards: Path, folder: Path) -> None:
    """Write verl's shards as an ordinary model folder, in the precision in which they were saved."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from kitae.models.quiet import reading

    local = shards / _LOCAL
    if not (local / "config.json").is_file():
        raise ModelError(f"{shards} must have {_LOCAL}/config.json beside its shards, as verl writes it")
    state = joined(shards)
    if adapted := next((name for name in state if "lora_" in name), None):
        beside = f": model.path = {shards / 'lora_adapter'}" if (shards / "lora_adapter").is_dir() else ""
        raise ModelError(
            f"{shards} has adapters in its shards ({adapted}); take them as peft writes them{beside}, or merge them "
            "with verl.model_merger first"
        )
    with reading("a checkpoint of verl", shards):
        config = AutoConfig.from_pretrained(local)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
        tied = set(getattr(model, "all_tied_weights_keys", None) or ())
        if wrong := [name for name in (*missing, *unexpected) if name not in tied]:
            raise ModelError(f"{shards} must hold the tensors of {type(model).__name__}, got others: {wrong[0]}")
        model.tie_weights()
        model.save_pretrained(folder)
    for path in local.iterdir():
        if path.is_file() and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)


def joined(shards: Path) -> "dict[str, Tensor]":
    """The whole tensors of a checkpoint by name. The files are mapped into memory, not read at once."""
    import torch
    import torch.distributed.tensor  # so that torch.load knows these tensors

    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)  # there are no processes, as it warns
    found = {int(m[2]): (path, int(m[1])) for path in shards.iterdir() if (m := _SHARD.fullmatch(path.name))}
    sizes = {size for _, size in found.values()}
    if len(sizes) != 1 or set(found) != set(range(*sizes)):
        raise ModelError(f"{shards} must hold the shards of all ranks, got {sorted(p.name for p, _ in found.values())}")
    states: list[dict[str, Any]] = []
    for rank in range(len(found)):
        try:
            states.append(torch.load(found[rank][0], map_location="cpu", mmap=True, weights_only=True))
        except Exception as error:  # a damaged file may make it raise anything
            raise ModelError(f"{found[rank][0]} cannot be read as tensors: {str(error).splitlines()[0]}") from error
    return {name: _whole(name, [state[name] for state in states]) for name in states[0]}


def _whole(name: str, parts: "list[Any]") -> "Tensor":
    """One tensor of its parts by rank, by the mesh and the placements that each part tells."""
    import torch
    from torch.distributed.tensor import DTensor, Replicate, Shard

    first = parts[0]
    if not isinstance(first, DTensor):
        return first  # type: ignore[no-any-return]
    mesh, placements, shape = first.device_mesh.mesh, first.placements, first.shape
    if other := [p for p in placements if type(p) not in (Replicate, Shard)]:
        raise ModelError(f"{name} must be sharded or replicated, got {other[0]}")

    def cut(ranks: "Tensor", dim: int) -> "Tensor":
        if dim == len(placements):
            local: Tensor = parts[int(ranks)]._local_tensor
            return local
        place: Any = placements[dim]
        if isinstance(place, Replicate):
            return cut(ranks[0], dim + 1)
        return torch.cat([cut(part, dim + 1) for part in ranks], place.dim)

    whole = cut(mesh, 0)
    if whole.shape != shape:
        raise ModelError(f"{name} must have the shape {tuple(shape)}, got {tuple(whole.shape)} from its shards")
    return whole
