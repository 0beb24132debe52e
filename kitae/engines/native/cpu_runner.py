"""Decoding on a CPU: one call of a compiled decoder a step, on packed copies of the weights.

In float32 on any processor, in bfloat16 on those with tile registers. The copies are as large as the weights. They are
made again after each weight update, when the next step needs them; what LoRA adapters add is merged into them. While
the engine stands still there are none: the trainer may use their memory.
Mixtures are covered too: the rows of an expert share one read of its weights. Models that the decoder does not cover
(see `kitae.engines.native.decoder_layers`) run their own modules.
"""

import ctypes
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kitae.data.pictures import PICTURE
from kitae.engines.native.decoder_layers import DecoderLayer, inner_of, rotary_is_in, router_of
from kitae.engines.native.fused_decoder import FusedDecoder, RecordExperts
from kitae.engines.native.page_cache import KVCache
from kitae.engines.native.paged_attention import ExactAttention, PrefillAttention
from kitae.engines.native.runner import ModelRunner, Result, refuse_float8
from kitae.engines.native.scheduler import Admission
from kitae.engines.native.sequence import Decoding
from kitae.kernels import float8
from kitae.kernels.allocation import give_back
from kitae.kernels.cpu import packed
from kitae.kernels.norms import NormRule
from kitae.models.attention_seam import AttentionCall, AttentionContext
from kitae.models.layer_kinds import halves_of, norm_of
from kitae.models.policy import Policy

log = logging.getLogger("kitae")

_SHORT = 512  # tokens; attention row by row is faster up to about here, in blocks beyond


class CpuRunner(ModelRunner):
    def __init__(
        self,
        policy: Policy,
        cache: KVCache,
        *,
        float8: bool = False,
        draft_tokens: int = 0,
        proves: bool = False,
    ) -> None:
        """float8: the packed copies of the weights are rounded as 8 bits would be."""
        super().__init__(policy, cache, draft_tokens=draft_tokens, proves=proves)
        self._float8 = float8
        self.decoder = self._packed()

    def _packed(self) -> "PackedDecoder | None":
        found = PackedDecoder.of(self.policy, self.cache)
        if self._float8 and found is None:
            refuse_float8(self.policy, "compiled")
        if found is not None and self._float8:
            found.use_float8(self.policy)
        return found

    def weights_changed(self) -> None:
        super().weights_changed()
        if self.decoder is not None:
            self.decoder.stale = True

    def rest(self) -> None:
        if self.decoder is not None:
            self.decoder.free()

    def prefill(self, admission: Admission) -> Result:
        self._pack()
        return super().prefill(admission)

    def decode(self, running: list[Decoding], width: int = 1) -> Result:
        self._pack()
        return super().decode(running, width)

    def _pack(self) -> None:
        """Make the copies of the weights anew if they are old; start afresh if somebody moved the parameters."""
        if self.decoder is None or not self.decoder.stale:
            return
        if not self.decoder.holds(self.policy):
            self.decoder.free()
            with torch.inference_mode(False):
                self.decoder = self._packed()
        else:
            self.decoder.pack()

    def _prompt_states(
        self, tokens_T: Tensor, positions_T: Tensor, context: PrefillAttention | ExactAttention
    ) -> Tensor:
        if self.decoder is None or isinstance(context, ExactAttention) or bool((tokens_T >= PICTURE).any()):
            return super()._prompt_states(tokens_T, positions_T, context)
        slots_T = context.page_of_T * self.cache.page_size + context.slot_of_T
        record = self.writer(context.page_of_T, context.slot_of_T)
        if max(stretch.start + stretch.length for stretch in context.stretches) > _SHORT:
            context.stored = True
            return self.decoder.hidden(tokens_T, positions_T, slots_T, context, record)
        table = torch.zeros(
            len(context.stretches), max(len(stretch.pages) for stretch in context.stretches), dtype=torch.int32
        )
        for row, stretch in zip(table, context.stretches, strict=True):
            row[: len(stretch.pages)] = torch.tensor(stretch.pages)
        lengths = torch.tensor([stretch.length for stretch in context.stretches])
        stretches_T = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        return self.decoder.rows(tokens_T, positions_T, slots_T, stretches_T, table, record)

    def _decode_states(self, tokens_B: Tensor, lengths_B: Tensor, table: Tensor) -> Tensor:
        if self.decoder is None or self._shift_B is not None:
            return super()._decode_states(tokens_B, lengths_B, table)
        size, positions_B = self.cache.page_size, lengths_B.long() - 1
        pages_B = table.long().gather(1, (positions_B // size)[:, None])[:, 0]
        slots_B = pages_B * size + positions_B % size
        record = self.writer(pages_B, positions_B % size)
        return self.decoder.rows(tokens_B, positions_B, slots_B, torch.arange(len(table)), table, record)

    def _logits(self, hidden_BH: Tensor) -> Tensor:
        if self.decoder is None:
            return super()._logits(hidden_BH)
        return self.policy.transform.take(self.decoder.head(hidden_BH))


class PackedDecoder(FusedDecoder):
    """The decoder on the kernels of `kitae.kernels.cpu.packed`."""

    @classmethod
    def of(cls, policy: Policy, cache: KVCache) -> "PackedDecoder | None":
        if not packed.available(policy.dtype):
            return None
        found = super().of(policy, cache)
        if found is not None:
            log.info("%s: packed copies of the weights take %.2f GB", policy.source, found.packed_bytes / 1e9)
        return found

    @classmethod
    def covers(cls, policy: Policy) -> bool:
        decoder: Any = policy.decoder
        if any(len(_rules(layer)) != 1 for layer in decoder.layers):
            return False
        routers = [router_of(layer.mlp) for layer in decoder.layers if hasattr(layer.mlp, "experts")]
        shapes = {(router.weight.shape, router.weight.dtype, router.top_k) for router in routers}
        if len(shapes) > 1 or any(router.weight.dtype != policy.dtype for router in routers):
            return False
        inner = {inner_of(layer.mlp) for layer in decoder.layers}
        depths = policy.head.weight.shape[1], policy.heads * policy.head_dim, *inner
        return packed.fits(policy.dtype, *depths, head_dim=policy.head_dim) and rotary_is_in(policy, policy.dtype)

    def __init__(self, policy: Policy, cache: KVCache, attentions: Sequence[AttentionCall]) -> None:
        super().__init__(policy, cache, attentions)
        self._head: Any = policy.head
        self._rounds = False
        self._dtype = policy.dtype
        kv_heads, page_size, dim = cache.keys[0].numbers.shape[1:]
        self._room: dict[str, Tensor] = {}
        self._decoder = packed.Decoder(
            hidden=len(self.layers[0].out), heads=self.heads, kv_heads=kv_heads, dim=dim, page_size=page_size,
            factor=self.multipliers[1],
        )  # fmt: skip
        self._packed = [_room_for(layer) for layer in self.layers]
        self._packed_head = packed.Packed.room_for(self._head.weight.shape, self._dtype)
        self._addresses = self._find_addresses(policy)
        self._pack()

    @property
    def packed_bytes(self) -> int:
        """Memory of all packed copies, once they are made."""
        return sum(p.bytes for p in self._matrices())

    def _matrices(self) -> list[packed.Packed]:
        return [self._packed_head, *(p for layer in self._packed for p in layer.values())]

    def holds(self, policy: Policy) -> bool:
        """Whether the policy's parameters are still where they were."""
        return self._addresses == self._find_addresses(policy)

    def use_float8(self, policy: Policy) -> None:
        """Round what a GPU keeps in 8 bits as it does; products are those of the type of the model."""
        self.require_float8_layers(policy)
        self._rounds = True
        self._pack()

    def pack(self) -> None:
        """Copy the weights as they are now, with what adapters add to them."""
        self.refresh()
        self._pack()

    def free(self) -> None:
        """Give back the memory of the copies and of what passes through the layers, until `pack`."""
        self.stale = True
        self._room = {}
        self._merged.free()
        for matrix in self._matrices():
            give_back(matrix.data)

    def _pack(self) -> None:
        for layer, copies in zip(map(self._as_kept, self.layers), self._packed, strict=True):
            copies["qkv"].fill([layer.qkv])
            copies["out"].fill([layer.out])
            if layer.choice is not None:
                copies["router"].fill([layer.choice.weight.detach()])
            for number, (gate, up, down) in enumerate(_experts(layer)):
                copies["gate_up"].fill([gate, up], number)
                copies["down"].fill([down], number)
        self._packed_head.fill([self._head.weight.detach()])
        self._sinks = [None if s.attention.sinks is None else s.attention.sinks.detach().float() for s in self.layers]
        self._limits = [_limit_bias(layer) for layer in self.layers]
        self._mixtures = [self._describe_mixture(i) for i in range(len(self.layers))]
        self._layers = (packed.Layer * len(self.layers))(*map(self._describe, range(len(self.layers))))
        self.stale = False

    def _as_kept(self, layer: DecoderLayer) -> DecoderLayer:
        if not self._rounds:
            return layer
        qkv, gate_up, down = map(float8.rounded, (layer.qkv, layer.gate_up, layer.down))
        return replace(layer, qkv=qkv, gate_up=gate_up, down=down)

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        context: AttentionContext,
        record: RecordExperts | None = None,
    ) -> Tensor:
        x = self._begin(tokens_T)
        for i, layer in enumerate(self.layers):
            how = layer.attention
            packed.project(self._decoder, self._layers[i], positions_T, slots_T, self._dtype)
            by_head = self._room["qkv"][: len(x)].view(len(x), -1, self._decoder.dim).transpose(0, 1)
            q, k, v = torch.split(by_head, [self.heads, self._decoder.kv_heads, self._decoder.kv_heads])
            mixed = context.attend(i, q, k, v, scale=how.scale, window=how.window, softcap=how.softcap, sinks=how.sinks)
            packed.finish_layer(self._decoder, self._layers[i], mixed.reshape(len(x), -1))
        self._record_experts(record, len(x))
        return packed.norm(x, self.norm)

    def rows(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        sequences_T: Tensor,
        table: Tensor,
        record: RecordExperts | None = None,
    ) -> Tensor:
        """`hidden` in one call: each row attends to the pages of its sequence, a row of the table."""
        x = self._begin(tokens_T)
        packed.forward(self._decoder, self._layers, positions_T, slots_T, sequences_T, table, self._dtype)
        self._record_experts(record, len(x))
        return packed.norm(x, self.norm)

    def _record_experts(self, record: RecordExperts | None, rows: int) -> None:
        """Call `record` with the experts that each layer chose in the last pass."""
        choices = [layer.choice for layer in self.layers if layer.choice is not None]
        if record is None or not choices:
            return
        each = rows * choices[0].top_k
        for choice in choices:
            record(choice.number, self._room["chosen"][choice.number * each :][:each].view(rows, -1))

    def head(self, hidden_NH: Tensor) -> Tensor:
        return packed.linear(hidden_NH, self._packed_head, getattr(self._head, "bias", None))

    def _begin(self, tokens_T: Tensor) -> Tensor:
        """Embeddings in the first rows of x, and room for everything that follows."""
        rows = packed.padded(len(tokens_T))
        if not self._room or len(self._room["x"]) < rows:
            self._room = self._rooms(rows)
            for name, tensor in self._room.items():
                setattr(self._decoder, name, tensor.data_ptr())
        x = self._room["x"][: len(tokens_T)]
        torch.index_select(self.embedding.detach(), 0, tokens_T, out=x)
        return x if self.multipliers[0] == 1.0 else x.mul_(self.multipliers[0])

    def _rooms(self, rows: int) -> dict[str, Tensor]:
        """Room for what passes through the layers, by the names in `packed.Decoder`."""
        hidden, choices = self._decoder.hidden, [layer.choice for layer in self.layers if layer.choice is not None]
        widths = {"x": hidden, "added": hidden, "qkv": len(self.layers[0].qkv), "normed": hidden}
        widths["mixed"] = self.heads * self._decoder.dim
        gated = max((rows * layer.inner for layer in self.layers if layer.choice is None), default=0)
        room = {name: torch.zeros(rows, width, dtype=self._dtype) for name, width in widths.items()}
        if choices:
            experts, pairs = len(choices[0].weight), rows * choices[0].top_k
            gathered = packed.padded(pairs, experts)
            gated = max(gated, *(gathered * layer.inner for layer in self.layers if layer.choice is not None))
            room["gathered"] = torch.zeros(gathered, hidden, dtype=self._dtype)
            room["logits"] = torch.zeros(rows, experts, dtype=self._dtype)
            room["gates"] = torch.zeros(pairs)
            room["chosen"] = torch.zeros(len(choices) * pairs, dtype=torch.int32)
            room["pair_of"] = torch.zeros(gathered, dtype=torch.int32)
            room["groups"] = torch.zeros(experts + 1, 2, dtype=torch.int64)
        return room | {"gated": torch.zeros(gated, dtype=self._dtype)}

    def _describe_mixture(self, i: int) -> packed.ExpertMix | None:
        choice, bias = self.layers[i].choice, self._limits[i]
        if choice is None:
            return None
        _, down_bias, alpha, limit = choice.limits or (None, None, 0.0, 0.0)
        tensors = {
            "router": self._packed[i]["router"].data, "router_bias": choice.bias, "gate_up_bias": bias,
            "down_bias": down_bias,
        }  # fmt: skip
        return packed.ExpertMix(
            **{name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None},
            number=choice.number, experts=len(choice.weight), top_k=choice.top_k, renormalise=choice.renormalise,
            alpha=alpha, limit=limit,
        )  # fmt: skip

    def _describe(self, i: int) -> packed.Layer:
        layer, how, of_heads = self.layers[i], self.layers[i].attention, self.layers[i].norms
        query_norm, key_norm, eps_heads = of_heads or (None, None, 0.0)
        norms = {
            "before_attention": layer.first, "after_attention": layer.after[0],
            "before_mlp": layer.second, "after_mlp": layer.after[1],
        }  # fmt: skip
        (rule,) = {norm.rule for norm in norms.values() if norm is not None}
        cos, sin = layer.turn
        copies, mixture = self._packed[i], self._mixtures[i]
        tensors = {
            **{name: copies[name].data for name in ("qkv", "out", "gate_up", "down")},
            **{name: norm.weight for name, norm in norms.items() if norm is not None},
            "bias": layer.qkv_bias, "query_norm": query_norm, "key_norm": key_norm, "cos": cos, "sin": sin,
            "out_bias": layer.out_bias, "keys": self.cache.keys[i].numbers, "values": self.cache.values[i].numbers,
            "sinks": self._sinks[i],
        }  # fmt: skip
        return packed.Layer(
            **{name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None},
            **{f"eps_{name}": 0.0 if norm is None else norm.eps for name, norm in norms.items()},
            eps_heads=eps_heads, window=how.window or 0, scale=how.scale, softcap=how.softcap or 0.0, rule=int(rule),
            head_rule=int(layer.rule), wide_norms=query_norm is not None and len(query_norm) != self._decoder.dim,
            pairs=layer.pairs, gelu=layer.gelu, mixture=None if mixture is None else ctypes.addressof(mixture),
            inner=copies["down"].depth, gate_up_step=copies["gate_up"].step, down_step=copies["down"].step,
        )  # fmt: skip

    @staticmethod
    def _find_addresses(policy: Policy) -> list[int]:
        return [p.data_ptr() for p in policy.model.parameters()]


def _room_for(layer: DecoderLayer) -> dict[str, packed.Packed]:
    """Room for the packed copies of a layer, by their names in `packed.Layer` and `packed.ExpertMix`."""
    dtype, hidden, inner = layer.qkv.dtype, len(layer.out), layer.inner
    experts = 1 if layer.choice is None else len(layer.choice.weight)
    copies = {
        "qkv": packed.Packed.room_for(layer.qkv.shape, dtype),
        "out": packed.Packed.room_for(layer.out.shape, dtype),
        "gate_up": packed.Packed.room_for((2 * inner, hidden), dtype, experts),
        "down": packed.Packed.room_for((hidden, inner), dtype, experts),
    }
    return copies if layer.choice is None else copies | {"router": packed.Packed.room_for((experts, hidden), dtype)}


def _experts(layer: DecoderLayer) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Gate, up and down of each, as products want them; a dense layer is one."""
    all_gate_up, all_down = layer.gate_up.detach(), layer.down.detach()
    if layer.choice is None:
        all_gate_up, all_down = all_gate_up[None], all_down[None]
    for gate_up, down in zip(all_gate_up, all_down, strict=True):
        if layer.choice is not None and layer.choice.limits is not None:
            yield gate_up[:, 0::2].t().contiguous(), gate_up[:, 1::2].t().contiguous(), down.t().contiguous()
        else:
            gate, up = gate_up.chunk(2)
            yield gate, up, down


def _limit_bias(layer: DecoderLayer) -> Tensor | None:
    """`[experts, 2, inner]` of experts that keep the biases of gate and up in turn."""
    if layer.choice is None or layer.choice.limits is None:
        return None
    bias = layer.choice.limits[0].detach()
    return bias.view(len(bias), -1, 2).transpose(1, 2).contiguous()


def _rules(layer: Any) -> set[NormRule]:
    """The rules of the norms around attention and MLP."""
    norms = (norm_of(getattr(layer, name)) for name in halves_of(layer) or () if name)
    return {norm.rule for norm in norms if norm is not None}
