"""The kernel for all layers of a step, with its threads emulated on a CPU, against plain torch."""

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kitae.kernels.cuda import resident
from kitae.kernels.cuda.build import CudaError
from kitae.kernels.cuda.resident import ResidentLayer

HERE = Path(__file__).parent / "emulated"
PAGE = 16


@dataclass
class Shape:
    """Of a model, and of the device that has so few blocks."""

    hidden: int = 512
    heads: int = 6
    kv_heads: int = 2
    dim: int = 64
    inner: int = 640
    layers: int = 2
    blocks: int = 3
    bias: bool = False
    norms: bool = False
    pages: int = 40

    def make(self) -> tuple[list[ResidentLayer], Tensor, Tensor]:
        """Layers, embedding, and the gain of the first norm."""
        draw = torch.Generator().manual_seed(0)

        def numbers(*shape: int, size: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=draw) * size).bfloat16()

        qkv = (self.heads + 2 * self.kv_heads) * self.dim
        angles = torch.arange(1600)[:, None] * (1e4 ** -(torch.arange(self.dim // 2) / (self.dim // 2)))[None]
        cos, sin = (torch.cat((part, part), 1).bfloat16() for part in (angles.cos(), angles.sin()))
        gains = [1 + numbers(self.hidden, size=0.2) for _ in range(2 * self.layers + 1)]
        pages = self.pages + 1, self.kv_heads, PAGE, self.dim
        layers = [
            ResidentLayer(
                qkv=numbers(qkv, self.hidden, size=self.hidden**-0.5),
                out=numbers(self.hidden, self.heads * self.dim, size=(self.heads * self.dim) ** -0.5),
                gate_up=numbers(2 * self.inner, self.hidden, size=self.hidden**-0.5),
                down=numbers(self.hidden, self.inner, size=self.inner**-0.5),
                bias=numbers(qkv, size=0.3) if self.bias else None,
                norms=(1 + numbers(self.dim, size=0.2), 1 + numbers(self.dim, size=0.2), 1e-6) if self.norms else None,
                before_mlp=gains[2 * i + 1], before_next=gains[2 * i + 2], eps=(1e-5, 1e-6), cos=cos, sin=sin,
                keys=numbers(*pages), values=numbers(*pages), scale=self.dim**-0.5,
            )
            for i in range(self.layers)
        ]  # fmt: skip
        return layers, numbers(100, self.hidden), gains[0]


class Emulated(resident.Resident):
    """On a device of few blocks whose threads are coroutines."""

    def __init__(self, shape: Shape, folder: Path, *, late: bool, seed: int) -> None:
        self.shape, self.folder, self.late, self.seed = shape, folder, late, seed
        self.layers, self.embedding, self.first = shape.make()
        super().__init__(self.layers, self.embedding, self.first, shape.heads)

    def _look_at(self, device: torch.device) -> None:
        self._blocks, self._capability, self._room = self.shape.blocks, (9, 0), 227 * 1024

    def build(self) -> None:
        self.kernel = self._emulate()  # type: ignore[assignment]

    def _emulate(self) -> "_Emulation":
        settings, shared = self._settings(), self._cut()[1]
        key = "-".join(str(value) for value in settings.values())
        target = self.folder / f"{key}.so"
        if not target.exists():
            macros = [f"-D{name}={value}" for name, value in settings.items()]
            places = [f"-I{HERE}", f"-I{Path(resident.__file__).parent}"]
            flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC"]
            subprocess.run(["g++", *flags, *places, *macros, str(HERE / "resident.cpp"), "-o", str(target)], check=True)
        return _Emulation(ctypes.CDLL(str(target)), shared, self.late, self.seed)


@dataclass
class _Emulation:
    library: ctypes.CDLL
    shared: int
    late: bool
    seed: int

    def launch(self, step: ctypes.Structure) -> None:
        ended = self.library.decode_layers_here(ctypes.byref(step), self.shared, int(self.late), self.seed)
        assert ended, "the blocks of the kernel wait for each other for ever"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    return tmp_path_factory.mktemp("emulated")


@dataclass
class Inputs:
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    table: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], pages: int) -> "Inputs":
        """Sequences that are so long with their new token, on pages of their own in no order; 0: an idle row."""
        width = max(1, -(-max(lengths) // PAGE))
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(1))[: len(lengths) * width]
        table = torch.zeros(len(lengths), width + 1, dtype=torch.int32)
        table[:, :width] = order.view(len(lengths), width)
        seen = torch.tensor(lengths)
        positions = (seen - 1).clamp(min=0)
        slots = table[torch.arange(len(lengths)), positions // PAGE].long() * PAGE + positions % PAGE
        tokens = torch.arange(len(lengths)) * 7 % 100
        return cls(tokens, positions, torch.where(seen > 0, slots, pages * PAGE), table, seen.to(torch.int32))


def expected(model: Emulated, given: Inputs) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """In float32: the last stream after a norm without eps, times its gain; new keys and values of each layer."""
    shape, x = model.shape, model.embedding[given.tokens].float()
    gain, stored = model.first, []
    for layer in model.layers:
        normed = _norm(x, gain, layer.eps[0])
        qkv = normed @ layer.qkv.float().T + (0 if layer.bias is None else layer.bias.float())
        heads = qkv.view(len(x), -1, shape.dim)
        q, k, v = torch.split(heads, [shape.heads, shape.kv_heads, shape.kv_heads], 1)
        if layer.norms is not None:
            q, k = _norm(q, layer.norms[0], layer.norms[2]), _norm(k, layer.norms[1], layer.norms[2])
        cos, sin = (part[given.positions].float()[:, None] for part in (layer.cos, layer.sin))
        q, k = (part * cos + torch.cat((-part[..., shape.dim // 2 :], part[..., : shape.dim // 2]), -1) * sin
                for part in (q, k))  # fmt: skip
        stored.append((k, v))
        x = x + _attention(shape, layer, given, q, k, v) @ layer.out.float().T
        gate, up = (_norm(x, layer.before_mlp, layer.eps[1]) @ layer.gate_up.float().T).chunk(2, 1)
        x = x + (torch.nn.functional.silu(gate) * up) @ layer.down.float().T
        gain = layer.before_next
    return _norm(x, gain, 0.0), stored


def _norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain.float()


def _attention(shape: Shape, layer: ResidentLayer, given: Inputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = []
    for row, length in enumerate(given.lengths.tolist()):
        if length == 0:
            rows.append(torch.zeros(shape.heads * shape.dim))
            continue
        seen = []
        for pages, new in ((layer.keys, k), (layer.values, v)):
            past = pages[given.table[row].long()].transpose(0, 1).flatten(1, 2)[:, : length - 1]
            seen.append(torch.cat((past.float(), new[row, :, None]), 1))
        keys, values = (part.repeat_interleave(shape.heads // shape.kv_heads, 0) for part in seen)
        weights = torch.softmax((keys @ q[row, :, :, None])[..., 0] * layer.scale, -1)
        rows.append((weights[:, None] @ values)[:, 0].flatten())
    return torch.stack(rows)


def check(shape: Shape, lengths: Sequence[int], folder: Path, *, late: bool = True, seed: int = 0) -> Tensor:
    """Run a step and compare; returns the gained stream."""
    model = Emulated(shape, folder, late=late, seed=seed)
    model.build()
    given = Inputs.of(lengths, shape.pages)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in model.layers]
    wanted, stored = expected(model, given)
    gained, squares = model.stream(given.tokens, given.positions, given.slots, given.table, given.lengths)
    got = gained.float() * torch.rsqrt(squares.sum(1) / shape.hidden)[:, None]
    real = given.lengths > 0
    assert got.isfinite().all()
    assert float((got - wanted)[real].norm() / wanted[real].norm()) < 0.02  # bfloat16 has 8 bits
    page, slot = given.slots[real] // PAGE, given.slots[real] % PAGE
    for layer, old, new in zip(model.layers, before, stored, strict=True):
        for pages, was, wish in zip((layer.keys, layer.values), old, new, strict=True):
            assert float((pages[page, :, slot].float() - wish[real]).norm() / wish[real].norm()) < 0.02
            pages[page, :, slot] = was[page, :, slot]
            assert torch.equal(pages, was)  # nothing else was written
    assert not model._counters.any()
    return gained


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("lengths", [[1], [2], [17, 0, 64], [65, 66, 130, 9], [200]])
def test_a_step_is_what_plain_torch_computes(lengths: list[int], late: bool, folder: Path) -> None:
    check(Shape(), lengths, folder, late=late)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(bias=True),
        Shape(norms=True, dim=128, heads=4, kv_heads=2),
        Shape(heads=20, kv_heads=2, inner=576),  # more than eight queries share a key
        Shape(hidden=1088, inner=1600, heads=2, kv_heads=2, blocks=4),  # inputs that do not stay in registers
        Shape(hidden=128, inner=64, heads=1, kv_heads=1, blocks=5, layers=3),  # blocks and warps without work
    ],
    ids=["bias", "norms", "large groups", "long rows", "idle blocks"],
)
def test_shapes(shape: Shape, folder: Path) -> None:
    check(shape, [3, 70, 0, 130], folder)


@pytest.mark.parametrize("late", [False, True])
def test_sequences_are_split_among_blocks(late: bool, folder: Path) -> None:
    """Twice, because the last to come must leave counters as they were."""
    shape = Shape(hidden=128, inner=128, heads=3, kv_heads=1, blocks=11, pages=140)
    for lengths in ([700, 64, 300], [1500], [450], [65]):
        check(shape, lengths, folder, late=late, seed=len(lengths))


def test_as_many_rows_as_there_may_be_and_more_pairs_than_blocks(folder: Path) -> None:
    check(Shape(pages=80), [5, 1, 60, 0, 7, 33, 64, 16], folder)


def test_neither_interleaving_nor_company_changes_a_row(folder: Path) -> None:
    whole = check(Shape(), [65, 30, 130], folder)
    for seed in (1, 2):
        assert torch.equal(check(Shape(), [65, 30, 130], folder, seed=seed, late=False), whole)


def test_a_device_with_too_little_to_share_is_refused(folder: Path) -> None:
    model = Emulated(Shape(dim=128), folder, late=False, seed=0)
    model._room = 99 * 1024
    with pytest.raises(CudaError, match=r"must have \d+ bytes to share, got 101376"):
        model.build()
