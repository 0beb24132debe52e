"""Exact mode: a model whose log-probs do not depend on what else is computed with a token, bit for bit.

Every module that sums numbers, or computes more than a sum or product of two, is replaced by one that treats each row
alike: linear layers and norms by kernels, other norms in tiles of a fixed shape. On a CPU, vectorised functions may
round the last elements of an array differently, so activations run row by row unless a kernel has them, and rotary
angles come from a table. What remains (sums, products, gathers) rounds each element independently.

Models are refused if they have other parameters (experts, convolutions), a scaled or capped head, or rotary angles that
depend on the length, or if they fail the probe of `check`.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from kitae.errors import ModelError
from kitae.kernels.base import ModuleKernels
from kitae.kernels.devices import training_kernels
from kitae.kernels.exact.exact_attention import Reach, as_pages, attend
from kitae.kernels.exact.exact_products import MANY, TILE, linear, missing
from kitae.models.attention_seam import AttentionContext
from kitae.models.fuse import fuse_with
from kitae.models.logprobs import HeadTransform
from kitae.models.parts import text_part
from kitae.models.policy import Policy

_ANGLES = 512  # positions of the rotary table that are computed together
_PROBE = [1, 30, 9]  # the probe's tokens in each of several passes


def make_exact(policy: Policy) -> None:
    """Replace the modules of a loaded policy, its adapters included."""
    model, source, device, dtype = text_part(policy.base), policy.source, policy.device, policy.dtype
    if reason := missing(device, dtype, policy.head_dim):
        raise ModelError(f"model.exact does not cover {source} in {dtype} on {device}: {reason}")
    if policy.vision is not None and policy.vision.moves:
        raise ModelError(f"model.exact does not cover {source}: its pictures turn tokens by rows and columns")
    _refuse_unknown(model, source)
    kernels = training_kernels(device, dtype)
    assert kernels is not None
    for module in (*_modules(model), policy.head):
        if _is_linear(module):
            module.forward = MethodType(_linear, module)  # bound, so that a deep copy uses its own weights
    fuse_with(ModuleKernels(kernels.modules.rms_norm, kernels.modules.swiglu), model, device)
    for module in _modules(model):
        if "forward" in vars(module):
            continue
        if _is_norm(module):
            module.forward = MethodType(_norm, module)
        elif device.type == "cpu" and _is_activation(module):
            module.forward = MethodType(_activation, module)
        elif device.type == "cpu" and _is_rotary(module):
            module.forward = MethodType(_rotary, module)


def _modules(model: Any) -> list[Any]:
    return list(model.modules())


def _linear(self: Any, x: Tensor) -> Tensor:
    return linear(x, self.weight, self.bias)


def _norm(self: Any, x: Tensor) -> Tensor:
    return _in_tiles(self, x, TILE)


def _activation(self: Any, x: Tensor) -> Tensor:
    return _in_tiles(self, x, 1)


def _in_tiles(module: Any, x: Tensor, tile: int) -> Tensor:
    """The module's own forward pass on rows of the last dimension, `tile` at a time."""
    rows = x.reshape(-1, x.shape[-1])
    filled = nn.functional.pad(rows, (0, 0, 0, -len(rows) % tile))
    out = torch.cat([type(module).forward(module, part) for part in torch.split(filled, tile)])
    return out[: len(rows)].view(x.shape)


def _rotary(self: Any, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Rotary angles from a table that is always computed in the same blocks of positions."""
    tables: dict[Any, list[tuple[Tensor, Tensor]]] = self.__dict__.setdefault("kitae_angles", {})
    blocks = tables.setdefault((x.dtype, args, *kwargs.items()), [])
    with torch.inference_mode(False), torch.no_grad():  # the engine may compute what the trainer differentiates through
        for i in range(len(blocks), int(position_ids.max()) // _ANGLES + 1):
            positions = torch.arange(i * _ANGLES, (i + 1) * _ANGLES)[None]
            like = torch.empty(0, dtype=x.dtype)
            cos, sin = type(self).forward(self, like, positions, *args, **kwargs)
            blocks[i : i + 1] = [(cos[0], sin[0])]
    cos, sin = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*blocks, strict=True))
    return cos[position_ids], sin[position_ids]


def _is_linear(module: Any) -> bool:
    return type(module) is nn.Linear


def _is_norm(module: Any) -> bool:
    return "Norm" in type(module).__name__


def _is_activation(module: Any) -> bool:
    return type(module).__module__ in ("torch.nn.modules.activation", "transformers.activations")


def _is_rotary(module: Any) -> bool:
    return type(module).__name__.endswith("RotaryEmbedding")


def _refuse_unknown(model: Any, source: str) -> None:
    for name, module in model.named_modules():
        if _is_rotary(module) and any(
            kind in str(getattr(module, "rope_type", "")) for kind in ("dynamic", "longrope")
        ):
            raise ModelError(f"model.exact does not cover {source}: the angles of {name} depend on the length")
        own = [n for n, _ in module.named_parameters(recurse=False)]
        known = _is_linear(module) or isinstance(module, nn.Embedding) or _is_norm(module)
        if own and not known and not hasattr(module, "get_delta_weight"):
            raise ModelError(f"model.exact does not cover {source}: {name} ({type(module).__name__}) has {own[0]!r}")


class _Copies:
    """Attention over many sequences of one length in a packed row."""

    def __init__(self, policy: Policy, count: int, length: int) -> None:
        group = policy.heads // policy.kv_heads
        rows = [(i * length, length, 0, range(i * length, (i + 1) * length)) for i in range(count)]
        self.reach = Reach.of(rows, 1, group, policy.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
        return attend(q, as_pages(k), as_pages(v), self.reach, **settings)


class _Growing:
    """Attention over a sequence that is computed in several passes, whose keys and values are kept."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
        if layer in self.layers:
            before = self.layers[layer]
            k, v = torch.cat((before[0], k), 1), torch.cat((before[1], v), 1)
        self.layers[layer] = k, v
        new, length = q.shape[1], k.shape[1]
        group = self.policy.heads // self.policy.kv_heads
        reach = Reach.of([(0, new, length - new, range(length))], 1, group, q.device)
        return attend(q, as_pages(k), as_pages(v), reach, **settings)


def check(policy: Policy) -> None:
    """Raise unless a probe sequence has the same log-probs alone, in several passes, and among many copies."""
    if policy.transform != HeadTransform():
        raise ModelError(f"model.exact does not cover {policy.source}: its head scales or caps the logits")
    if len(sizes := {call.size for call in policy.attended()}) > 1:
        raise ModelError(
            f"model.exact does not cover {policy.source}: heads of keys differ from layer to layer, got {sorted(sizes)}"
        )
    kernels = training_kernels(policy.device, policy.dtype)
    assert kernels is not None
    tokens = torch.arange(sum(_PROBE) + 1, device=policy.device) * 7919 % policy.vocabulary
    positions = torch.arange(len(tokens) - 1, device=policy.device)

    def logprobs(at: Tensor, context: AttentionContext) -> Tensor:
        logits = policy.logits(policy.hidden(tokens[at], at, context))
        return kernels.row_statistics(logits, tokens[at + 1], 1.0)[0]

    with torch.no_grad():  # not inference mode: what this gathers of a sharded model is trained with later
        whole = logprobs(positions, _Growing(policy))
        growing = _Growing(policy)
        parts = torch.cat([logprobs(at, growing) for at in torch.split(positions, _PROBE)])
        count = MANY[policy.device.type] // len(positions) + 1
        many = logprobs(positions.repeat(count), _Copies(policy, count, len(positions))).view(count, -1)
    for name, found in (("in several passes", parts), ("among many others", many)):
        if (gap := (found - whole).abs().max().item()) != 0:
            raise ModelError(
                f"model.exact does not cover {policy.source} on {policy.device}: a probe computed {name} differs by "
                f"{gap:.2g} from the same alone"
            )
