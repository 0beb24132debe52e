"""Doors to the matrix products and the decoder of `amx.h`, for CPUs with tile registers. bfloat16 only.

A packed matrix is a copy of a weight in the order in which the tiles read it. It knows nothing of later changes of the
weight: whoever holds one packs again after every update.
"""

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from kitae.kernels.cpu.build import cpu_library

DEPTH = 32  # the summed dimension must be a multiple of this
_PANEL = 32
_TILE = 16
_SLAB_ROWS, _SLAB_DEPTH = 2048, 1024  # as in amx.h
_HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)


class Layer(ctypes.Structure):
    """`struct Layer` of amx.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("before_attention", "qkv", "bias", "query_norm", "key_norm", "out")),
        *((name, c_void_p) for name in ("before_mlp", "gate_up", "down", "keys", "values", "sinks")),
        ("window", c_int64),
        *((name, c_double) for name in ("scale", "softcap", "eps_attention", "eps_mlp", "eps_heads")),
    ]


class Decoder(ctypes.Structure):
    """`struct Decoder` of amx.h."""

    _fields_ = [
        *((name, c_int64) for name in ("hidden", "heads", "kv_heads", "dim", "inner", "page_size")),
        *((name, c_void_p) for name in ("cos", "sin", "x", "qkv", "normed", "mixed", "gated")),
    ]


@functools.cache
def available() -> bool:
    """Whether the kernels are built for tiles and the system lets this process use them."""
    library = cpu_library()
    if library is None:
        return False
    library.amx_available.restype = c_int64
    if not library.amx_available():
        return False
    _check_sizes(library)
    return True


def _check_sizes(library: ctypes.CDLL) -> None:
    """A field that only one of the two languages knows would shift all that follow."""
    for name, ours in (("amx_layer_size", Layer), ("amx_decoder_size", Decoder)):
        size = library[name]
        size.restype = c_int64
        assert size() == ctypes.sizeof(ours), (
            f"struct {ours.__name__} must have the same size in amx.h and amx.py, "
            f"got {size()} and {ctypes.sizeof(ours)} bytes"
        )


def fits(*depths: int, head_dim: int) -> bool:
    """Whether the kernels can compute products that sum over these dimensions, and heads of this size."""
    return all(depth % DEPTH == 0 for depth in depths) and head_dim in _HEAD_DIMS


@dataclass(frozen=True, slots=True)
class Packed:
    """The transpose of a weight `[N, K]`, or of several interleaved, as a right operand."""

    data: Tensor
    columns: int
    depth: int

    @classmethod
    def room(cls, columns: int, depth: int) -> "Packed":
        assert depth % DEPTH == 0, f"the depth of a product must be a multiple of {DEPTH}, got {depth}"
        return cls(torch.zeros(-(-columns // _PANEL) * _PANEL * depth, dtype=torch.bfloat16), columns, depth)

    def fill(self, weights: Sequence[Tensor]) -> None:
        """Copy the weights in. Several take turns, 16 columns each."""
        for turn, weight in enumerate(weights):
            assert weight.dtype == torch.bfloat16 and weight.is_contiguous() and weight.shape[1] == self.depth
            assert len(weights) == 1 or len(weight) % _TILE == 0
            _call("amx_pack", weight, *weight.shape, self.data, turn, len(weights))

    @property
    def bytes(self) -> int:
        return self.data.numel() * self.data.element_size()


def linear(x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
    """`x [M, K] @ weight + bias`."""
    rows = x.shape[0]
    out = torch.empty(rows, weight.columns, dtype=torch.bfloat16)
    room = torch.empty(padded(rows) * weight.depth, dtype=torch.bfloat16)
    _call("amx_linear", x.contiguous(), weight.data, bias, out, rows, weight.columns, weight.depth, room)
    return out


def add_outer(total: Tensor, dy: Tensor, x: Tensor) -> None:
    """`total [N, K] += dy [M, N].T @ x [M, K]`, total in fp32: the gradient of a weight. Rows may be strided."""
    (rows, height), depth = dy.shape, x.shape[1]
    assert total.dtype == torch.float32 and total.is_contiguous() and total.shape == (height, depth)
    assert dy.dtype == x.dtype == torch.bfloat16 and dy.stride(1) == x.stride(1) == 1
    left = torch.empty(min(height, _SLAB_ROWS) * _SLAB_DEPTH, dtype=torch.bfloat16)
    right = torch.empty(depth * _SLAB_DEPTH, dtype=torch.bfloat16)
    _call("amx_add_outer", dy, dy.stride(0), x, x.stride(0), total, rows, height, depth, left, right)


def can_add_outer(height: int, depth: int) -> bool:
    """Whether `add_outer` can compute the gradient of a weight of this shape."""
    return available() and height % _TILE == 0 and depth % DEPTH == 0


def project(decoder: Decoder, layer: Layer, positions: Tensor, slots: Tensor) -> None:
    """The first half of a layer: norm, queries, keys and values, rotary, and the write into the cache."""
    _call("amx_project", decoder, layer, positions, slots, len(positions))


def finish_layer(decoder: Decoder, layer: Layer, mixed: Tensor) -> None:
    """The second half, from the output of attention `[T, heads · dim]`."""
    _call("amx_finish_layer", decoder, layer, mixed.contiguous(), len(mixed))


def forward(
    decoder: Decoder,
    layers: "ctypes.Array[Layer]",
    positions: Tensor,
    slots: Tensor,
    sequences: Tensor,
    table: Tensor,
) -> None:
    """All layers for rows of several sequences. `table` `[sequences, pages]`, int32; the rest `[T]`, int64."""
    assert table.dtype == torch.int32 and positions.dtype == slots.dtype == sequences.dtype == torch.int64
    tensors = positions.contiguous(), slots.contiguous(), sequences.contiguous(), table.contiguous()
    _call("amx_forward", decoder, layers, len(layers), *tensors, table.shape[1], len(positions))


def padded(rows: int) -> int:
    """Rows that a left operand of this many rows needs room for."""
    return -(-rows // _PANEL) * _PANEL


def _call(name: str, *arguments: object) -> None:
    library = cpu_library()
    assert library is not None
    function = getattr(library, name)
    function.restype = None
    function(*map(_as_c, arguments))


def _as_c(value: object) -> object:
    if isinstance(value, Tensor):
        return c_void_p(value.data_ptr())
    if isinstance(value, ctypes.Structure | ctypes.Array):
        return ctypes.byref(value)
    return c_int64(value) if isinstance(value, int) else value
