"""Which kind of decoder layer a module is, by its parts: what fused modules and the engine's decoders are made for.

Names and shapes of the parts decide, and whether a norm rounds as a known one does. Only a comparison on a probe can
show what else a layer computes; the callers compare before they replace anything.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kitae.kernels.norms import Norm, NormRule
from kitae.models.lora import plain_part
from kitae.models.routing import is_router, takes_largest

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_NORMS = {"q_norm", "k_norm"}
LIMITED_EXPERTS = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
_DROPOUTS = {"resid_attn_dropout", "resid_mlp_dropout"}


def is_llama_layer(layer: Any, *, adapted: bool = False) -> bool:
    """RMSNorm before attention and MLP, linear layers, biases of q, k and v or of none, gated SiLU MLP.

    Queries and keys may have norms. adapted: linear layers may have adapters that add to their weights.
    """
    return _is_llama_but_for_mlp(layer, adapted) and _is_gated(layer.mlp, adapted)


def is_mixture_layer(layer: Any, *, adapted: bool = False) -> bool:
    """The same with experts for an MLP (Mixtral, Qwen3-MoE): a router that is a product and a softmax, gated SiLU."""
    return _is_llama_but_for_mlp(layer, adapted) and _is_mixture(layer.mlp)


def is_packed_layer(layer: Any) -> bool:
    """As `is_llama_layer`, with one weight for q, k and v, and one for gate and up (Phi-3)."""
    if _children(layer) - _DROPOUTS != _LAYER:
        return False
    attn, mlp = layer.self_attn, layer.mlp
    if _children(attn) != {"qkv_proj", "o_proj"} or _children(mlp) != {"gate_up_proj", "down_proj", "activation_fn"}:
        return False
    linear = [attn.qkv_proj, attn.o_proj, mlp.gate_up_proj, mlp.down_proj]
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    return (
        _are_linear(linear, adapted=True)
        and all(m.bias is None for m in linear)
        and all(map(is_rms_norm, norms))
        and is_silu(mlp.activation_fn)
        and not has_limit(mlp)
    )


class Halves(NamedTuple):
    """Names of the norms of a layer; None: there is no norm."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None


_HALVES = (
    Halves("input_layernorm", None, "post_attention_layernorm", None),  # Llama
    Halves("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    Halves(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),  # OLMo 2; above, Gemma 2
)


def halves_of(layer: Any) -> Halves | None:
    """The names of the norms of a decoder layer; None if it has other norms than the known kinds."""
    names = _children(layer) - {"self_attn", "mlp"} - _DROPOUTS
    return next((halves for halves in _HALVES if names == set(filter(None, halves))), None)


def is_known_layer(layer: Any) -> bool:
    """Whether the engine's decoders have kernels for a layer: `is_llama_layer`, with adapters, and similar kinds.

    There may be norms of what attention and MLP return, a bias after attention, GELU for SiLU, experts (also those of
    gpt-oss), norms of queries and keys over all heads, and norms that add 1 to their weight.
    """
    halves = halves_of(layer) if {"self_attn", "mlp"} <= _children(layer) else None
    if halves is None or any(norm_of(getattr(layer, name)) is None for name in halves if name):
        return False
    attn, mlp = layer.self_attn, layer.mlp
    if is_packed_layer(layer):
        return True
    if _children(attn) - _NORMS != {"q_proj", "k_proj", "v_proj", "o_proj"}:
        return False
    linear = [attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj]
    norms = [getattr(attn, name) for name in _NORMS if hasattr(attn, name)]
    return (
        _are_linear(linear, adapted=True)
        and len({m.bias is None for m in linear[:3]}) == 1
        and all(norm_of(norm) is not None for norm in norms)
        and len(norms) in (0, 2)
        and (_is_gated(mlp, adapted=True, gelu=True) or _is_mixture(mlp) or is_limited_mixture(mlp))
    )


def _is_llama_but_for_mlp(layer: Any, adapted: bool) -> bool:
    if _children(layer) != _LAYER or _children(layer.self_attn) - _NORMS != {"q_proj", "k_proj", "v_proj", "o_proj"}:
        return False
    attn = layer.self_attn
    linear = [attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj]
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attn, n) for n in _NORMS if hasattr(attn, n)]
    return (
        _are_linear(linear, adapted)
        and attn.o_proj.bias is None
        and len({m.bias is None for m in linear[:3]}) == 1
        and all(map(is_rms_norm, norms))
        and len(norms) in (2, 4)
    )


def _is_gated(mlp: Any, adapted: bool, *, gelu: bool = False) -> bool:
    """Whether it is a gated MLP with SiLU, or, with `gelu`, one with GELU."""
    if _children(mlp) != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return False
    linear = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    known = is_silu(mlp.act_fn) or (gelu and is_gelu(mlp.act_fn))
    return _are_linear(linear, adapted) and all(m.bias is None for m in linear) and known and not has_limit(mlp)


def _are_linear(modules: list[Any], adapted: bool) -> bool:
    return all(plain_part(m) is not None for m in modules) if adapted else are_plain(*modules)


def _is_mixture(mlp: Any) -> bool:
    if _children(mlp) != {"gate", "experts"} or not is_router(mlp.gate):
        return False
    weights = [{name for name, _ in part.named_parameters()} for part in (mlp.gate, mlp.experts)]
    if weights != [{"weight"}, {"gate_up_proj", "down_proj"}] or not is_silu(getattr(mlp.experts, "act_fn", None)):
        return False
    return takes_largest(mlp.gate) and not has_limit(mlp.experts)


def is_limited_mixture(mlp: Any) -> bool:
    """Experts and router as gpt-oss has them: both with biases, gate and up in turn, and limits for them."""
    if _children(mlp) != {"router", "experts"} or not is_router(mlp.router):
        return False
    router, experts = ({name for name, _ in part.named_parameters()} for part in (mlp.router, mlp.experts))
    known = (
        router == {"weight", "bias"}
        and experts == set(LIMITED_EXPERTS)
        and {"alpha", "limit"} <= vars(mlp.experts).keys()
    )
    return known and takes_largest(mlp.router)


def has_limit(mlp: Any) -> bool:
    """Whether gate and up have limits, which a probe of a whole layer need not reach (DeepSeek-V4, Step 3.7)."""
    numbers = [v for name, v in vars(mlp).items() if "limit" in name and isinstance(v, int | float)]
    return any(0 < number < math.inf for number in numbers)


def _children(module: Any) -> set[str]:
    return {name for name, _ in module.named_children()}


def is_silu(function: Any) -> bool:
    return type(function).__name__ in ("SiLU", "SiLUActivation")


def is_gelu(function: Any) -> bool:
    """Whether it is GELU in its tanh form, as torch computes it."""
    form = getattr(getattr(function, "act", None), "keywords", {})
    return type(function).__name__ == "GELUTanh" and form == {"approximate": "tanh"}


def is_rms_norm(module: Any) -> bool:
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")


def norm_of(module: Any) -> Norm | None:
    """The description of a norm over the root mean square with a weight; None for other modules."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float) or not isinstance(getattr(module, "weight", None), Tensor):
        return None
    kind: Any = type(module)
    rule = _rule_of(kind)
    return None if rule is None else Norm(module.weight, eps, rule)


@functools.cache
def _rule_of(kind: type[nn.Module]) -> NormRule | None:
    """The rule of a class of norms, found by trying: a small norm in bfloat16 must give the same bits."""
    if not kind.__name__.endswith("RMSNorm"):
        return None
    with torch.device("cpu"), torch.inference_mode(False), torch.no_grad():
        x, gain = (torch.linspace(1, 9, n, dtype=torch.float32).sin().bfloat16() for n in (2048, 64))
        x = x.view(32, 64)
        try:
            module: Any = kind(64)
            module.weight = nn.Parameter(gain)
            found = module(x)
        except (RuntimeError, TypeError, ValueError, AttributeError):
            return None
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float):
        return None
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    made = {
        NormRule.EARLY: gain * wide.bfloat16(),
        NormRule.LATE: (gain * wide).bfloat16(),
        NormRule.LATE_PLUS_ONE: (wide * (1.0 + gain.float())).bfloat16(),
    }
    return next((rule for rule, expected in made.items() if torch.equal(found, expected)), None)


def are_plain(*modules: Any) -> bool:
    """Whether all are plain linear layers, without adapters, which may need inputs and outputs elsewhere."""
    return all(type(module) is nn.Linear for module in modules)
