"""Frozen weights in 4 bits (NF4), on which adapters learn (QLoRA).

A weight is one of 16 numbers, quantiles of a normal distribution, times the largest magnitude of its block of 64:
4.5 bits with the scale, which stays in float32. The layout is that of bitsandbytes: two codes a byte, the first in the
upper half. Weights are computed anew from their codes in each pass, forward and backward, and never kept; trainer and
engine use the same function, so they see the same numbers. On a GPU bitsandbytes' kernel does it where that is
installed.

The head, embeddings, norms and experts stay as they are, as do layers whose size is no multiple of 64. Scales are not
quantised themselves.
"""

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from kitae.errors import ModelError

BLOCK = 64
BYTES = 0.5 + 4 / BLOCK  # of a weight, its share of a scale included
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, two a byte, and the scale of each block, in the order of the flattened weight."""
    blocks = weight.detach().float().reshape(-1, BLOCK)
    scales = blocks.abs().amax(1)
    table = torch.tensor(NF4, device=weight.device)
    near = torch.bucketize(blocks / scales.clamp(min=1e-38)[:, None], (table[1:] + table[:-1]) / 2)
    pairs = near.view(-1, 2).to(torch.uint8)
    return pairs[:, 0] << 4 | pairs[:, 1], scales


def dequantise(codes: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    if codes.is_cuda and _has_kernel():
        return _of_kernel(codes, scales, shape, dtype)
    found = _pairs(codes.device).index_select(0, codes.int()).view(torch.float32).view(-1, BLOCK)
    return found.mul_(scales[:, None]).to(dtype).view(shape)


@cache
def _pairs(device: torch.device) -> Tensor:
    """The two numbers of each byte, as one of 64 bits: one look finds both, twice as fast as rows of two."""
    with torch.inference_mode(False):
        table = torch.tensor(NF4, device=device)
        return torch.stack([table.repeat_interleave(16), table.repeat(16)], 1).view(torch.int64).view(-1)


@cache
def _has_kernel() -> bool:
    return importlib.util.find_spec("bitsandbytes") is not None


def _of_kernel(codes: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    from bitsandbytes.functional import QuantState, dequantize_4bit

    table = _pairs(codes.device).view(torch.float32)[1:32:2].contiguous()
    state = QuantState(scales, shape=torch.Size(shape), code=table, blocksize=BLOCK, quant_type="nf4", dtype=dtype)
    found: Tensor = dequantize_4bit(codes.view(-1, 1), state)
    return found


class FourBitLinear(nn.Linear):
    """A linear layer whose weight is there only while it computes. `weight` computes it; it cannot be trained."""

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self._dtype = layer.in_features, layer.out_features, layer.weight.dtype
        codes, scales = quantise(layer.weight)
        self.codes, self.scales = (nn.Parameter(part, requires_grad=False) for part in (codes, scales))
        self.bias = layer.bias

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        shape = self.out_features, self.in_features
        return dequantise(self.codes, self.scales, shape, self._dtype)

    def forward(self, input: Tensor) -> Tensor:
        product: Any = _Product.apply(input, self)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias  # type: ignore[no-any-return]


class _Product(torch.autograd.Function):
    """x W^T, which keeps the codes for its gradient and not the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FourBitLinear) -> Tensor:
        ctx.layer = layer
        return linear(x, layer.weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy @ ctx.layer.weight, None


def quantise_layers(model: Any, device: torch.device) -> None:
    """Put all linear layers but the head into 4 bits on the device, one after the other."""
    head, found = model.get_output_embeddings(), 0
    for name, layer in list(model.named_modules()):
        if type(layer) is not nn.Linear or layer is head or layer.weight.numel() % BLOCK:
            continue
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, FourBitLinear(layer.to(device)))
        layer.weight = None  # type: ignore[assignment]
        found += 1
    if not found:
        raise ModelError(f"model.lora_base = 'nf4' needs linear layers, and {type(model).__name__} has none of them")
