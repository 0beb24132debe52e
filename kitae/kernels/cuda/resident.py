"""All layers of a decoding step of up to 8 rows as one kernel, `resident.cu`, which says how it works.

bfloat16 alone, heads of 64 or 128, dense layers as in Llama, with biases and norms of queries and keys.
"""

import ctypes
import struct
from collections.abc import Sequence
from ctypes import c_int, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kitae.kernels.cuda.build import CudaError, CudaKernel, compiled, loaded

MOST = 8  # rows
SOURCE = Path(__file__).with_name("resident.cu")
_SPLITS = 32  # as in resident.cu, like all that follows
_WARPS, _CHUNK = 8, 2048
_LEAST = 2  # chunks in a ring
_STAGES = 3  # tiles of eight tokens that a warp has in flight


@dataclass(frozen=True, slots=True)
class ResidentLayer:
    """Weights `[N, K]`; gate_up: gate, then up; norms: of queries and keys, with eps. before_next: the gain of the norm
    after this layer. keys, values: pages of the cache."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    bias: Tensor | None
    norms: tuple[Tensor, Tensor, float] | None
    before_mlp: Tensor
    before_next: Tensor
    eps: tuple[float, float]
    cos: Tensor
    sin: Tensor
    keys: Tensor
    values: Tensor
    scale: float

    def tensors(self) -> tuple[Tensor | None, ...]:
        q_norm, k_norm, _ = self.norms or (None, None, 0.0)
        return (
            self.qkv, self.out, self.gate_up, self.down, self.bias, q_norm, k_norm, self.before_mlp, self.before_next,
            self.cos, self.sin, self.keys, self.values,
        )  # fmt: skip

    def words(self) -> bytes:
        """`struct Layer` of resident.cu."""
        addresses = [0 if t is None else t.data_ptr() for t in self.tensors()]
        eps = self.norms[2] if self.norms else 0.0
        return struct.pack("13Q4fQ", *addresses, *self.eps, eps, self.scale, 0)


class _Step(ctypes.Structure):
    """`struct Step` of resident.cu."""

    _fields_ = [
        *((name, c_void_p) for name in ("layers", "tokens", "positions", "slots", "lengths", "table", "embedding")),
        *((name, c_void_p) for name in ("before_first", "qkv", "mixed", "act", "gained", "squares", "parts", "stats")),
        ("counters", c_void_p),
        ("batch", c_int),
        ("table_row", c_int),
    ]


class Resident:
    """The layers of a model, whose tensors stay where they are. `build` comes before the first step."""

    def __init__(self, layers: Sequence[ResidentLayer], embedding: Tensor, before_first: Tensor, heads: int) -> None:
        first, device = layers[0], embedding.device
        _, kv_heads, page_size, dim = first.keys.shape
        hidden, inner = embedding.shape[1], first.down.shape[1]
        self._look_at(device)
        self._shape = {
            "H": hidden, "HQ": heads, "HKV": kv_heads, "D": dim, "I": inner, "PAGE": page_size, "BLOCKS": self._blocks,
            "LAYERS": len(layers), "BIAS": int(first.bias is not None), "NORMS": int(first.norms is not None),
        }  # fmt: skip
        self.kernel: CudaKernel | None = None
        self._held = (*layers, embedding, before_first)
        words = bytearray(b"".join(layer.words() for layer in layers))
        self._layers = torch.frombuffer(words, dtype=torch.uint8).to(device)
        self._embedding, self._before_first = embedding, before_first
        widths = ((heads + 2 * kv_heads) * dim, heads * dim, inner)
        self._rooms = [torch.zeros(MOST, width, dtype=torch.bfloat16, device=device) for width in widths]
        self._parts = torch.empty(MOST * heads * _SPLITS * dim, device=device)
        self._stats = torch.empty(MOST * heads * _SPLITS, device=device)
        self._counters = torch.zeros(2 + MOST * kv_heads, dtype=torch.int32, device=device)

    def _look_at(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        self._blocks: int = properties.multi_processor_count
        self._capability = properties.major, properties.minor
        self._room: int = getattr(properties, "shared_memory_per_block_optin", 96 * 1024)

    @staticmethod
    def fits(layers: Sequence[ResidentLayer], embedding: Tensor, heads: int) -> bool:
        first = layers[0]
        _, kv_heads, page_size, dim = first.keys.shape
        depths = embedding.shape[1], heads * dim, first.down.shape[1]
        read = [t for layer in layers for t in layer.tensors() if t is not None]
        return (
            all(t.is_cuda and t.dtype == torch.bfloat16 and t.is_contiguous() for t in (*read, embedding))
            and all(t.data_ptr() % 16 == 0 for t in read)
            and all((layer.bias is None) == (first.bias is None) for layer in layers)
            and all((layer.norms is None) == (first.norms is None) for layer in layers)
            and all(depth % 64 == 0 for depth in depths)
            and dim in (64, 128)
            and heads // kv_heads <= 16
            and page_size % 8 == 0
            and torch.cuda.get_device_capability(embedding.device)[0] >= 8
        )  # fmt: skip

    def stream(
        self, tokens_B: Tensor, positions_B: Tensor, slots_B: Tensor, table: Tensor, lengths_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The stream behind the last layer, times the gain of the last norm, and sums of its squares, as `few.Stream`
        has them; new keys and values go to their slots."""
        assert self.kernel is not None
        batch, hidden = len(tokens_B), self._shape["H"]
        owners = -(-hidden // -(-hidden // self._blocks))
        gained = torch.empty(batch, hidden, dtype=torch.bfloat16, device=tokens_B.device)
        squares = torch.empty(batch, owners, device=tokens_B.device)
        tensors = (
            self._layers, tokens_B, positions_B, slots_B, lengths_B, table, self._embedding, self._before_first,
            *self._rooms, gained, squares, self._parts, self._stats, self._counters,
        )  # fmt: skip
        step = _Step(*(t.data_ptr() for t in tensors), batch, table.stride(0))
        self.kernel.launch(step)
        return gained, squares

    def build(self) -> None:
        image = compiled(SOURCE, self._settings(), self._capability)
        size = self._blocks, 32 * _WARPS, self._cut()[1]
        self.kernel = loaded(image, "decode_layers", size, self._embedding.device)

    def _settings(self) -> dict[str, int]:
        return {**self._shape, "DEPTH": self._cut()[0], "STAGES": _STAGES}

    def _cut(self) -> tuple[int, int]:
        """Chunks in a ring, as many as there is room for, and the bytes of shared memory."""
        dim, group = self._shape["D"], self._shape["HQ"] // self._shape["HKV"]
        tile = 32 * dim
        shares, tiles = 2 * _WARPS * 640, (_STAGES * _WARPS + 1) * tile
        queries = (16 if group > 8 else 8) * (2 * dim + 16)
        rest = shares + tiles + queries + _WARPS * (128 + 8 * _STAGES) + 80 + 128 + 16 + 128 * self._shape["LAYERS"]
        depth = min(12, (self._room - rest) // (_WARPS * _CHUNK))
        if depth < _LEAST:
            least = rest + _LEAST * _WARPS * _CHUNK
            raise CudaError(f"a multiprocessor must have {least} bytes to share, got {self._room}")
        return depth, depth * _WARPS * _CHUNK + rest
