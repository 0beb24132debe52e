"""Run the slow small modules of a model through compiled kernels, where that is exact: norms, gated MLPs, experts,
rotary.

Whole decoder layers of the Llama family become one function, whose norms are not kept for the backward pass, and whose
weights are laid together where one product uses them.
A module is replaced only after its own forward pass and the fused one agreed on a probe, so an unknown variant (a
norm that adds 1 to its weight, say) simply stays as it is. Parameters, names and saved models do not change.
"""

import functools
import inspect
import math
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kitae.kernels.allocation import has_master, lay_together
from kitae.kernels.base import GateLimits, HeadNorms, LayerKernels, ModuleKernels
from kitae.kernels.devices import training_kernels
from kitae.kernels.norms import Norm, NormRule
from kitae.models.attention_seam import masked_attention
from kitae.models.lora import plain_part
from kitae.models.routing import is_router, takes_largest


def fuse(model: nn.Module, device: torch.device, dtype: torch.dtype) -> int:
    """Replace what can be replaced by kernels of the device; returns how many modules were."""
    kernels = training_kernels(device, dtype)
    return 0 if kernels is None else fuse_with(kernels.modules, model)


def fuse_with(kernels: ModuleKernels, model: nn.Module) -> int:
    """The same, with these kernels only. Embeddings and linear layers do not count: what they compute is the same."""
    for module in model.modules():
        _direct_embedding(module, kernels)
        _direct_linear(module, kernels)
    kinds = (_fuse_layer, _fuse_norm, _fuse_mlp, _fuse_experts, _fuse_attention)
    return sum(any(fuse_kind(m, kernels) for fuse_kind in kinds) for m in model.modules())


def unfuse(model: nn.Module) -> None:
    """Let modules that are made of others run as their classes define them again; norms stay fused."""
    for module in model.modules():
        fused = vars(module).get("forward")
        if fused is not None and fused.__func__.__module__ == __name__ and any(module.children()):
            del module.forward


def _fuse_norm(module: Any, kernels: ModuleKernels) -> bool:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(eps, float) or weight is None:
        return False

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return kernels.rms_norm(hidden_states, self.weight, eps)

    return _swap_if_equal(module, forward, weight)


def _fuse_mlp(module: Any, kernels: ModuleKernels) -> bool:
    parts = ("gate_proj", "up_proj", "down_proj", "act_fn")
    if not all(hasattr(module, part) for part in parts) or not isinstance(module.gate_proj, nn.Module):
        return False
    if not _is_silu(module.act_fn) or _has_limit(module):
        return False

    def forward(self: Any, x: Tensor) -> Any:
        gate_up = self.gate_proj, self.up_proj
        gate, up = _project(x, gate_up, layers)
        if layers is not None and _are_plain(*gate_up, self.down_proj) and self.down_proj.bias is None:
            return layers.swiglu_linear(gate, up, self.down_proj.weight)
        return self.down_proj(kernels.swiglu(gate, up))

    layers = kernels.layers
    first: Any = module.gate_proj
    return _swap_if_equal(module, forward, first.weight)


def _fuse_experts(module: Any, kernels: ModuleKernels) -> bool:
    """Gated experts whose weights lie in two tensors; split over ranks, they run as their class defines them."""
    experts, limited = kernels.experts, _are_limited_experts(module)
    if experts is None or not (limited or _are_experts(module)):
        return False

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        weights = [getattr(self, name) for name in names]
        whole = all(type(w) in (nn.Parameter, Tensor) for w in weights)  # a part of one is another class
        alike = {t.dtype for t in (hidden_states, *weights)} == {dtype}
        if getattr(self, "_is_expert_parallel", False) or not (whole and alike):
            return type(self).forward(self, hidden_states, top_k_index, top_k_weights)
        gate_up, down, *biases = weights
        limits = GateLimits(biases[0], biases[1], self.alpha, self.limit) if limited else None
        return experts(hidden_states, top_k_index, top_k_weights, gate_up, down, limits)

    def forward_limited(self: Any, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Any:
        return forward(self, hidden_states, router_indices, routing_weights)

    names = _LIMITED if limited else _LIMITED[:2]
    dtype, width = module.gate_up_proj.dtype, module.gate_up_proj.shape[1 if limited else 2]
    return _swap_if_equal_experts(module, forward_limited if limited else forward, width)


def _are_experts(module: Any) -> bool:
    """By names and shapes: what is computed with them, a probe must tell."""
    parameters = dict(module.named_parameters())
    if parameters.keys() != {"gate_up_proj", "down_proj"} or not _is_silu(getattr(module, "act_fn", None)):
        return False
    if _has_limit(module):
        return False
    gate_up, down = parameters["gate_up_proj"], parameters["down_proj"]
    if gate_up.dim() != 3 or not (gate_up.is_contiguous() and down.is_contiguous()):
        return False
    count, height, width = gate_up.shape
    given = [*inspect.signature(type(module).forward).parameters]
    called_alike = given == ["self", "hidden_states", "top_k_index", "top_k_weights"]
    return down.shape == (count, width, height // 2) and down.dtype == gate_up.dtype and called_alike


def _are_limited_experts(module: Any) -> bool:
    """As gpt-oss has them."""
    parameters = dict(module.named_parameters())
    if parameters.keys() != set(_LIMITED) or not {"alpha", "limit"} <= vars(module).keys():
        return False
    given = [*inspect.signature(type(module).forward).parameters]
    return (
        len({p.dtype for p in parameters.values()}) == 1
        and all(p.is_contiguous() for p in parameters.values())
        and given == ["self", "hidden_states", "router_indices", "routing_weights"]
    )


def _fuse_attention(module: Any, kernels: ModuleKernels) -> bool:
    """Projections, rotary in one kernel, and the context: what the attention modules of the Llama family do."""
    children = {name for name, _ in module.named_children()} - {"q_norm", "k_norm"}
    rotary = kernels.rotary
    if children != {"q_proj", "k_proj", "v_proj", "o_proj"} or rotary is None:
        return False
    seen: dict[str, Any] = {}

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        assert attention_mask is None and past_key_values is None and hidden_states.shape[0] == 1
        x = hidden_states.squeeze(0)
        projected = _project(x, (self.q_proj, self.k_proj, self.v_proj), kernels.layers)
        q, k, v = (y.view(len(x), -1, self.head_dim) for y in projected)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = position_embeddings
        q, k = rotary(q, cos[0], sin[0]), rotary(k, cos[0], sin[0])
        out = kwargs["kitae"].attend(
            seen["layer"], q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1),
            scale=seen["scale"], window=seen["window"], softcap=seen["softcap"], sinks=None,
        )  # fmt: skip
        return self.o_proj(out.reshape(len(x), -1))[None], None

    return _swap_if_equal_attention(module, forward, module.q_proj.weight, module.head_dim, seen)


def _direct_embedding(module: Any, kernels: ModuleKernels) -> None:
    """Plain ones, and those times a number (Gemma), add their gradient where it belongs; others may do more."""
    embedding = kernels.embedding
    scaled = isinstance(getattr(module, "embed_scale", None), Tensor)
    if embedding is None or not (type(module) is nn.Embedding or (isinstance(module, nn.Embedding) and scaled)):
        return
    if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
        return

    def forward(self: Any, input: Tensor) -> Tensor:
        rows = embedding(input, self.weight, self.padding_idx)
        return rows * self.embed_scale.to(self.weight.dtype) if scaled else rows

    fused = MethodType(forward, module)
    with torch.inference_mode():
        probe = torch.arange(min(4, len(module.weight)), device=module.weight.device)
        if torch.equal(fused(probe), module(probe)):
            module.forward = fused  # type: ignore[method-assign]


def _direct_linear(module: Any, kernels: ModuleKernels) -> None:
    """So do linear layers that are in no function with others."""
    layers = kernels.layers
    if layers is None or kernels.embedding is None or type(module) is not nn.Linear:
        return

    def forward(self: Any, input: Tensor) -> Tensor:
        return layers.linears(input, self)[0] if has_master(self.weight) else nn.Linear.forward(self, input)

    module.forward = MethodType(forward, module)  # type: ignore[method-assign]


def _fuse_layer(module: Any, kernels: ModuleKernels) -> bool:
    """A decoder layer as `is_llama_layer` knows it; with an adapter in it, it runs as the class defines it."""
    layers = kernels.layers
    if layers is None or not is_llama_layer(module) or not _has_known_heads(module.self_attn):
        return False
    seen: dict[str, Any] = {}

    def forward(self: Any, hidden_states: Tensor, **given: Any) -> Any:
        attn, mlp = self.self_attn, self.mlp
        of_attention = attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj
        if not _are_plain(*of_attention, mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            return type(self).forward(self, hidden_states, **given)
        if _recomputes_itself(self):
            return self._gradient_checkpointing_func(functools.partial(compute, self, **given), hidden_states)
        return compute(self, hidden_states, **given)

    def compute(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: None = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        attn, mlp = self.self_attn, self.mlp
        qkv, gate_up = (attn.q_proj, attn.k_proj, attn.v_proj), (mlp.gate_proj, mlp.up_proj)
        assert attention_mask is None and past_key_values is None and hidden_states.shape[0] == 1
        assert position_embeddings is not None
        cos, sin = (part[0] for part in position_embeddings)
        first, second = ((n.weight, n.variance_epsilon) for n in (self.input_layernorm, self.post_attention_layernorm))
        x, q, k, v = layers.normed_qkv(
            hidden_states.squeeze(0), first, cos, sin, attn.head_dim, *qkv, heads=_head_norms(attn)
        )
        mixed = kwargs["kitae"].attend(
            seen["layer"], q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1),
            scale=seen["scale"], window=seen["window"], softcap=seen["softcap"], sinks=None,
        )  # fmt: skip
        (out,) = layers.linears(mixed.reshape(len(x), -1), attn.o_proj)
        x, gate, up = layers.normed_pair(x, out, second, *gate_up)
        return x[None] + layers.swiglu_linear(gate, up, mlp.down_proj.weight)[None]  # no view: sharded layers hook it

    weight, head_dim = module.self_attn.q_proj.weight, module.self_attn.head_dim
    if not _swap_if_equal_attention(module, forward, weight, head_dim, seen):
        return False
    attn, mlp = module.self_attn, module.mlp
    for linear in ((attn.q_proj, attn.k_proj, attn.v_proj), (mlp.gate_proj, mlp.up_proj)):
        lay_together([m.weight for m in linear])
        if linear[0].bias is not None:
            lay_together([m.bias for m in linear])
    if (norms := _head_norms(attn)) is not None:
        lay_together([norms.queries, norms.keys])
    return True


def _head_norms(attn: Any) -> HeadNorms | None:
    if not hasattr(attn, "q_norm"):
        return None
    return HeadNorms(attn.q_norm.weight, attn.k_norm.weight, attn.q_norm.variance_epsilon)


def _has_known_heads(attn: Any) -> bool:
    """Without norms, or with one of each head that rounds as Llama's do."""
    if not hasattr(attn, "q_norm"):
        return True
    q, k = norm_of(attn.q_norm), norm_of(attn.k_norm)
    if q is None or k is None or not q.weight.shape == k.weight.shape == (attn.head_dim,):
        return False
    return q.eps == k.eps and q.rule == k.rule == NormRule.EARLY


def _recomputes_itself(layer: Any) -> bool:
    """Whether activations are computed again, and `forward` must see to it: transformers 5.23 does in that of the
    class, which a fused one replaces; older ones do around the call, whatever `forward` is."""
    around = type(layer).__call__ is not nn.Module.__call__
    return layer.training and getattr(layer, "gradient_checkpointing", False) and not around


_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_NORMS = {"q_norm", "k_norm"}
_LIMITED = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
_DROPOUTS = {"resid_attn_dropout", "resid_mlp_dropout"}


def is_llama_layer(layer: Any, *, adapted: bool = False) -> bool:
    """RMSNorm before attention and MLP, linear layers, biases of q, k and v or of none, gated SiLU MLP.

    Queries and keys may have norms; `adapted`: linear layers, adapters that add to their weights. What it computes
    besides, a probe must tell.
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
        and _is_silu(mlp.activation_fn)
        and not _has_limit(mlp)
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
    """Which norms a decoder layer has, by their names; None: others than are known."""
    names = _children(layer) - {"self_attn", "mlp"} - _DROPOUTS
    return next((halves for halves in _HALVES if names == set(filter(None, halves))), None)


def is_known_layer(layer: Any) -> bool:
    """Of the kinds that the fused decoder has kernels for: `is_llama_layer`, with adapters, and what is like it.

    There may be norms of what attention and MLP return, a bias after attention, GELU for SiLU, experts (also those of
    gpt-oss), norms of queries and keys over all heads, and norms that add 1 to their weight. What it computes besides,
    a probe must tell.
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
    """gelu: that may be in the place of SiLU."""
    if _children(mlp) != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return False
    linear = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    known = _is_silu(mlp.act_fn) or (gelu and is_gelu(mlp.act_fn))
    return _are_linear(linear, adapted) and all(m.bias is None for m in linear) and known and not _has_limit(mlp)


def _are_linear(modules: list[Any], adapted: bool) -> bool:
    return all(plain_part(m) is not None for m in modules) if adapted else _are_plain(*modules)


def _is_mixture(mlp: Any) -> bool:
    if _children(mlp) != {"gate", "experts"} or not is_router(mlp.gate):
        return False
    weights = [{name for name, _ in part.named_parameters()} for part in (mlp.gate, mlp.experts)]
    if weights != [{"weight"}, {"gate_up_proj", "down_proj"}] or not _is_silu(getattr(mlp.experts, "act_fn", None)):
        return False
    return takes_largest(mlp.gate) and not _has_limit(mlp.experts)


def is_limited_mixture(mlp: Any) -> bool:
    """Experts and router as gpt-oss has them: both with biases, gate and up in turn, and limits for them."""
    if _children(mlp) != {"router", "experts"} or not is_router(mlp.router):
        return False
    router, experts = ({name for name, _ in part.named_parameters()} for part in (mlp.router, mlp.experts))
    known = router == {"weight", "bias"} and experts == set(_LIMITED) and {"alpha", "limit"} <= vars(mlp.experts).keys()
    return known and takes_largest(mlp.router)


def _has_limit(mlp: Any) -> bool:
    """Of gate and up, which no probe of a whole layer need reach (DeepSeek-V4, Step 3.7)."""
    numbers = [v for name, v in vars(mlp).items() if "limit" in name and isinstance(v, int | float)]
    return any(0 < number < math.inf for number in numbers)


def _children(module: Any) -> set[str]:
    return {name for name, _ in module.named_children()}


def _is_silu(function: Any) -> bool:
    return type(function).__name__ in ("SiLU", "SiLUActivation")


def is_gelu(function: Any) -> bool:
    """In its tanh form, as torch computes it."""
    form = getattr(getattr(function, "act", None), "keywords", {})
    return type(function).__name__ == "GELUTanh" and form == {"approximate": "tanh"}


def is_rms_norm(module: Any) -> bool:
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")


def norm_of(module: Any) -> Norm | None:
    """What a norm of a model computes, if it is one over the root mean square with a weight."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float) or not isinstance(getattr(module, "weight", None), Tensor):
        return None
    kind: Any = type(module)
    rule = _rule_of(kind)
    return None if rule is None else Norm(module.weight, eps, rule)


@functools.cache
def _rule_of(kind: type[nn.Module]) -> NormRule | None:
    """By trying: a small norm of this class in bfloat16 must give the same bits."""
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


def _project(x: Tensor, modules: tuple[Any, ...], layers: LayerKernels | None) -> tuple[Tensor, ...]:
    if layers is not None and _are_plain(*modules):
        return layers.linears(x, *modules)
    return tuple(module(x) for module in modules)


def _are_plain(*modules: Any) -> bool:
    """Not so with an adapter: that is another class, and it may need its inputs and outputs elsewhere."""
    return all(type(module) is nn.Linear for module in modules)


def _swap_if_equal(module: Any, function: Any, weight: Tensor) -> bool:
    """In each element, and with large rows by and large."""
    fused = MethodType(function, module)  # bound, so that a deep copy of the model uses its own weights
    probe = _probe(weight)
    with torch.inference_mode():
        try:
            (expected, got), large = ([run(rows) for run in (module, fused)] for rows in (probe, _LARGE * probe))
        except _NOT_ALIKE:
            return False
    tolerance = _tolerance(probe)
    small = tolerance * max(1.0, float(expected.double().square().mean().sqrt()))
    if not (torch.allclose(expected.float(), got.float(), rtol=tolerance, atol=small) and _are_close(*large)):
        return False
    module.forward = fused
    return True


def _swap_if_equal_attention(module: Any, function: Any, weight: Tensor, head_dim: int, seen: dict[str, Any]) -> bool:
    """For modules that attend; `seen` gets what they ask for, as the module itself does."""
    probe = _probe(weight)
    angles = torch.linspace(0, 9, 2 * head_dim // 2, device=weight.device).view(1, 2, -1).repeat(1, 1, 2)
    turn = angles.cos().to(weight.dtype), angles.sin().to(weight.dtype)
    fused = MethodType(function, module)

    class Recorder:
        """Both tokens see both."""

        def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
            seen.update(settings, layer=layer)
            return masked_attention(q, k, v, None, scale=settings["scale"], softcap=None, sinks=None)

    with torch.inference_mode():
        try:
            results = [
                run(probe, position_embeddings=turn, attention_mask=None, kitae=Recorder()) for run in (module, fused)
            ]
        except (*_NOT_ALIKE, AttributeError):
            return False
    if seen.get("sinks") is not None:
        return False
    expected, got = ((r[0] if isinstance(r, tuple) else r).float() for r in results)
    if (got - expected).norm() > (1e-4 if weight.dtype == torch.float32 else 2e-2) * expected.norm():
        return False
    module.forward = fused
    return True


def _swap_if_equal_experts(module: Any, function: Any, width: int) -> bool:
    """With gates that do not add up to 1, and experts that none, one or both of the tokens have chosen."""
    fused, count = MethodType(function, module), len(module.gate_up_proj)
    x = _probe(module.gate_up_proj, width)[0]
    chosen = torch.tensor([[0, 1], [count - 1, 0]], device=x.device)[:, : min(2, count)]
    gates = torch.tensor([[0.7, 0.4], [0.5, 0.2]], device=x.device, dtype=x.dtype)[:, : min(2, count)]
    with torch.inference_mode():
        try:
            results = [[run(rows, chosen, gates) for run in (module, fused)] for rows in (x, _LARGE * x)]
        except _NOT_ALIKE:
            return False
    if not all(_are_close(*pair) for pair in results):
        return False
    module.forward = fused
    return True


_LARGE = 1e4  # rows of this size show whether gate and up have limits
_NOT_ALIKE = (RuntimeError, TypeError, AssertionError, KeyError)  # what a module says to what it does not know


def _tolerance(like: Tensor) -> float:
    return 1e-5 if like.dtype == torch.float32 else 2e-2


def _are_close(expected: Tensor, got: Tensor) -> bool:
    """As wholes: what is small among them may be rounded away. What is nothing tells nothing."""
    size = float(expected.double().norm())
    return size > 0 and float((got.double() - expected.double()).norm()) <= _tolerance(expected) * size


def _probe(weight: Tensor, width: int | None = None) -> Tensor:
    """Two tokens for a module with this weight."""
    width = weight.shape[-1] if width is None else width
    wave = torch.linspace(-3, 3, 2 * width, dtype=torch.float32).sin()
    return wave.view(1, 2, width).to(weight.device, weight.dtype)
