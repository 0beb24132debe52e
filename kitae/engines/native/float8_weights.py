"""Weights for q, k, v and the MLP in 8 bits, and a layer's products with them (`engine.weights_dtype = "float8"`).

Import this module only where Triton is. `kitae.kernels.float8` says how numbers are rounded.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kitae.engines.native.decoder_layers import DecoderLayer
from kitae.kernels import float8
from kitae.kernels.cuda import float8_products
from kitae.kernels.cuda.float8_products import LayerFloat8


def allocate(layers: Sequence[DecoderLayer]) -> list[LayerFloat8]:
    """Room for the weights of each layer in 8 bits, which `store` fills."""
    found = []
    for layer in layers:
        qkv, gate_up, down = map(float8_products.room_for, (layer.qkv, layer.gate_up, layer.down))
        units = (layer.qkv.new_ones((), dtype=torch.float32) for _ in range(3))
        found.append(LayerFloat8(qkv, gate_up, down, *units))
    return found


def store(layers: Sequence[DecoderLayer], into: Sequence[LayerFloat8]) -> None:
    """Round the weights as they are now, and the bounds of the rows that their norms give."""
    for layer, kept in zip(layers, into, strict=True):
        assert layer.first is not None and layer.second is not None
        float8_products.store(layer.qkv, kept.qkv)
        float8_products.store(layer.gate_up, kept.gate_up)
        float8_products.store(layer.down, kept.down)
        kept.before_qkv.copy_(float8.unit_of_normed(layer.first))
        kept.before_gate_up.copy_(float8.unit_of_normed(layer.second))


def queries_keys_values(normed: Tensor, weights: LayerFloat8, dtype: torch.dtype) -> Tensor:
    """The product of normed rows in 8 bits with the weight of q, k and v."""
    return float8_products.product(normed, weights.before_qkv, weights.qkv, dtype)


def mlp(normed: Tensor, weights: LayerFloat8, dtype: torch.dtype, *, gelu: bool) -> tuple[Tensor, Tensor]:
    """What an MLP makes of normed rows in 8 bits; its rows are still to be multiplied by the units that come second."""
    both = float8_products.product(normed, weights.before_gate_up, weights.gate_up, dtype)
    gated, units = float8_products.gate(both, gelu=gelu)
    return float8_products.product(gated, weights.before_down, weights.down, dtype), units
