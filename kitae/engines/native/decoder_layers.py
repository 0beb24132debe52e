"""What the decoder of a policy is made of: whether its layers are of a known kind, and a description of each.

The compiled decoders for CPUs and GPUs compute from this description. Known are RMSNorm before attention and MLP,
rotary, grouped queries, optional biases and norms of queries and keys, gated SiLU MLP (Llama, Mistral, Qwen2, Qwen3,
SmolLM2, …) or experts of that kind (Mixtral, Qwen3-MoE); the multipliers of Granite; weights that a model keeps as
one (Phi-3); norms of what attention and MLP return, beside those before them or in their place, norms that add 1 to
their weight, GELU, and rotary with a base for each kind of layer (Gemma, OLMo 2 and 3) or in some layers only
(SmolLM3, EXAONE 4), or of neighbours (ERNIE 4.5, Helium); norms over all heads (OLMoE); the experts of gpt-oss.

The weights of q, k and v, and those of gate and up, lie next to each other, so that one matrix product computes all
of them: they are moved if that was not done when the model was loaded. The parameters stay what they are for
everybody else, views of the common memory, and the trainer computes the same bits wherever they lie. Weights with
LoRA adapters are copies, merged with what the adapters add (`MergedWeights`).
"""

import inspect
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kitae.kernels.allocation import give_back, lay_together, take_again
from kitae.kernels.base import GateLimits
from kitae.kernels.norms import Norm, NormRule
from kitae.models import layer_kinds
from kitae.models.attention_seam import AttentionCall
from kitae.models.lora import merge_into, plain_part
from kitae.models.policy import Policy

_GATE_UP = ("gate_proj", "up_proj")


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """How a layer chooses experts; number: its place among the layers that do.

    limits: the biases and limits of the experts of gpt-oss.
    """

    number: int
    weight: Tensor
    bias: Tensor | None
    top_k: int
    renormalise: bool
    limits: GateLimits | None


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights and rules of a layer.

    choice is None in a dense layer; otherwise gate_up and down are those of all experts. inner: the width between the
    two. first, second: the norms before attention and before the MLP; after: the norms of what these return, before
    it is added. norms: those of queries and keys, by `rule`. turn: cos and sin of each position; pairs: rotary mixes
    neighbours, not halves.
    """

    attention: AttentionCall
    turn: tuple[Tensor, Tensor]
    pairs: bool
    first: Norm | None
    qkv: Tensor
    qkv_bias: Tensor | None
    norms: tuple[Tensor, Tensor, float] | None
    rule: NormRule
    out: Tensor
    out_bias: Tensor | None
    after: tuple[Norm | None, Norm | None]
    second: Norm | None
    choice: ExpertChoice | None
    gate_up: Tensor
    gelu: bool
    down: Tensor
    inner: int

    # A plain layer in the form that the kernels for small batches take.

    @property
    def before_attention(self) -> Tensor:
        assert self.first is not None
        return self.first.weight

    @property
    def before_mlp(self) -> Tensor:
        assert self.second is not None
        return self.second.weight

    @property
    def eps(self) -> tuple[float, float]:
        assert self.first is not None and self.second is not None
        return self.first.eps, self.second.eps


class MergedWeights:
    """Copies of the weights that adapters add to."""

    def __init__(self) -> None:
        self._parts: list[tuple[Any, Tensor]] = []
        self._wholes: list[Tensor] = []

    def weight(self, *modules: Any) -> Tensor:
        """The weights of linear layers, one below the other: their own, or a copy that `fill` writes."""
        if all(type(m) is nn.Linear for m in modules):
            return lay_together([m.weight for m in modules]) if len(modules) > 1 else modules[0].weight
        weights = [plain_part(m).weight for m in modules]
        whole: Tensor = weights[0].detach().new_empty(sum(map(len, weights)), weights[0].shape[1])
        self._parts += zip(modules, torch.split(whole, [len(w) for w in weights]), strict=True)
        self._wholes.append(whole)
        return whole

    @torch.no_grad()
    def fill(self) -> None:
        for whole in self._wholes:
            take_again(whole)
        for module, place in self._parts:
            merge_into(place, module)

    def free(self) -> None:
        """Free the memory of the copies, until `fill`."""
        for whole in self._wholes:
            give_back(whole)


def describe_layer(
    layer: Any, how: AttentionCall, turn: tuple[Tensor, Tensor], mixing: int, merged: MergedWeights
) -> DecoderLayer:
    """The description of a layer of known kind; mixing: how many layers before this one mix experts."""
    attn, mlp, halves = layer.self_attn, layer.mlp, layer_kinds.halves_of(layer)
    assert halves is not None, type(layer)
    choice = _choice(mlp, mixing) if hasattr(mlp, "experts") else None
    qkv = [attn.qkv_proj] if hasattr(attn, "qkv_proj") else [attn.q_proj, attn.k_proj, attn.v_proj]
    gate_up = [mlp.gate_up_proj] if hasattr(mlp, "gate_up_proj") else [getattr(mlp, n, None) for n in _GATE_UP]
    norms, rule = None, NormRule.EARLY
    if hasattr(attn, "q_norm"):
        of_queries, of_keys = describe_norm(attn.q_norm), describe_norm(attn.k_norm)
        norms, rule = (of_queries.weight, of_keys.weight, of_queries.eps), of_queries.rule
    first, after_first, second, after_second = (
        describe_norm(getattr(layer, name)) if name else None for name in halves
    )
    return DecoderLayer(
        attention=how,
        turn=turn,
        pairs=_mixes_pairs(attn),
        first=first,
        qkv=merged.weight(*qkv),
        qkv_bias=None if qkv[0].bias is None else lay_together([plain_part(m).bias for m in qkv]),
        norms=norms,
        rule=rule,
        out=merged.weight(attn.o_proj),
        out_bias=plain_part(attn.o_proj).bias,
        after=(after_first, after_second),
        second=second,
        choice=choice,
        gate_up=mlp.experts.gate_up_proj if choice else merged.weight(*gate_up),
        gelu=layer_kinds.is_gelu(getattr(mlp, "act_fn", None)),
        down=mlp.experts.down_proj if choice else merged.weight(mlp.down_proj),
        inner=inner_of(mlp),
    )


def router_of(mlp: Any) -> Any:
    """The router of a mixture of experts."""
    return mlp.router if hasattr(mlp, "router") else mlp.gate


def inner_of(mlp: Any) -> int:
    """The width between the products of an MLP, or of one of its experts. Those of gpt-oss lie the other way round."""
    if not hasattr(mlp, "experts"):
        return int(mlp.down_proj.weight.shape[1])
    return int(mlp.experts.down_proj.shape[1 if hasattr(mlp.experts, "down_proj_bias") else 2])


def _choice(mlp: Any, mixing: int) -> ExpertChoice:
    limits, experts, router = None, mlp.experts, router_of(mlp)
    if layer_kinds.is_limited_mixture(mlp):
        alpha, limit = float(experts.alpha), float(experts.limit)
        limits = GateLimits(experts.gate_up_proj_bias, experts.down_proj_bias, alpha, limit)
    return ExpertChoice(
        number=mixing,
        weight=router.weight,
        bias=getattr(router, "bias", None),
        top_k=int(router.top_k),
        renormalise=bool(getattr(router, "norm_topk_prob", True)),
        limits=limits,
    )


def describe_norm(module: Any) -> Norm:
    found = layer_kinds.norm_of(module)
    assert found is not None, type(module)
    return found


def rotary_tables(policy: Policy, reach: int) -> list[tuple[Tensor, Tensor]]:
    """cos and sin of the first positions, for each layer; layers of one kind share them. Without rotary: 1 and 0."""
    decoder: Any = policy.decoder
    positions = torch.arange(reach, device=policy.device)[None]
    like = torch.empty(0, dtype=policy.dtype, device=policy.device)
    by_kind = "layer_type" in inspect.signature(decoder.rotary_emb.forward).parameters
    made: dict[tuple[str, bool], tuple[Tensor, Tensor]] = {}
    found = []
    for i, layer in enumerate(decoder.layers):
        kind = decoder.config.layer_types[i] if by_kind else ""
        key = kind, _has_rotary(layer.self_attn)
        if key not in made:
            with torch.no_grad():
                cos, sin = (part[0].contiguous() for part in decoder.rotary_emb(like, positions, *[kind] * by_kind))
            if 2 * cos.shape[1] == policy.head_dim == 2 * len(getattr(decoder.rotary_emb, "inv_freq", ())):
                cos, sin = (torch.cat((part, part), 1) for part in (cos, sin))  # gpt-oss does not write them twice
            made[key] = (cos, sin) if key[1] else (torch.ones_like(cos), torch.zeros_like(sin))
        found.append(made[key])
    return found


def _has_rotary(attention: Any) -> bool:
    """SmolLM3 says it of each layer; in EXAONE 4 only layers with a window have it, where some have one."""
    if hasattr(attention, "use_rope"):
        return bool(attention.use_rope)
    return getattr(attention, "sliding_window", None) is None or bool(getattr(attention, "is_sliding", True))


def _mixes_pairs(attention: Any) -> bool:
    """Whether rotary mixes numbers 2 i and 2 i + 1 of a head, by the function that its module has for it."""
    half = getattr(sys.modules.get(type(attention).__module__), "rotate_half", None)
    return half is not None and half(torch.arange(1, 5)).tolist() == [-2, 1, -4, 3]


def is_known(policy: Policy) -> bool:
    decoder: Any = policy.decoder
    if policy.head_dim % 2 or policy.heads % policy.kv_heads:
        return False
    if not _is_embedding(getattr(decoder, "embed_tokens", None)) or not hasattr(decoder, "rotary_emb"):
        return False
    rotary = getattr(decoder.rotary_emb, "rope_type", None)
    if {"dynamic", "longrope"} & set(rotary.values() if isinstance(rotary, dict) else [rotary]):
        return False  # these depend on the length
    if (
        layer_kinds.norm_of(getattr(decoder, "norm", None)) is None
        or getattr(decoder.config, "clip_qkv", None) is not None
    ):
        return False
    return all(layer_kinds.is_known_layer(layer) and not _reads_positions(layer.self_attn) for layer in decoder.layers)


def _is_embedding(module: Any) -> bool:
    """Plain, or times a number (Gemma)."""
    return type(module) is nn.Embedding or (
        isinstance(module, nn.Embedding)
        and type(module).__name__.endswith("ScaledWordEmbedding")
        and isinstance(getattr(module, "embed_scale", None), Tensor)
    )


def is_plain(policy: Policy) -> bool:
    """Whether all but the rotary is as in Llama, Qwen3 or a mixture of such: the kernels for small batches know."""
    decoder: Any = policy.decoder
    return (
        multipliers(policy) == (1.0, 1.0)
        and describe_norm(decoder.norm).rule == NormRule.EARLY
        and all(_is_plain_layer(layer, policy.head_dim) for layer in decoder.layers)
        and rotary_is_in(policy, policy.dtype)
    )


def rotary_is_in(policy: Policy, dtype: torch.dtype) -> bool:
    """Whether cos and sin of all layers are of this dtype."""
    return all(cos.dtype == dtype for cos, _ in rotary_tables(policy, 1))


def _is_plain_layer(layer: Any, head_dim: int) -> bool:
    like_llama = layer_kinds.is_llama_layer(layer, adapted=True) or layer_kinds.is_mixture_layer(layer, adapted=True)
    if not (like_llama or layer_kinds.is_packed_layer(layer)):
        return False
    if _mixes_pairs(layer.self_attn):
        return False
    of_heads = [describe_norm(getattr(layer.self_attn, n)) for n in ("q_norm", "k_norm") if hasattr(layer.self_attn, n)]
    before = [describe_norm(layer.input_layernorm), describe_norm(layer.post_attention_layernorm)]
    return all(n.rule == NormRule.EARLY for n in before + of_heads) and all(len(n.weight) == head_dim for n in of_heads)


def _reads_positions(attention: Any) -> bool:
    """Whether attention reads positions beside rotary, which may show only beyond the probe (Ministral 3)."""
    return "position_ids" in inspect.signature(type(attention).forward).parameters


def multipliers(policy: Policy) -> tuple[float, float]:
    """Multipliers of the embeddings and of what each half of a layer adds: Gemma's and Granite's, 1 elsewhere.

    All layers have the same.
    """
    decoder: Any = policy.decoder
    layer, embedding = decoder.layers[0], decoder.embed_tokens
    first = float(getattr(decoder, "embedding_multiplier", 1.0))
    if isinstance(getattr(embedding, "embed_scale", None), Tensor):
        first *= float(embedding.embed_scale.to(embedding.weight.dtype))
    return first, float(getattr(layer, "residual_multiplier", 1.0))
