"""Several LoRA adapters over one set of base weights, and passes whose rows use different ones.

    policy with adapted layers ─┬─ with using(rows): …   row t: y = W x + scale · B_k (A_k x), k the adapter of row t
                                └─ outside              y = W x

An adapter is a small set of tensors that knows nothing of the layers. Which adapter a row of a pass uses is said
around the pass, for the thread that computes it, so trainer and engine can compute at the same time. Rows of one
adapter do not see the others, not even through their infinities. peft has one set of active adapters for a whole
module, which is why its layers are not used here.
"""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import linear

from kitae.errors import ModelError
from kitae.models.policy import Policy
from kitae.models.state_seam import is_mixer

ATTENTION, MLP = "attention", "mlp"
_PARTS = {
    ATTENTION: ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"),
    MLP: ("gate_proj", "up_proj", "down_proj", "gate_up_proj"),
}
_now = threading.local()


@dataclass(frozen=True, slots=True)
class Factors:
    """What an adapter adds to one layer: `Factors(narrow [rank, in], wide [out, rank])`, the product times a scale."""

    narrow: Tensor
    wide: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """`Adapter(rank=8, alpha=32.0, factors={"model.layers.0.self_attn.q_proj": Factors(…), …})`."""

    rank: int
    alpha: float
    factors: dict[str, Factors]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def named(self) -> dict[str, Tensor]:
        """All tensors, by the names that peft gives them in a file."""
        found = {}
        for layer, factors in self.factors.items():
            found[f"base_model.model.{layer}.lora_A.weight"] = factors.narrow
            found[f"base_model.model.{layer}.lora_B.weight"] = factors.wide
        return found

    def frozen(self, dtype: torch.dtype) -> "Adapter":
        """A copy that later updates do not reach. Raises `ModelError` where a number is not finite."""
        made = {
            name: Factors(*(t.detach().to(dtype, copy=True) for t in (f.narrow, f.wide)))
            for name, f in self.factors.items()
        }
        broken = [name for name, f in made.items() if not (f.narrow.isfinite().all() and f.wide.isfinite().all())]
        if broken:
            raise ModelError(f"an adapter to sample from must be finite, got NaN or infinity in {broken[0]}")
        return Adapter(self.rank, self.alpha, made)


def read_adapter(folder: Path) -> Adapter:
    """An adapter as peft writes it, on the processor. Only plain LoRA: a product of two factors, times alpha / rank."""
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} must hold an adapter as peft writes it: {error}") from None
    if other := [name for name in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern") if config.get(name)]:
        raise ModelError(f"{folder}: an adapter must be plain LoRA, got one with {other[0]}")
    factors = {}
    for name in (n for n in tensors if n.endswith(".lora_A.weight")):
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        factors[layer] = Factors(tensors[name], tensors[name.replace(".lora_A.", ".lora_B.")])
    return Adapter(int(config["r"]), float(config["lora_alpha"]), factors)


def to_sample_from(adapter: Adapter, policy: Policy) -> Adapter:
    """A copy where the policy is, whose layers must all take it."""
    layers = adapted_layers(policy)
    for name, f in adapter.factors.items():
        weight = layers[name].base_layer.weight if name in layers else None
        if weight is None or weight.shape != (f.wide.shape[0], f.narrow.shape[1]):
            raise ModelError(f"{policy.source} has no layer {name} of the shape that the adapter has")
    moved = {n: Factors(f.narrow.to(policy.device), f.wide.to(policy.device)) for n, f in adapter.factors.items()}
    return Adapter(adapter.rank, adapter.alpha, moved).frozen(policy.dtype)


class Rows(Protocol):
    """Which adapters the rows of a pass use, and what these add to the output of a layer."""

    def delta(self, layer: str, x_TH: Tensor) -> Tensor | None: ...


class AdaptedLinear(nn.Module):
    """A linear layer to whose rows adapters add. `name` is that of the layer in the model."""

    active_adapters = ("rows",)  # not merged into the weight by anybody: see `kitae.models.lora.plain_part`
    lora_A = MappingProxyType[str, Any]({})

    def __init__(self, base_layer: nn.Linear, name: str) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.name = name

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x)
        rows: Rows | None = getattr(_now, "rows", None)
        if rows is None:
            return y
        delta = rows.delta(self.name, x.reshape(-1, x.shape[-1]))
        return y if delta is None else y + delta.view_as(y)


@contextmanager
def using(rows: Rows | None) -> Iterator[None]:
    """Passes of this thread use these adapters; None: no adapters."""
    before, _now.rows = getattr(_now, "rows", None), rows
    try:
        yield
    finally:
        _now.rows = before


def adapt(policy: Policy) -> None:
    """Make the linear layers of attention and MLP take adapters. The base weights do not learn from now on.

    Mixers get none: they compute the tokens of a row in another order.
    """
    policy.model.requires_grad_(False)
    names = {part: name for name, parts in _PARTS.items() for part in parts}
    modules = list(policy.model.named_modules())
    mixers = tuple(f"{name}." for name, module in modules if is_mixer(module))
    for name, module in modules:
        if type(module) is nn.Linear and name.rpartition(".")[2] in names and not name.startswith(mixers):
            parent, _, own = name.rpartition(".")
            setattr(policy.model.get_submodule(parent), own, AdaptedLinear(module, name))
    if not adapted_layers(policy):
        raise ModelError(f"{policy.source}: {type(policy.base).__name__} has no linear layers that take adapters")


def adapted_layers(policy: Policy) -> dict[str, AdaptedLinear]:
    return {m.name: m for m in policy.model.modules() if isinstance(m, AdaptedLinear)}


def fresh_adapter(
    policy: Policy, rank: int, alpha: float, seed: int, parts: Sequence[str] = (ATTENTION, MLP)
) -> Adapter:
    """An adapter that adds nothing yet, with float32 parameters. parts: those of a layer that it adapts."""
    draw = torch.Generator().manual_seed(seed)
    wanted = {own for part in parts for own in _PARTS[part]}
    factors = {}
    for name, layer in adapted_layers(policy).items():
        if name.rpartition(".")[2] not in wanted:
            continue
        out, width = layer.base_layer.weight.shape
        narrow = (torch.rand(rank, width, generator=draw) * 2 - 1) / width**0.5
        made = (narrow.to(policy.device), torch.zeros(out, rank, device=policy.device))
        factors[name] = Factors(*(nn.Parameter(t) for t in made))
    return Adapter(rank, alpha, factors)


class SlicedRows:
    """Rows that lie together adapter by adapter; gradients reach the factors. `SlicedRows([(first, 0, 24), …])`: the
    adapter of the rows [start, stop); rows that are not mentioned have none."""

    def __init__(self, parts: Sequence[tuple[Adapter | None, int, int]]) -> None:
        self._parts = [(adapter, start, stop) for adapter, start, stop in parts if adapter is not None and stop > start]

    def delta(self, layer: str, x_TH: Tensor) -> Tensor | None:
        pieces: list[Tensor] = []
        end, width = 0, 0
        for adapter, start, stop in self._parts:
            factors = adapter.factors.get(layer)
            if factors is None:
                continue
            width = len(factors.wide)
            if start > end:
                pieces.append(x_TH.new_zeros(start - end, width))
            narrow_TR = linear(x_TH[start:stop], factors.narrow.to(x_TH.dtype))
            pieces.append(linear(narrow_TR, factors.wide.to(x_TH.dtype)) * adapter.scale)
            end = stop
        if not pieces:
            return None
        if end < len(x_TH):
            pieces.append(x_TH.new_zeros(len(x_TH) - end, width))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class AdapterStack:
    """The factors of several adapters, of any ranks, side by side: one batched product computes the rows of all.

    Smaller ranks are filled up with zeros, so nothing changes but the place of what is added. None in the list: rows
    without an adapter.
    """

    def __init__(self, adapters: Sequence[Adapter | None]) -> None:
        self.adapters = tuple(adapters)
        self._made: dict[str, tuple[Tensor, Tensor] | None] = {}

    def factors(self, layer: str) -> tuple[Tensor, Tensor] | None:
        """`[K, in, R]` and `[K, R, out]`, the scale in the latter; None: nobody adapts this layer."""
        if layer not in self._made:
            self._made[layer] = self._make(layer)
        return self._made[layer]

    def _make(self, layer: str) -> tuple[Tensor, Tensor] | None:
        known = [None if a is None else a.factors.get(layer) for a in self.adapters]
        some = next((f for f in known if f is not None), None)
        if some is None:
            return None
        rank = max(len(f.narrow) for f in known if f is not None)
        narrow = some.narrow.new_zeros(len(known), some.narrow.shape[1], rank)
        wide = some.wide.new_zeros(len(known), rank, len(some.wide))
        for k, (adapter, own) in enumerate(zip(self.adapters, known, strict=True)):
            if adapter is not None and own is not None:
                narrow[k, :, : adapter.rank] = own.narrow.t()
                wide[k, : adapter.rank] = own.wide.t() * adapter.scale
        return narrow, wide


class StackedRows:
    """Rows in any order, without gradients: gathered by adapter, multiplied, and put back."""

    def __init__(self, stack: AdapterStack, adapters: Sequence[Adapter | None], device: torch.device) -> None:
        """adapters: of each row."""
        self._stack = stack
        place = {id(adapter): k for k, adapter in enumerate(stack.adapters)}
        own: list[list[int]] = [[] for _ in stack.adapters]
        for t, adapter in enumerate(adapters):
            own[place[id(adapter)]].append(t)
        height = max(map(len, own))
        self._taken_KN = torch.tensor([rows + [0] * (height - len(rows)) for rows in own], device=device)
        back = [0] * len(adapters)
        for k, rows in enumerate(own):
            for n, t in enumerate(rows):
                back[t] = k * height + n
        self._back_T = torch.tensor(back, device=device)

    def delta(self, layer: str, x_TH: Tensor) -> Tensor | None:
        factors = self._stack.factors(layer)
        if factors is None:
            return None
        narrow, wide = factors
        if len(narrow) == 1:
            return (x_TH @ narrow[0]) @ wide[0]
        y_KNH = torch.bmm(torch.bmm(x_TH[self._taken_KN], narrow), wide)
        return y_KNH.flatten(0, 1)[self._back_T]


class RowAdapters:
    """Makes the `Rows` of one pass after the other, and keeps the stack as long as the same adapters are in use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stack = AdapterStack(())

    def of(self, adapters: Sequence[Adapter | None]) -> Rows | None:
        """adapters: of each row."""
        distinct = list({id(a): a for a in adapters}.values())
        if all(a is None for a in distinct):
            return None
        known = {id(a) for a in self._stack.adapters}
        if {id(a) for a in distinct} != known:
            self._stack = AdapterStack(distinct)
        return StackedRows(self._stack, adapters, self._device)
