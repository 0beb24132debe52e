"""The decoder of the Llama family on the kernels of `kitae.kernels.cuda.decoding`, reading the policy's own parameters.

Covered: RMSNorm before attention and MLP, rotary, grouped queries, optional biases and norms of queries and keys,
gated SiLU MLP (Llama, Mistral, Qwen2, Qwen3, SmolLM2, …) or experts of that kind (Mixtral, Qwen3-MoE); the multipliers
of Granite; weights that a model keeps as one (Phi-3).
`FusedDecoder.of` returns None for anything else, and for a model whose own forward pass does not agree with this one on
a probe.

The weights of q, k and v, and those of gate and up, lie next to each other, so that one matrix product computes all of
them: they are moved if that was not done when the model was loaded. The parameters stay what they are for everybody
else, views of the common memory, and the trainer computes the same bits wherever they lie.

Weights with LoRA adapters are copies here, merged with what the adapters add: `refresh` makes them anew when those have
changed.
"""

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kitae.engines.native.cache import KVCache
from kitae.kernels.memory import lay_together
from kitae.models.agreement import gap
from kitae.models.attention import AttentionCall, AttentionContext, SelfAttention
from kitae.models.fuse import is_llama_layer, is_mixture_layer, is_packed_layer, is_rms_norm
from kitae.models.lora import merge_into, plain_part
from kitae.models.policy import Policy

log = logging.getLogger("kitae")

_PROBE = 24  # tokens
_GATE_UP = ("gate_proj", "up_proj")

Hear = Callable[[int, Tensor], None]  # (number among the layers that mix experts, experts_TK)


@dataclass(frozen=True, slots=True)
class _Choice:
    """How a layer chooses experts; number: among those that do."""

    number: int
    weight: Tensor
    top_k: int
    renormalise: bool


@dataclass(frozen=True, slots=True)
class _Layer:
    """choice: None in a dense layer; else gate_up and down are those of all experts."""

    attention: AttentionCall
    before_attention: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    norms: tuple[Tensor, Tensor, float] | None
    out: Tensor
    before_mlp: Tensor
    choice: _Choice | None
    gate_up: Tensor
    down: Tensor
    eps: tuple[float, float]


class FusedDecoder:
    @classmethod
    def of(cls, policy: Policy, cache: KVCache) -> "FusedDecoder | None":
        """The fused decoder of a policy, if it has a known structure and both agree on a probe."""
        if not _known(policy) or not cls.covers(policy):
            return None
        with torch.inference_mode():
            tokens = torch.arange(_PROBE, device=policy.device) * 7919 % policy.vocabulary
            positions = torch.arange(_PROBE, device=policy.device)
            recorder = SelfAttention(positions)
            expected = policy.hidden(tokens, positions, recorder)
            with torch.inference_mode(False):
                fused = cls(policy, cache, recorder.asked)
            if fused.cos.shape[1] != policy.head_dim:  # only a part of each head is rotated
                return None
            trash = torch.full_like(positions, cache.pages * cache.page_size)
            got = fused.hidden(tokens, positions, trash, SelfAttention(positions))
            mixture = any(layer.choice is not None for layer in fused.layers)
            found = _distance(got.float(), expected.float(), mixture=mixture)
        if not found < (1e-3 if policy.dtype == torch.float32 else 0.1):
            log.warning("%s: the fused decoder differs from the model (%.2g), so it is not used", policy.source, found)
            return None
        return fused

    @classmethod
    def covers(cls, policy: Policy) -> bool:
        """Whether the kernels can compute a policy of known structure."""
        return True

    def __init__(self, policy: Policy, cache: KVCache, attentions: Sequence[AttentionCall]) -> None:
        decoder: Any = policy.decoder
        self.heads = policy.heads
        self.cache = cache
        self.embedding: Tensor = decoder.embed_tokens.weight
        self.norm: tuple[Tensor, float] = decoder.norm.weight, decoder.norm.variance_epsilon
        self.multipliers = multipliers(policy)
        self._counters = torch.zeros(4096, dtype=torch.int32, device=policy.device)
        self.layers: list[_Layer] = []
        self._merged = _Merged()
        for layer, how in zip(decoder.layers, attentions, strict=True):
            mixing = sum(known.choice is not None for known in self.layers)
            self.layers.append(_layer(layer, how, mixing, self._merged))
        self.refresh()
        reach = min(policy.max_context, cache.pages * cache.page_size) + 1  # an ended row may stand one past the end
        positions = torch.arange(reach, device=policy.device)[None]
        with torch.no_grad():
            cos, sin = decoder.rotary_emb(torch.empty(0, dtype=policy.dtype, device=policy.device), positions)
        self.cos, self.sin = cos[0].contiguous(), sin[0].contiguous()

    def refresh(self) -> None:
        """Adapters have changed: their weights are merged again, where they are."""
        self._merged.fill()

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        context: AttentionContext,
        hear: Hear | None = None,
    ) -> Tensor:
        """Last hidden states `[T, H]`. Keys and values go to `slots_T` of the cache before the context is asked.

        hear: is told the experts that each layer chooses.
        """
        from kitae.kernels.cuda import decoding  # needs Triton

        first, each = self.multipliers
        x = nn.functional.embedding(tokens_T, self.embedding)
        x = x if first == 1.0 else x * first
        pending: Tensor | None = None
        for i, layer in enumerate(self.layers):
            keys, values = self.cache.keys[i], self.cache.values[i]
            how = layer.attention
            x, normed = decoding.rms_norm(x, pending, layer.before_attention, layer.eps[0], each)
            qkv = torch.mm(normed, layer.qkv.t())
            decoding.rotate_and_store(
                qkv, layer.qkv_bias, layer.norms, self.cos, self.sin, positions_T, slots_T,
                (keys.numbers, keys.scales), (values.numbers, values.scales), self.heads,
            )  # fmt: skip
            kv_heads, _, dim = keys.numbers.shape[1:]
            by_head = qkv.view(len(x), -1, dim).transpose(0, 1)
            q, k, v = by_head[: self.heads], by_head[self.heads : -kv_heads], by_head[-kv_heads:]
            mixed = context.attend(i, q, k, v, scale=how.scale, window=how.window, softcap=how.softcap, sinks=how.sinks)
            pending = torch.mm(mixed.reshape(len(x), -1), layer.out.t())
            x, normed = decoding.rms_norm(x, pending, layer.before_mlp, layer.eps[1], each)
            if layer.choice is not None:
                pending = _mix(layer, layer.choice, normed, torch.mm(normed, layer.choice.weight.t()), hear)
            else:
                pending = torch.mm(decoding.swiglu(torch.mm(normed, layer.gate_up.t())), layer.down.t())
        return decoding.rms_norm(x, pending, *self.norm, each)[1]

    @property
    def few_rows(self) -> int:
        """Up to how many rows `logits_of_few` is used; 0 where it does not compute what the model needs."""
        from kitae.kernels.cuda import few

        if self.multipliers != (1.0, 1.0):
            return 0
        return 16 if any(layer.choice is not None for layer in self.layers) else few.MOST

    def logits_of_few(
        self, tokens_B: Tensor, positions_B: Tensor, slots_B: Tensor, table: Tensor, lengths_B: Tensor, head: Tensor,
        logits: Tensor, hear: Hear | None = None,
    ) -> None:  # fmt: skip
        """Logits of one new token for each of at most `few_rows` sequences, over their pages.

        What `hidden` and a product with the weight of the head compute, in fewer kernels.
        """
        from kitae.kernels.cuda import few, paged

        gains = [layer.before_attention for layer in self.layers[1:]] + [self.norm[0]]
        stream = few.embed(tokens_B, self.embedding, self.layers[0].before_attention, self._counters)
        for i, (layer, gain) in enumerate(zip(self.layers, gains, strict=True)):
            keys, values, how = self.cache.keys[i], self.cache.values[i], layer.attention
            qkv = few.normed_product(stream, layer.eps[0], layer.qkv)
            mixed = paged.turn_and_attend(
                qkv, layer.qkv_bias, layer.norms, self.cos, self.sin, positions_B, slots_B,
                (keys.numbers, keys.scales), (values.numbers, values.scales), self.heads, table, lengths_B,
                self._counters, scale=how.scale, window=how.window, softcap=how.softcap, sinks=how.sinks,
            )  # fmt: skip
            few.add_product(stream, mixed, layer.out, layer.before_mlp)
            if layer.choice is None:
                act = few.normed_product(stream, layer.eps[1], layer.gate_up, gated=True)
                few.add_product(stream, act, layer.down, gain)
            else:
                parts, normed = few.normed_parts(stream, layer.eps[1], layer.choice.weight)
                few.add_parts(stream, _mix(layer, layer.choice, normed, parts, hear), gain)
        few.normed_product(stream, self.norm[1], head, out=logits)


def _mix(layer: _Layer, choice: _Choice, x_TH: Tensor, logits: Tensor, hear: Hear | None) -> Tensor:
    """logits: of the router, `[T, E]`, or in parts `[parts, T, E]`."""
    from kitae.kernels.cuda import experts

    gates_TK, experts_TK = experts.route(logits, choice.top_k, choice.renormalise, x_TH.dtype)
    if hear is not None:
        hear(choice.number, experts_TK)
    return experts.mix(x_TH, gates_TK, experts_TK, layer.gate_up, layer.down)


def _distance(got: Tensor, expected: Tensor, mixture: bool) -> float:
    """Between hidden states `[T, H]`: of all tokens, or, in a mixture, of most."""
    return gap(got, expected) if mixture else float((got - expected).norm() / expected.norm())


class _Merged:
    """Copies of weights that adapters add to."""

    def __init__(self) -> None:
        self._parts: list[tuple[Any, Tensor]] = []

    def weight(self, *modules: Any) -> Tensor:
        """Of linear layers, one below the other: their own, or a copy that `fill` writes."""
        if all(type(m) is nn.Linear for m in modules):
            return lay_together([m.weight for m in modules]) if len(modules) > 1 else modules[0].weight
        weights = [plain_part(m).weight for m in modules]
        whole: Tensor = weights[0].detach().new_empty(sum(map(len, weights)), weights[0].shape[1])
        self._parts += zip(modules, torch.split(whole, [len(w) for w in weights]), strict=True)
        return whole

    @torch.no_grad()
    def fill(self) -> None:
        for module, place in self._parts:
            merge_into(place, module)


def _layer(layer: Any, how: AttentionCall, mixing: int, merged: _Merged) -> _Layer:
    """mixing: how many layers before this one mix experts."""
    attn, mlp = layer.self_attn, layer.mlp
    choice = None
    if is_mixture_layer(layer, adapted=True):
        router = mlp.gate
        choice = _Choice(mixing, router.weight, int(router.top_k), bool(getattr(router, "norm_topk_prob", True)))
    qkv = [attn.qkv_proj] if hasattr(attn, "qkv_proj") else [attn.q_proj, attn.k_proj, attn.v_proj]
    gate_up = [mlp.gate_up_proj] if hasattr(mlp, "gate_up_proj") else [getattr(mlp, n, None) for n in _GATE_UP]
    norms = None
    if hasattr(attn, "q_norm"):
        norms = attn.q_norm.weight, attn.k_norm.weight, float(attn.q_norm.variance_epsilon)
    return _Layer(
        attention=how,
        before_attention=layer.input_layernorm.weight,
        qkv=merged.weight(*qkv),
        qkv_bias=None if qkv[0].bias is None else lay_together([plain_part(m).bias for m in qkv]),
        norms=norms,
        out=merged.weight(attn.o_proj),
        before_mlp=layer.post_attention_layernorm.weight,
        choice=choice,
        gate_up=mlp.experts.gate_up_proj if choice else merged.weight(*gate_up),
        down=mlp.experts.down_proj if choice else merged.weight(mlp.down_proj),
        eps=(layer.input_layernorm.variance_epsilon, layer.post_attention_layernorm.variance_epsilon),
    )


def _known(policy: Policy) -> bool:
    decoder: Any = policy.decoder
    if policy.head_dim % 2 or policy.heads % policy.kv_heads:
        return False
    if type(getattr(decoder, "embed_tokens", None)) is not nn.Embedding or not hasattr(decoder, "rotary_emb"):
        return False
    if getattr(decoder.rotary_emb, "rope_type", None) in ("dynamic", "longrope"):  # these depend on the length
        return False
    if not is_rms_norm(getattr(decoder, "norm", None)):
        return False
    return all(
        is_llama_layer(layer, adapted=True) or is_mixture_layer(layer, adapted=True) or is_packed_layer(layer)
        for layer in decoder.layers
    ) and not any(_reads_positions(layer.self_attn) for layer in decoder.layers)


def _reads_positions(attention: Any) -> bool:
    """Beside rotary, and perhaps only far from the beginning, where no probe comes (Ministral 3 scales its queries)."""
    return "position_ids" in inspect.signature(type(attention).forward).parameters


def multipliers(policy: Policy) -> tuple[float, float]:
    """Of the embeddings, and of what each half of a layer adds: Granite's, 1 elsewhere. All layers have the same."""
    decoder: Any = policy.decoder
    layer = decoder.layers[0]
    return float(getattr(decoder, "embedding_multiplier", 1.0)), float(getattr(layer, "residual_multiplier", 1.0))
