"""Replace the forward passes of norms, gated MLPs, experts, attention and whole layers by compiled kernels.

Whole decoder layers of the Llama family become one function, whose norms are not kept for the backward pass, and
whose weights are laid together where one product uses them. A module is replaced only after its own forward pass and
the fused one agreed on a probe, so an unknown variant (a norm that adds 1 to its weight, say) simply stays as it is.
Parameters, names and saved models do not change.
"""

import functools
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from kitae.kernels.allocation import has_master, lay_together
from kitae.kernels.base import GateLimits, HeadNorms, LayerKernels, ModuleKernels
from kitae.kernels.devices import training_kernels
from kitae.kernels.norms import NormRule
from kitae.models.attention_seam import masked_attention
from kitae.models.empty import is_empty, random_layers
from kitae.models.layer_kinds import LIMITED_EXPERTS, are_plain, has_limit, is_llama_layer, is_silu, norm_of


def fuse(model: nn.Module, device: torch.device, dtype: torch.dtype) -> int:
    """Replace what kernels of the device can compute; returns how many modules were replaced."""
    kernels = training_kernels(device, dtype)
    return 0 if kernels is None else fuse_with(kernels.modules, model, device)


def fuse_with(kernels: ModuleKernels, model: nn.Module, device: torch.device) -> int:
    """The same with these kernels. Embeddings and linear layers do not count, since they compute the same as before."""
    units = random_layers(model, device) if is_empty(model) else [model]
    return sum(_fuse_unit(kernels, unit) for unit in units)


def _fuse_unit(kernels: ModuleKernels, unit: nn.Module) -> int:
    for module in unit.modules():
        _direct_embedding(module, kernels)
        _direct_linear(module, kernels)
    kinds = (_fuse_layer, _fuse_norm, _fuse_mlp, _fuse_experts, _fuse_attention)
    return sum(any(fuse_kind(m, kernels) for fuse_kind in kinds) for m in unit.modules())


def unfuse(model: nn.Module) -> None:
    """Undo the replacement of modules that are made of others; norms stay fused."""
    for module in model.modules():
        fused = vars(module).get("forward")
        if fused is not None and fused.__func__.__module__ == __name__ and any(module.children()):
            del module.forward


@contextmanager
def without_kernels(model: nn.Module) -> Iterator[None]:
    """Modules compute as their classes define it meanwhile."""
    with ExitStack() as after:
        for module in model.modules():
            fused = vars(module).get("forward")
            if getattr(getattr(fused, "__func__", None), "__module__", "") == __name__:
                after.callback(setattr, module, "forward", fused)
                del module.forward
        yield


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
    if not is_silu(module.act_fn) or has_limit(module):
        return False

    def forward(self: Any, x: Tensor) -> Any:
        gate_up = self.gate_proj, self.up_proj
        gate, up = _project(x, gate_up, layers)
        if layers is not None and are_plain(*gate_up, self.down_proj) and self.down_proj.bias is None:
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

    names = LIMITED_EXPERTS if limited else LIMITED_EXPERTS[:2]
    dtype, width = module.gate_up_proj.dtype, module.gate_up_proj.shape[1 if limited else 2]
    return _swap_if_equal_experts(module, forward_limited if limited else forward, width)


def _are_experts(module: Any) -> bool:
    """Whether names and shapes of the weights are those of gated experts; a probe must show what they compute."""
    parameters = dict(module.named_parameters())
    if parameters.keys() != {"gate_up_proj", "down_proj"} or not is_silu(getattr(module, "act_fn", None)):
        return False
    if has_limit(module):
        return False
    gate_up, down = parameters["gate_up_proj"], parameters["down_proj"]
    if gate_up.dim() != 3 or not (gate_up.is_contiguous() and down.is_contiguous()):
        return False
    count, height, width = gate_up.shape
    given = [*inspect.signature(type(module).forward).parameters]
    called_alike = given == ["self", "hidden_states", "top_k_index", "top_k_weights"]
    return down.shape == (count, width, height // 2) and down.dtype == gate_up.dtype and called_alike


def _are_limited_experts(module: Any) -> bool:
    """Whether names and shapes of the weights are those of the experts of gpt-oss."""
    parameters = dict(module.named_parameters())
    if parameters.keys() != set(LIMITED_EXPERTS) or not {"alpha", "limit"} <= vars(module).keys():
        return False
    given = [*inspect.signature(type(module).forward).parameters]
    return (
        len({p.dtype for p in parameters.values()}) == 1
        and all(p.is_contiguous() for p in parameters.values())
        and given == ["self", "hidden_states", "router_indices", "routing_weights"]
    )


def _fuse_attention(module: Any, kernels: ModuleKernels) -> bool:
    """Attention modules of the Llama family: projections, rotary as one kernel, and the context's attention."""
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
        if not _turns_whole_heads(self, position_embeddings):
            given = {"position_embeddings": position_embeddings, "attention_mask": attention_mask, **kwargs}
            return type(self).forward(self, hidden_states, **given)  # type: ignore[no-any-return]
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
    """Let embeddings, plain or multiplied (Gemma), add their gradient to that of the master; others may do more."""
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
    """Let a linear layer that is fused with no other add its gradient to that of the master."""
    layers = kernels.layers
    if layers is None or kernels.embedding is None or type(module) is not nn.Linear:
        return

    def forward(self: Any, input: Tensor) -> Tensor:
        return layers.linears(input, self)[0] if has_master(self.weight) else nn.Linear.forward(self, input)

    module.forward = MethodType(forward, module)  # type: ignore[method-assign]


def _fuse_layer(module: Any, kernels: ModuleKernels) -> bool:
    """A layer of which `is_llama_layer` holds. Once it gets an adapter, it runs as its class defines it."""
    layers = kernels.layers
    if layers is None or not is_llama_layer(module) or not _has_known_heads(module.self_attn):
        return False
    seen: dict[str, Any] = {}

    def forward(self: Any, hidden_states: Tensor, **given: Any) -> Any:
        attn, mlp = self.self_attn, self.mlp
        of_attention = attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj
        known = are_plain(*of_attention, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        if not known or not _turns_whole_heads(attn, given.get("position_embeddings")):
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


def _turns_whole_heads(attn: Any, angles: tuple[Tensor, Tensor] | None) -> bool:
    """Whether rotary turns all numbers of a head; the probe's angles do, and those of the model may be fewer."""
    return angles is not None and angles[0].shape[-1] == attn.head_dim


def _head_norms(attn: Any) -> HeadNorms | None:
    if not hasattr(attn, "q_norm"):
        return None
    return HeadNorms(attn.q_norm.weight, attn.k_norm.weight, attn.q_norm.variance_epsilon)


def _has_known_heads(attn: Any) -> bool:
    """Whether queries and keys have no norms, or norms of each head that round as Llama's do."""
    if not hasattr(attn, "q_norm"):
        return True
    q, k = norm_of(attn.q_norm), norm_of(attn.k_norm)
    if q is None or k is None or not q.weight.shape == k.weight.shape == (attn.head_dim,):
        return False
    return q.eps == k.eps and q.rule == k.rule == NormRule.EARLY


def _recomputes_itself(layer: Any) -> bool:
    """Whether `forward` itself must recompute activations.

    transformers 5.23 does it in the `forward` of the class, which a fused one replaces; older versions do it around the
    call, whatever `forward` is.
    """
    around = type(layer).__call__ is not nn.Module.__call__
    return layer.training and getattr(layer, "gradient_checkpointing", False) and not around


def _project(x: Tensor, modules: tuple[Any, ...], layers: LayerKernels | None) -> tuple[Tensor, ...]:
    if layers is not None and are_plain(*modules):
        return layers.linears(x, *modules)
    return tuple(module(x) for module in modules)


def _swap_if_equal(module: Any, function: Any, weight: Tensor) -> bool:
    """Replace the forward pass if both agree: in each element of usual rows, and as a whole in large ones."""
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
    """The same for modules that attend; `seen` receives the settings with which the module calls its context."""
    probe = _probe(weight)
    angles = torch.linspace(0, 9, 2 * head_dim // 2, device=weight.device).view(1, 2, -1).repeat(1, 1, 2)
    turn = angles.cos().to(weight.dtype), angles.sin().to(weight.dtype)
    fused = MethodType(function, module)

    class Recorder:
        """Both tokens see both."""

        def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
            calls.append({**settings, "layer": layer})
            return masked_attention(q, k, v, None, scale=settings["scale"], softcap=None, sinks=None)

    calls: list[dict[str, Any]] = []
    results = []
    with torch.inference_mode():
        try:
            for run in (module, fused):
                results.append(run(probe, position_embeddings=turn, attention_mask=None, kitae=Recorder()))
                seen.update(calls[0])  # those of the module: the fused one repeats them
        except (*_NOT_ALIKE, AttributeError, IndexError):
            return False
    if len(calls) != 2 or calls[0]["sinks"] is not None:
        return False
    expected, got = ((r[0] if isinstance(r, tuple) else r).float() for r in results)
    if (got - expected).norm() > (1e-4 if weight.dtype == torch.float32 else 2e-2) * expected.norm():
        return False
    module.forward = fused
    return True


def _swap_if_equal_experts(module: Any, function: Any, width: int) -> bool:
    """The same for experts: gates do not add up to 1, and an expert is chosen by none, one or both of the tokens."""
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
_NOT_ALIKE = (
    RuntimeError,
    TypeError,
    AssertionError,
    KeyError,
)  # raised by modules for arguments that they do not know


def _tolerance(like: Tensor) -> float:
    return 1e-5 if like.dtype == torch.float32 else 2e-2


def _are_close(expected: Tensor, got: Tensor) -> bool:
    """Whether two tensors agree as wholes, since their small elements may be rounded away. Zeros prove nothing."""
    size = float(expected.double().norm())
    return size > 0 and float((got.double() - expected.double()).norm()) <= _tolerance(expected) * size


def _probe(weight: Tensor, width: int | None = None) -> Tensor:
    """Two tokens for a module with this weight."""
    width = weight.shape[-1] if width is None else width
    wave = torch.linspace(-3, 3, 2 * width, dtype=torch.float32).sin()
    return wave.view(1, 2, width).to(weight.device, weight.dtype)
