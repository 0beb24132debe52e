"""What a model's folder says of its size without being loaded."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kitae.models.load import SMOLLM2, find_model

_HIDDEN, _INNER = ("hidden_size", "n_embd"), ("intermediate_size", "ffn_dim", "n_inner")
_LAYERS, _HEADS = ("num_hidden_layers", "n_layer"), ("num_attention_heads", "n_head")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k")
_KNOWN = {SMOLLM2: 134_515_008}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """`ModelShape(parameters=134_515_008, hidden=576, inner=1536, layers=30, vocabulary=49152, heads=9, …)`.

    inner: of the MLP; of a mixture, that of all experts that a token goes to. kind: of the family, as its config says.
    idle: weights of experts that a token does not go to. mixture: the MLPs are experts, which get no adapters. latent:
    numbers that latent attention keeps of a token in a layer; 0: it has keys and values of each head.
    """

    parameters: int
    hidden: int
    inner: int
    layers: int
    vocabulary: int
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    kind: str = "llama"
    idle: int = 0
    mixture: bool = False
    latent: int = 0

    def cache_bytes(self, size: int, *, eight_bits: bool = False, whole: bool = False) -> int:
        """Bytes that an engine keeps of a token. size: of a number; whole: keys and values although there are
        latents."""
        heads, dim = (1, self.latent) if self.latent and not whole else (2 * self.kv_heads, self.head_dim)
        return self.layers * heads * (dim + 4 if eight_bits else dim * size)

    @property
    def active(self) -> int:
        """Parameters that one token is multiplied with."""
        return self.parameters - self.idle

    @property
    def products(self) -> dict[frozenset[str], int]:
        """Weights of the linear maps of a layer, of those together that an engine computes in one product."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = {("q_proj", "k_proj", "v_proj"): q + 2 * kv, ("o_proj",): q}
        mlp = {} if self.mixture else {("gate_proj", "up_proj"): 2 * self.inner, ("down_proj",): self.inner}
        return {frozenset(names): self.hidden * width for names, width in {**attention, **mlp}.items()}

    @property
    def projections(self) -> dict[str, int]:
        """Inputs and outputs together of each linear map of a layer, by the names that most families have for them."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = {"q_proj": self.hidden + q, "k_proj": self.hidden + kv, "v_proj": self.hidden + kv}
        maps = () if self.mixture else ("gate_proj", "up_proj", "down_proj")
        mlp = dict.fromkeys(maps, self.hidden + self.inner)
        return {**attention, "o_proj": self.hidden + q, **mlp}


def read_model(path: str) -> ModelShape | None:
    """From config.json and the headers of the weights; None for a model that is not here yet, or cannot be read.

    What is missing, or null, is taken as the families have it. Whoever loads the model says what is wrong with it.
    """
    folder = find_model(path, download=False)
    try:
        shape = _read_config(folder) if folder else {}
        parameters = _KNOWN.get(path) or (count_parameters(folder) if folder else None)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if parameters is None:
        return None
    hidden, heads = _number(shape, *_HIDDEN) or 576, _number(shape, *_HEADS) or 9
    inner = _number(shape, "moe_intermediate_size", *_INNER) or 8 * hidden // 3
    layers = _number(shape, *_LAYERS) or 30
    chosen = _number(shape, *_CHOSEN)
    taken = chosen or 1
    rank, rotated = _number(shape, "kv_lora_rank") or 0, _number(shape, "qk_rope_head_dim") or 0
    head_dim, kv_heads = _number(shape, "head_dim"), _number(shape, "num_key_value_heads")
    if rank:  # of keys and values, if they are made, all heads have their own, of one size
        kv_heads = heads
        head_dim = max(rotated + (_number(shape, "qk_nope_head_dim") or 0), _number(shape, "v_head_dim") or 0)
    idle = layers * ((_number(shape, *_EXPERTS) or taken) - taken) * 3 * hidden * inner
    return ModelShape(
        parameters=parameters,
        hidden=hidden,
        inner=inner * taken + _shared_inner(shape),
        layers=layers,
        vocabulary=_number(shape, "vocab_size") or 49152,
        heads=heads,
        kv_heads=kv_heads or (heads if shape else 3),
        head_dim=head_dim or hidden // heads,
        kind=shape.get("model_type", "llama"),
        idle=idle if 0 < idle < parameters else 0,  # else not every layer is a mixture, or not of this kind
        mixture=chosen is not None,
        latent=rank + rotated if rank else 0,
    )


def _read_config(folder: Path) -> dict[str, Any]:
    """What it says of the language model; nothing that is null."""
    file = folder / "config.json"
    if not file.is_file():
        return {}
    found = json.loads(file.read_text())
    if not isinstance(found, dict):
        raise ValueError(f"{file} must hold an object, got {type(found).__name__}")
    return {k: v for k, v in {**found, **(found.get("text_config") or {})}.items() if v is not None}


def _number(shape: dict[str, Any], *names: str) -> int | None:
    """Under the first of these names that the family has; where layers differ, the largest. What is no number is as if
    it were missing."""
    found = next((value for name in names if (value := shape.get(name))), None)
    return max((n for n in (found if isinstance(found, list) else [found]) if isinstance(n, int)), default=None)


def _shared_inner(shape: dict[str, Any]) -> int:
    """Of experts that every token goes to, beside those that are chosen."""
    several = (_number(shape, "n_shared_experts") or 0) * (_number(shape, "moe_intermediate_size") or 0)
    return _number(shape, "shared_expert_intermediate_size") or several


def count_parameters(folder: Path) -> int | None:
    """From the headers of the safetensors files that are loaded; nothing is read but those."""
    return sum(map(_count, _weight_files(folder))) or None


def _weight_files(folder: Path) -> list[Path]:
    """Those that transformers loads: a folder may hold the same weights in another layout, or adapters, beside them."""
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if whole.is_file():
        return [whole]
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return sorted(folder.glob("*.safetensors"))


def _count(path: Path) -> int:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 0 < size < path.stat().st_size:
            raise ValueError(f"{path} must begin with a header, got a size of {size}")
        header = json.loads(file.read(size))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
