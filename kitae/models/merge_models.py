"""One model of several: the mean of their weights, or TIES, which adds up what each has changed of a common base.

    mean    θ = Σ w θ_k / Σ w
    TIES    τ_k = θ_k − base; of each tensor the share `density` of largest changes is kept; the sign of Σ w τ_k is
            elected for each weight; θ = base + the mean, by w, of the changes that have this sign

Computed in float32, one tensor after the other; written in the precision of the first model. All of them are in memory
at once. Models must have the same tensors.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kitae.errors import ModelError
from kitae.models.config import ModelConfig
from kitae.models.lora import add_lora, state_with_adapters
from kitae.models.quiet import quiet_transformers, reading


def mean_of(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = sum(w * t.float() for w, t in zip(weights, tensors, strict=True))
    assert isinstance(total, Tensor)
    return total / sum(weights)


def ties_of(base: Tensor, tensors: Sequence[Tensor], weights: Sequence[float], density: float) -> Tensor:
    changes = [w * _trimmed(t.float() - base.float(), density) for w, t in zip(weights, tensors, strict=True)]
    elected = torch.stack(changes).sum(0).sign()
    agreeing = [(change.sign() == elected) & (change != 0) for change in changes]
    share = torch.stack([w * agrees for w, agrees in zip(weights, agreeing, strict=True)]).sum(0)
    total = torch.stack([c.where(agrees, 0.0) for c, agrees in zip(changes, agreeing, strict=True)]).sum(0)
    return base.float() + torch.where(share > 0, total / share, 0.0)


def _trimmed(change: Tensor, density: float) -> Tensor:
    kept = int(density * change.numel())
    flat = torch.zeros_like(change).view(-1)
    place = change.abs().view(-1).topk(kept).indices
    flat[place] = change.reshape(-1)[place]
    return flat.view_as(change)


def write_merged(
    models: Sequence[ModelConfig], folder: Path, weights: Sequence[float] = (), base: str = "", density: float = 1.0
) -> None:
    """Write one model of these, with the tokenizer of the first; adapters are merged before. base: TIES is meant, and
    the models began with this one; "": their mean is.
    """
    weights = list(weights) or [1.0] * len(models)
    if len(weights) != len(models) or min(weights) <= 0:
        raise ModelError(f"weights must be {len(models)} positive numbers, one for each model, got {list(weights)}")
    if not 0 < density <= 1:
        raise ModelError(f"density must be above 0 and at most 1, got {density}")
    first, states = _load(models[0])
    merged = states
    if len(models) > 1:
        others = [_load(model)[1] for model in models[1:]]
        begun = _load(ModelConfig(path=base))[1] if base else states
        for model, other in zip((*models[1:], base), (*others, begun), strict=True):
            _check_alike(states, other, str(getattr(model, "path", model)))
        merged = {}
        for name, tensor in states.items():
            tensors = [tensor, *(other[name] for other in others)]
            made = ties_of(begun[name], tensors, weights, density) if base else mean_of(tensors, weights)
            merged[name] = made.to(tensor.dtype)
        _tie(merged, states)
    with quiet_transformers():
        first.save_pretrained(folder, state_dict=merged)
        from kitae.models.load import load_tokenizer

        for part in filter(None, load_tokenizer(models[0])):
            part.save_pretrained(folder)


def _load(model: ModelConfig) -> tuple[Any, dict[str, Tensor]]:
    """A model as it was written, and its weights, adapters merged."""
    from transformers import AutoModelForCausalLM

    from kitae.models.load import find_model

    folder = find_model(model.path)
    assert folder is not None
    with reading(repr(model.path), folder):
        base = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=False)
    if model.lora_rank:
        add_lora(base, model)
    return base, state_with_adapters(base)


def _check_alike(wanted: dict[str, Tensor], found: dict[str, Tensor], name: str) -> None:
    shapes = [{key: tensor.shape for key, tensor in state.items()} for state in (wanted, found)]
    if shapes[0] != shapes[1]:
        odd = sorted(dict(shapes[0].items() ^ shapes[1].items()))[0]
        raise ModelError(f"models must have the same tensors to be merged, got another {odd} in {name}")


def _tie(merged: dict[str, Tensor], states: dict[str, Tensor]) -> None:
    """Names that shared a tensor share one again."""
    known: dict[int, str] = {}
    for name, tensor in states.items():
        merged[name] = merged[known.setdefault(tensor.data_ptr(), name)]
