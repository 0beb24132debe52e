"""Functions for the products and the decoder of `decoder.h`: float32 on any processor, bfloat16 on those with AMX.

A packed matrix is a copy of a weight in the order in which the product reads it. It knows nothing of later changes of
the weight: whoever holds one packs again after every update.
"""

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from kitae.kernels.allocation import take_again
from kitae.kernels.cpu import amx
from kitae.kernels.cpu.compile_cpp import SUFFIXES, call, cpu_library
from kitae.kernels.norms import Norm

_DEPTH = {torch.float32: 16, torch.bfloat16: 32}  # the summed dimension must be a multiple: lines of 64 bytes
_ROWS = 16  # of a block of a left operand, at most
_HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)


class ExpertMix(ctypes.Structure):
    """`struct ExpertMix` of decoder.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("router", "router_bias", "gate_up_bias", "down_bias")),
        *((name, c_int64) for name in ("number", "experts", "top_k", "renormalise")),
        *((name, c_double) for name in ("alpha", "limit")),
    ]


class Layer(ctypes.Structure):
    """`struct Layer` of decoder.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("before_attention", "qkv", "bias", "query_norm", "key_norm", "cos", "sin")),
        *((name, c_void_p) for name in ("out", "out_bias", "after_attention", "before_mlp", "gate_up", "down")),
        *((name, c_void_p) for name in ("after_mlp", "keys", "values", "sinks", "mixture")),
        *((name, c_int64) for name in ("window", "rule", "head_rule", "wide_norms", "pairs", "gelu")),
        *((name, c_int64) for name in ("inner", "gate_up_step", "down_step")),
        *((name, c_double) for name in ("scale", "softcap", "eps_before_attention", "eps_after_attention")),
        *((name, c_double) for name in ("eps_before_mlp", "eps_after_mlp", "eps_heads")),
    ]


class Decoder(ctypes.Structure):
    """`struct Decoder` of decoder.h."""

    _fields_ = [
        *((name, c_int64) for name in ("hidden", "heads", "kv_heads", "dim", "page_size")),
        ("factor", c_double),
        *((name, c_void_p) for name in ("x", "added", "qkv", "normed", "mixed", "gated")),
        *((name, c_void_p) for name in ("gathered", "logits", "gates", "chosen", "pair_of", "groups")),
    ]


@functools.cache
def available(dtype: torch.dtype) -> bool:
    """Whether there are kernels for these numbers here."""
    library = cpu_library()
    if library is None or dtype not in SUFFIXES or (dtype == torch.bfloat16 and not amx.available()):
        return False
    _check_sizes(library)
    return True


def _check_sizes(library: ctypes.CDLL) -> None:
    """A field that only one of the two languages knows would shift all that follow."""
    for name, ours in (("mixture_size", ExpertMix), ("layer_size", Layer), ("decoder_size", Decoder)):
        size = library[name]
        size.restype = c_int64
        assert size() == ctypes.sizeof(ours), (
            f"struct {ours.__name__} must have the same size in decoder.h and packed.py, "
            f"got {size()} and {ctypes.sizeof(ours)} bytes"
        )


@functools.cache
def panel_width() -> int:
    """Columns that are packed together; two weights that take turns have half of them each."""
    library = cpu_library()
    assert library is not None
    library.panel_width.restype = c_int64
    return int(library.panel_width())


def fits(dtype: torch.dtype, *depths: int, head_dim: int) -> bool:
    """Whether the kernels can compute products that sum over these dimensions, and heads of this size."""
    return all(depth % _DEPTH[dtype] == 0 for depth in depths) and head_dim in _HEAD_DIMS


@dataclass(frozen=True, slots=True)
class Packed:
    """The transpose of a weight `[N, K]`, or of several interleaved, as a right operand; or those of several experts,
    `step` numbers apart."""

    data: Tensor
    columns: int
    depth: int
    step: int

    @classmethod
    def room_for(cls, shape: Sequence[int], dtype: torch.dtype, experts: int = 1) -> "Packed":
        """Room for a weight of this shape, or for one of each expert."""
        (columns, depth), unit = shape, _DEPTH[dtype]
        assert depth % unit == 0, f"the depth of a product must be a multiple of {unit}, got {depth}"
        step = -(-columns // panel_width()) * panel_width() * depth
        return cls(torch.empty(experts * step, dtype=dtype), columns, depth, step)

    def fill(self, weights: Sequence[Tensor], expert: int = 0) -> None:
        """Copy the weights in. Several take turns, half a panel each."""
        take_again(self.data)
        room = self.data[expert * self.step : (expert + 1) * self.step]
        room[-panel_width() * self.depth :].zero_()  # the last panel may have columns that no weight has
        for turn, weight in enumerate(weights):
            assert weight.dtype == room.dtype and weight.is_contiguous() and weight.shape[1] == self.depth
            assert len(weights) == 1 or len(weight) % (panel_width() // 2) == 0
            call("pack", room.dtype, weight, *weight.shape, room, turn, len(weights))

    @property
    def bytes(self) -> int:
        return self.data.numel() * self.data.element_size()


def linear(x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
    """`x [M, K] @ weight + bias`."""
    rows, dtype = x.shape[0], weight.data.dtype
    assert x.dtype == dtype and x.shape[1] == weight.depth, (x.dtype, x.shape, weight.depth)
    out = torch.empty(rows, weight.columns, dtype=dtype)
    if not rows:
        return out
    room = torch.empty(padded(rows) * weight.depth, dtype=dtype)
    call("linear", dtype, x.contiguous(), weight.data, bias, out, rows, weight.columns, weight.depth, room)
    return out


def norm(x: Tensor, by: Norm) -> Tensor:
    """The norm of each row; no gradients."""
    x = x.contiguous()
    out = torch.empty_like(x)
    call("norm", x.dtype, x, by.weight, by.eps, int(by.rule), out, *x.shape)
    return out


def project(decoder: Decoder, layer: Layer, positions: Tensor, slots: Tensor, dtype: torch.dtype) -> None:
    """The first half of a layer: norm, queries, keys and values, rotary, and the write into the cache."""
    call("project", dtype, decoder, layer, positions, slots, len(positions))


def finish_layer(decoder: Decoder, layer: Layer, mixed: Tensor) -> None:
    """The second half, from the output of attention `[T, heads · dim]`."""
    call("finish_layer", mixed.dtype, decoder, layer, mixed.contiguous(), len(mixed))


def forward(
    decoder: Decoder,
    layers: "ctypes.Array[Layer]",
    positions: Tensor,
    slots: Tensor,
    sequences: Tensor,
    table: Tensor,
    dtype: torch.dtype,
) -> None:
    """All layers for rows of several sequences. `table` `[sequences, pages]`, int32; the rest `[T]`, int64."""
    assert table.dtype == torch.int32 and positions.dtype == slots.dtype == sequences.dtype == torch.int64
    tensors = positions.contiguous(), slots.contiguous(), sequences.contiguous(), table.contiguous()
    call("forward", dtype, decoder, layers, len(layers), *tensors, table.shape[1], len(positions))


def padded(rows: int, parts: int = 1) -> int:
    """Rows that a left operand of this many rows needs room for: whole blocks, of which two are computed at once.

    parts: operands that these rows are of, at most; each has blocks of its own.
    """
    return (-(-rows // _ROWS) + min(parts, rows) + 1) * _ROWS
