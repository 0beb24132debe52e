"""What a model's folder says of its size without being loaded."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kitae.models.load import SMOLLM2, find_model

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_KNOWN = {SMOLLM2: 134_515_008}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """`ModelShape(parameters=134_515_008, hidden=576, inner=1536, layers=30, vocabulary=49152, heads=9, …)`.

    inner: of the MLP; of a mixture, that of all experts that a token goes to. kind: of the family, as its config says.
    idle: weights of experts that a token does not go to.
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

    @property
    def active(self) -> int:
        """Parameters that one token is multiplied with."""
        return self.parameters - self.idle

    @property
    def adapted(self) -> int:
        """Weights of the linear maps of a layer."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.hidden * (2 * q + 2 * kv + 3 * self.inner)

    @property
    def projections(self) -> dict[str, int]:
        """Inputs and outputs together of each linear map of a layer, by the names that most families have for them."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = {"q_proj": self.hidden + q, "k_proj": self.hidden + kv, "v_proj": self.hidden + kv}
        mlp = dict.fromkeys(("gate_proj", "up_proj", "down_proj"), self.hidden + self.inner)
        return {**attention, "o_proj": self.hidden + q, **mlp}


def read_model(path: str) -> ModelShape | None:
    """From config.json and the headers of the weights; None for a model that is not here yet."""
    folder = find_model(path, download=False)
    shape: dict[str, Any] = {}
    if folder and (folder / "config.json").is_file():
        shape = json.loads((folder / "config.json").read_text())
        shape = {**shape, **shape.get("text_config", {})}
    parameters = _KNOWN.get(path) or (count_parameters(folder) if folder else None)
    if parameters is None:
        return None
    hidden = shape.get("hidden_size", 576)
    heads = shape.get("num_attention_heads", 9)
    inner = shape.get("moe_intermediate_size") or shape.get("intermediate_size", 8 * hidden // 3)
    layers = shape.get("num_hidden_layers", 30)
    taken = shape.get("num_experts_per_tok") or 1
    experts = next((n for key in _EXPERTS if (n := shape.get(key))), taken)
    idle = layers * (experts - taken) * 3 * hidden * inner
    return ModelShape(
        parameters=parameters,
        hidden=hidden,
        inner=inner * taken,
        layers=layers,
        vocabulary=shape.get("vocab_size", 49152),
        heads=heads,
        kv_heads=shape.get("num_key_value_heads", 3 if not shape else heads),
        head_dim=shape.get("head_dim") or hidden // heads,
        kind=shape.get("model_type", "llama"),
        idle=idle if 0 < idle < parameters else 0,  # else not every layer is a mixture, or not of this kind
    )


def count_parameters(folder: Path) -> int | None:
    """From the headers of the safetensors files; nothing is read but those."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        for name, tensor in header.items():
            if name != "__metadata__":
                count = 1
                for n in tensor["shape"]:
                    count *= n
                total += count
    return total or None
