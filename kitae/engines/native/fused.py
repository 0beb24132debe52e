"""A decoder on the kernels of `kitae.kernels.cuda.decoding`, reading the policy's own parameters.

Covered: RMSNorm before attention and MLP, rotary, grouped queries, optional biases and norms of queries and keys,
gated SiLU MLP (Llama, Mistral, Qwen2, Qwen3, SmolLM2, …) or experts of that kind (Mixtral, Qwen3-MoE); the multipliers
of Granite; weights that a model keeps as one (Phi-3). Norms of what attention and MLP return, beside those before them
or in their place, norms that add 1 to their weight, GELU, and rotary with a base for each kind of layer (Gemma, OLMo 2
and 3) or in some layers only (SmolLM3, EXAONE 4), or of neighbours (ERNIE 4.5, Helium); norms over all
heads (OLMoE); the experts of gpt-oss.
`FusedDecoder.of` returns None for anything else, and for a model whose own forward pass does not agree with this one on
a probe.

The weights of q, k and v, and those of gate and up, lie next to each other, so that one matrix product computes all of
them: they are moved if that was not done when the model was loaded. The parameters stay what they are for everybody
else, views of the common memory, and the trainer computes the same bits wherever they lie.

Weights with LoRA adapters are copies here, merged with what the adapters add: `refresh` makes them anew when those have
changed. So are weights in 8 bits, if these are asked for, when any have.
"""

import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kitae.engines.native.page_cache import KVCache
from kitae.errors import EngineError
from kitae.kernels import float8
from kitae.kernels.allocation import give_back, lay_together, take_again
from kitae.kernels.norms import Norm, NormRule
from kitae.models import fuse
from kitae.models.agreement import gap
from kitae.models.attention_seam import AttentionCall, AttentionContext, SelfAttention
from kitae.models.lora import merge_into, plain_part
from kitae.models.policy import Policy

if TYPE_CHECKING:  # these need Triton
    from kitae.kernels.cuda.float8_products import Eights
    from kitae.kernels.cuda.shared_prompts import Groups
    from kitae.kernels.cuda.small_batch import Stream

log = logging.getLogger("kitae")

_PROBE = 24  # tokens
_GATE_UP = ("gate_proj", "up_proj")

Hear = Callable[[int, Tensor], None]  # (number among the layers that mix experts, experts_TK)


@dataclass(frozen=True, slots=True)
class _Choice:
    """How a layer chooses experts; number: among those that do. limited: what those of gpt-oss have besides."""

    number: int
    weight: Tensor
    bias: Tensor | None
    top_k: int
    renormalise: bool
    limited: tuple[Tensor, Tensor, float, float] | None


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """choice: None in a dense layer; else gate_up and down are those of all experts. inner: the width between the two.

    first, second: the norms before attention and before the MLP; after: of what these return, before it is added.
    norms: of queries and keys, by `rule`; turn: cos and sin of each position; pairs: they mix neighbours, not halves.
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
    choice: _Choice | None
    gate_up: Tensor
    gelu: bool
    down: Tensor
    inner: int

    # Of a plain layer, as kernels that know no other take it.

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
            if any(layer.turn[0].shape[1] != policy.head_dim for layer in fused.layers):  # only a part is rotated
                return None
            trash = torch.full_like(positions, cache.pages * cache.page_size)
            got = fused.hidden(tokens, positions, trash, SelfAttention(positions))
            mixture = any(layer.choice is not None for layer in fused.layers)
            found = _distance(got.float(), expected.float(), mixture=mixture)
        if not found < (1e-3 if policy.dtype == torch.float32 else 0.1):
            log.warning("%s: the fused decoder differs from the model (%.2g), so it is not used", policy.source, found)
            return None
        if policy.device.type == "cuda":
            fused.try_few(policy)
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
        self.norm = _norm(decoder.norm)
        self.multipliers = multipliers(policy)
        self._plain = is_plain(policy)
        self.eights: list[Eights] = []
        self._counters = torch.zeros(4096, dtype=torch.int32, device=policy.device)
        self.layers: list[DecoderLayer] = []
        self._merged = _Merged()
        reach = min(policy.max_context, cache.pages * cache.page_size) + 1  # an ended row may stand one past the end
        turns = _turns(policy, max(reach, _PROBE))
        self.cos, self.sin = turns[0]
        for layer, how, turn in zip(decoder.layers, attentions, turns, strict=True):
            mixing = sum(known.choice is not None for known in self.layers)
            self.layers.append(_layer(layer, how, turn, mixing, self._merged))
        self.refresh()

    def refresh(self) -> None:
        """Weights have changed: what is a copy is made again, where it is."""
        self._merged.fill()
        self._store_eights()

    @torch.inference_mode()
    def keep_eights(self, policy: Policy) -> None:
        """From now on compute q, k, v and the MLP with weights in 8 bits."""
        from kitae.kernels.cuda import float8_products

        if not float8.has_products(policy.device):
            raise EngineError(f"engine.weights_dtype = 'float8' {float8.GPUS}, got {policy.device}")
        self._require_eights(policy)

        def room(layer: DecoderLayer) -> "Eights":
            units = (layer.qkv.new_ones((), dtype=torch.float32) for _ in range(3))
            qkv, gate_up, down = map(float8_products.room_for, (layer.qkv, layer.gate_up, layer.down))
            return float8_products.Eights(qkv, gate_up, down, *units)

        with torch.inference_mode(False):
            self.eights = [room(layer) for layer in self.layers]
        self._store_eights()
        self.try_few(policy)

    def _require_eights(self, policy: Policy) -> None:
        """That the layers are of a kind whose weights can be kept in 8 bits."""
        wrong = None
        if any(layer.choice is not None for layer in self.layers):
            wrong = "experts have no kernels for weights in 8 bits"
        elif any(layer.first is None or layer.second is None for layer in self.layers):
            wrong = "its layers have no norm before attention or MLP, which bounds what 8 bits must hold"
        elif sizes := [size for layer in self.layers for size in (*layer.qkv.shape, *layer.down.shape) if size % 16]:
            wrong = f"products in 8 bits need sizes that are multiples of 16, got {sizes[0]}"
        if wrong is not None:
            raise EngineError(f"engine.weights_dtype = 'float8': {policy.source}: {wrong}")

    def _store_eights(self) -> None:
        if not self.eights:
            return
        from kitae.kernels.cuda import float8_products

        for layer, eight in zip(self.layers, self.eights, strict=True):
            assert layer.first is not None and layer.second is not None
            float8_products.store(layer.qkv, eight.qkv)
            float8_products.store(layer.gate_up, eight.gate_up)
            float8_products.store(layer.down, eight.down)
            eight.before_qkv.copy_(float8.unit_of_normed(layer.first))
            eight.before_gate_up.copy_(float8.unit_of_normed(layer.second))

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
        units: Tensor | None = None  # of the rows of what is pending
        after: Norm | None = None
        for i, layer in enumerate(self.layers):
            keys, values = self.cache.keys[i], self.cache.values[i]
            how = layer.attention
            eight = self.eights[i] if self.eights else None
            unit = None if eight is None else eight.before_qkv
            x, normed = decoding.add_and_norm(x, pending, after, layer.first, each, units=units, unit=unit)
            qkv = _queries_keys_values(layer, normed, eight, x.dtype)
            decoding.rotate_and_store(
                qkv, layer.qkv_bias, layer.norms, *layer.turn, positions_T, slots_T,
                (keys.numbers, keys.scales), (values.numbers, values.scales), self.heads, layer.rule, layer.pairs,
            )  # fmt: skip
            kv_heads, _, dim = keys.numbers.shape[1:]
            by_head = qkv.view(len(x), -1, dim).transpose(0, 1)
            q, k, v = by_head[: self.heads], by_head[self.heads : -kv_heads], by_head[-kv_heads:]
            mixed = context.attend(i, q, k, v, scale=how.scale, window=how.window, softcap=how.softcap, sinks=how.sinks)
            pending = _product(mixed.reshape(len(x), -1), layer.out, layer.out_bias)
            unit = None if eight is None else eight.before_gate_up
            x, normed = decoding.add_and_norm(x, pending, layer.after[0], layer.second, each, unit=unit)
            if layer.choice is not None:
                logits = _product(normed, layer.choice.weight, layer.choice.bias)
                pending = _mix(layer, layer.choice, normed, logits, hear)
            else:
                pending, units = _mlp(layer, normed, eight, x.dtype)
            after = layer.after[1]
        return decoding.add_and_norm(x, pending, after, self.norm, each, units=units)[1]

    @property
    def few_rows(self) -> int:
        """Up to how many rows `logits_of_few` is used; 0 where it does not compute what the model needs."""
        from kitae.kernels.cuda import small_batch

        if not self._plain:
            return 0
        return 16 if self.eights or any(layer.choice is not None for layer in self.layers) else small_batch.MOST

    @torch.inference_mode()
    def try_few(self, policy: Policy) -> None:
        """`logits_of_few` against `hidden`; where it cannot run, or differs, it is not used."""
        if self.few_rows and (wrong := self._wrong_with_few(policy)):
            log.warning("%s: the kernels for a few sequences %s, so they are not used", policy.source, wrong)
            self._plain = False

    def _wrong_with_few(self, policy: Policy) -> str | None:
        """What is wrong with logits of lone tokens, which need no pages, if anything."""
        from triton.errors import TritonError

        mixture = any(layer.choice is not None for layer in self.layers)
        exact = policy.dtype == torch.float32 and self.cache.values[0].scales is None  # 8 bits round values
        for count in (8, 16):
            device, head = policy.device, policy.head.weight
            tokens = torch.arange(count, device=device) * 7919 % policy.vocabulary
            first, trash = torch.zeros_like(tokens), torch.full_like(tokens, self.cache.pages * self.cache.page_size)
            table, lengths = first[:, None].to(torch.int32), torch.ones_like(tokens, dtype=torch.int32)
            logits = torch.empty(count, len(head), dtype=head.dtype, device=device)
            expected = torch.mm(self.hidden(tokens, first, trash, _Alone()), head.t())
            try:
                self.logits_of_few(tokens, first, trash, table, lengths, head, logits)
            except (TritonError, RuntimeError) as error:
                return f"cannot be computed here ({error})"
            found = _distance(logits.float(), expected.float(), mixture=mixture)
            if not found < (0.2 if self.eights else 1e-3 if exact else 0.1):  # 8 bits are cut in other places
                return f"differ ({found:.2g})"
        return None

    def logits_of_few(
        self, tokens_B: Tensor, positions_B: Tensor, slots_B: Tensor, table: Tensor, lengths_B: Tensor, head: Tensor,
        logits: Tensor, hear: Hear | None = None, groups: "Groups | None" = None,
    ) -> None:  # fmt: skip
        """Logits of at most `few_rows` new tokens, over the pages of their sequences.

        What `hidden` and a product with the weight of the head compute, in fewer kernels. A table with fewer rows is
        that of sequences which have several neighbouring ones. groups: of sequences that begin alike.
        """
        from kitae.kernels.cuda import small_batch

        stream = self._stream_of_few(tokens_B, positions_B, slots_B, table, lengths_B, hear, groups)
        small_batch.normed_product(stream, self.norm.eps, head, out=logits)

    def _stream_of_few(
        self, tokens_B: Tensor, positions_B: Tensor, slots_B: Tensor, table: Tensor, lengths_B: Tensor,
        hear: Hear | None, groups: "Groups | None",
    ) -> "Stream":  # fmt: skip
        from kitae.kernels.cuda import paged, shared_prompts, small_batch

        gains = [layer.before_attention for layer in self.layers[1:]] + [self.norm.weight]
        stream = small_batch.embed(tokens_B, self.embedding, self.layers[0].before_attention, self._counters)
        for i, (layer, gain) in enumerate(zip(self.layers, gains, strict=True)):
            keys, values, how = self.cache.keys[i], self.cache.values[i], layer.attention
            eight = self.eights[i] if self.eights else None
            first, unit = (layer.qkv, None) if eight is None else (eight.qkv, eight.before_qkv)
            qkv = small_batch.normed_product(stream, layer.eps[0], first, unit=unit)
            pages = (keys.numbers, keys.scales), (values.numbers, values.scales)
            begun = None
            if groups is not None and how.window is None:
                norm = None if layer.norms is None else (layer.norms[0], layer.norms[2])
                turn = shared_prompts.Turning(layer.qkv_bias, norm, *layer.turn, positions_B)
                begun = shared_prompts.begin(
                    qkv, *pages, self.heads, table, groups, scale=how.scale, softcap=how.softcap, turn=turn
                )
            mixed = paged.turn_and_attend(
                qkv, layer.qkv_bias, layer.norms, *layer.turn, positions_B, slots_B, *pages, self.heads, table,
                lengths_B, self._counters, scale=how.scale, window=how.window, softcap=how.softcap, sinks=how.sinks,
                begun=begun,
            )  # fmt: skip
            small_batch.add_product(stream, mixed, layer.out, layer.before_mlp)
            if eight is not None:
                unit = eight.before_gate_up
                act = small_batch.normed_product(stream, layer.eps[1], eight.gate_up, gated=True, unit=unit)
                small_batch.add_product(stream, act, eight.down, gain)
            elif layer.choice is None:
                act = small_batch.normed_product(stream, layer.eps[1], layer.gate_up, gated=True)
                small_batch.add_product(stream, act, layer.down, gain)
            else:
                parts, normed = small_batch.normed_parts(stream, layer.eps[1], layer.choice.weight)
                small_batch.add_parts(stream, _mix(layer, layer.choice, normed, parts, hear), gain)
        return stream


class _Alone:
    """Attention of tokens that see nothing but themselves: their values."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        return v.repeat_interleave(len(q) // len(v), 0).transpose(0, 1)


def _mix(layer: DecoderLayer, choice: _Choice, x_TH: Tensor, logits: Tensor, hear: Hear | None) -> Tensor:
    """logits: of the router, `[T, E]`, or in parts `[parts, T, E]`."""
    from kitae.kernels.cuda import expert_decoding

    gates_TK, experts_TK = expert_decoding.route(logits, choice.top_k, choice.renormalise, x_TH.dtype)
    if hear is not None:
        hear(choice.number, experts_TK)
    limited = None if choice.limited is None else expert_decoding.Limited(*choice.limited)
    return expert_decoding.mix(x_TH, gates_TK, experts_TK, layer.gate_up, layer.down, limited)


def _queries_keys_values(layer: DecoderLayer, normed: Tensor, eight: "Eights | None", dtype: torch.dtype) -> Tensor:
    if eight is None:
        return torch.mm(normed, layer.qkv.t())
    from kitae.kernels.cuda import float8_products

    return float8_products.product(normed, eight.before_qkv, eight.qkv, dtype)


def _mlp(
    layer: DecoderLayer, normed: Tensor, eight: "Eights | None", dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """What an MLP makes of normed rows; in 8 bits its rows are still to be multiplied by units."""
    from kitae.kernels.cuda import decoding, float8_products

    if eight is None:
        gated = decoding.swiglu(torch.mm(normed, layer.gate_up.t()), gelu=layer.gelu)
        return torch.mm(gated, layer.down.t()), None
    both = float8_products.product(normed, eight.before_gate_up, eight.gate_up, dtype)
    gated, units = float8_products.gate(both, gelu=layer.gelu)
    return float8_products.product(gated, eight.before_down, eight.down, dtype), units


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def _distance(got: Tensor, expected: Tensor, mixture: bool) -> float:
    """Between hidden states `[T, H]`: of all tokens, or, in a mixture, of most."""
    return gap(got, expected) if mixture else float((got - expected).norm() / expected.norm())


class _Merged:
    """Copies of weights that adapters add to."""

    def __init__(self) -> None:
        self._parts: list[tuple[Any, Tensor]] = []
        self._wholes: list[Tensor] = []

    def weight(self, *modules: Any) -> Tensor:
        """Of linear layers, one below the other: their own, or a copy that `fill` writes."""
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
        """Until `fill`."""
        for whole in self._wholes:
            give_back(whole)


def _layer(layer: Any, how: AttentionCall, turn: tuple[Tensor, Tensor], mixing: int, merged: _Merged) -> DecoderLayer:
    """mixing: how many layers before this one mix experts."""
    attn, mlp, halves = layer.self_attn, layer.mlp, fuse.halves_of(layer)
    assert halves is not None, type(layer)
    choice = _choice(mlp, mixing) if hasattr(mlp, "experts") else None
    qkv = [attn.qkv_proj] if hasattr(attn, "qkv_proj") else [attn.q_proj, attn.k_proj, attn.v_proj]
    gate_up = [mlp.gate_up_proj] if hasattr(mlp, "gate_up_proj") else [getattr(mlp, n, None) for n in _GATE_UP]
    norms, rule = None, NormRule.EARLY
    if hasattr(attn, "q_norm"):
        of_queries, of_keys = _norm(attn.q_norm), _norm(attn.k_norm)
        norms, rule = (of_queries.weight, of_keys.weight, of_queries.eps), of_queries.rule
    first, after_first, second, after_second = (_norm(getattr(layer, name)) if name else None for name in halves)
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
        gelu=fuse.is_gelu(getattr(mlp, "act_fn", None)),
        down=mlp.experts.down_proj if choice else merged.weight(mlp.down_proj),
        inner=inner_of(mlp),
    )


def router_of(mlp: Any) -> Any:
    """Of experts."""
    return mlp.router if hasattr(mlp, "router") else mlp.gate


def inner_of(mlp: Any) -> int:
    """The width between the products of an MLP, or of one of its experts. Those of gpt-oss lie the other way round."""
    if not hasattr(mlp, "experts"):
        return int(mlp.down_proj.weight.shape[1])
    return int(mlp.experts.down_proj.shape[1 if hasattr(mlp.experts, "down_proj_bias") else 2])


def _choice(mlp: Any, mixing: int) -> _Choice:
    limited, experts, router = None, mlp.experts, router_of(mlp)
    if fuse.is_limited_mixture(mlp):
        limited = experts.gate_up_proj_bias, experts.down_proj_bias, float(experts.alpha), float(experts.limit)
    return _Choice(
        number=mixing,
        weight=router.weight,
        bias=getattr(router, "bias", None),
        top_k=int(router.top_k),
        renormalise=bool(getattr(router, "norm_topk_prob", True)),
        limited=limited,
    )


def _norm(module: Any) -> Norm:
    found = fuse.norm_of(module)
    assert found is not None, type(module)
    return found


def _turns(policy: Policy, reach: int) -> list[tuple[Tensor, Tensor]]:
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


def _known(policy: Policy) -> bool:
    decoder: Any = policy.decoder
    if policy.head_dim % 2 or policy.heads % policy.kv_heads:
        return False
    if not _is_embedding(getattr(decoder, "embed_tokens", None)) or not hasattr(decoder, "rotary_emb"):
        return False
    rotary = getattr(decoder.rotary_emb, "rope_type", None)
    if {"dynamic", "longrope"} & set(rotary.values() if isinstance(rotary, dict) else [rotary]):
        return False  # these depend on the length
    if fuse.norm_of(getattr(decoder, "norm", None)) is None or getattr(decoder.config, "clip_qkv", None) is not None:
        return False
    return all(fuse.is_known_layer(layer) and not _reads_positions(layer.self_attn) for layer in decoder.layers)


def _is_embedding(module: Any) -> bool:
    """Plain, or times a number (Gemma)."""
    return type(module) is nn.Embedding or (
        isinstance(module, nn.Embedding)
        and type(module).__name__.endswith("ScaledWordEmbedding")
        and isinstance(getattr(module, "embed_scale", None), Tensor)
    )


def is_plain(policy: Policy) -> bool:
    """Whether all but the rotary is as in Llama, Qwen3 or a mixture of such: what `logits_of_few` has kernels for."""
    decoder: Any = policy.decoder
    return (
        multipliers(policy) == (1.0, 1.0)
        and _norm(decoder.norm).rule == NormRule.EARLY
        and all(_is_plain_layer(layer, policy.head_dim) for layer in decoder.layers)
        and turns_in(policy, policy.dtype)
    )


def turns_in(policy: Policy, dtype: torch.dtype) -> bool:
    """Whether cos and sin of all layers are numbers of this type."""
    return all(cos.dtype == dtype for cos, _ in _turns(policy, 1))


def _is_plain_layer(layer: Any, head_dim: int) -> bool:
    like_llama = fuse.is_llama_layer(layer, adapted=True) or fuse.is_mixture_layer(layer, adapted=True)
    if not (like_llama or fuse.is_packed_layer(layer)):
        return False
    if _mixes_pairs(layer.self_attn):
        return False
    of_heads = [_norm(getattr(layer.self_attn, n)) for n in ("q_norm", "k_norm") if hasattr(layer.self_attn, n)]
    before = [_norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)]
    return all(n.rule == NormRule.EARLY for n in before + of_heads) and all(len(n.weight) == head_dim for n in of_heads)


def _reads_positions(attention: Any) -> bool:
    """Beside rotary, and perhaps only far from the beginning, where no probe comes (Ministral 3 scales its queries)."""
    return "position_ids" in inspect.signature(type(attention).forward).parameters


def multipliers(policy: Policy) -> tuple[float, float]:
    """Of the embeddings, and of what each half of a layer adds: Gemma's and Granite's, 1 elsewhere. All layers have the
    same."""
    decoder: Any = policy.decoder
    layer, embedding = decoder.layers[0], decoder.embed_tokens
    first = float(getattr(decoder, "embedding_multiplier", 1.0))
    if isinstance(getattr(embedding, "embed_scale", None), Tensor):
        first *= float(embedding.embed_scale.to(embedding.weight.dtype))
    return first, float(getattr(layer, "residual_multiplier", 1.0))
