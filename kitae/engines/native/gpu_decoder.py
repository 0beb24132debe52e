"""The decoder of a policy on the Triton kernels of `kitae.kernels.cuda`, reading the policy's own parameters.

`hidden` computes any number of rows. `small_batch_logits` computes a few rows in fewer kernels, for models that are
plain but for their rotary; it is used where it agrees with `hidden`. Import this module only where Triton is.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from triton.errors import TritonError

from kitae.engines.native import float8_weights
from kitae.engines.native.decoder_layers import DecoderLayer, ExpertChoice, is_plain
from kitae.engines.native.fused_decoder import FusedDecoder, RecordExperts
from kitae.engines.native.page_cache import KVCache
from kitae.errors import EngineError
from kitae.kernels import float8
from kitae.kernels.cuda import decoding, expert_decoding, paged, shared_prompts, small_batch
from kitae.kernels.cuda.float8_products import LayerFloat8
from kitae.kernels.cuda.shared_prompts import Groups
from kitae.kernels.cuda.small_batch import Stream
from kitae.kernels.norms import Norm
from kitae.models.attention_seam import AttentionCall, AttentionContext
from kitae.models.policy import Policy

log = logging.getLogger("kitae")


class GpuDecoder(FusedDecoder):
    @classmethod
    def of(cls, policy: Policy, cache: KVCache) -> "GpuDecoder | None":
        found = super().of(policy, cache)
        if found is not None and policy.device.type == "cuda":
            found.check_small_batch(policy)
        return found

    def __init__(self, policy: Policy, cache: KVCache, attentions: Sequence[AttentionCall]) -> None:
        self.float8: list[LayerFloat8] = []
        self._plain = is_plain(policy)
        self._counters = torch.zeros(4096, dtype=torch.int32, device=policy.device)
        super().__init__(policy, cache, attentions)

    def refresh(self) -> None:
        super().refresh()
        if self.float8:
            float8_weights.store(self.layers, self.float8)

    @torch.inference_mode()
    def use_float8(self, policy: Policy) -> None:
        """From now on compute q, k, v and the MLP with weights in 8 bits."""
        if not float8.has_products(policy.device):
            raise EngineError(f"engine.weights_dtype = 'float8' {float8.GPUS}, got {policy.device}")
        self.require_float8_layers(policy)
        with torch.inference_mode(False):
            self.float8 = float8_weights.allocate(self.layers)
        float8_weights.store(self.layers, self.float8)
        self.check_small_batch(policy)

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        context: AttentionContext,
        record: RecordExperts | None = None,
    ) -> Tensor:
        first, each = self.multipliers
        x = nn.functional.embedding(tokens_T, self.embedding)
        x = x if first == 1.0 else x * first
        pending: Tensor | None = None
        units: Tensor | None = None  # of the rows of what is pending
        after: Norm | None = None
        for i, layer in enumerate(self.layers):
            keys, values = self.cache.keys[i], self.cache.values[i]
            how = layer.attention
            low = self.float8[i] if self.float8 else None
            unit = None if low is None else low.before_qkv
            x, normed = decoding.add_and_norm(x, pending, after, layer.first, each, units=units, unit=unit)
            if low is None:
                qkv = torch.mm(normed, layer.qkv.t())
            else:
                qkv = float8_weights.queries_keys_values(normed, low, x.dtype)
            decoding.rotate_and_store(
                qkv, layer.qkv_bias, layer.norms, *layer.turn, positions_T, slots_T,
                (keys.numbers, keys.scales), (values.numbers, values.scales), self.heads, layer.rule, layer.pairs,
            )  # fmt: skip
            kv_heads, _, dim = keys.numbers.shape[1:]
            by_head = qkv.view(len(x), -1, dim).transpose(0, 1)
            q, k, v = by_head[: self.heads], by_head[self.heads : -kv_heads], by_head[-kv_heads:]
            mixed = context.attend(i, q, k, v, scale=how.scale, window=how.window, softcap=how.softcap, sinks=how.sinks)
            pending = _linear(mixed.reshape(len(x), -1), layer.out, layer.out_bias)
            unit = None if low is None else low.before_gate_up
            x, normed = decoding.add_and_norm(x, pending, layer.after[0], layer.second, each, unit=unit)
            if layer.choice is not None:
                logits = _linear(normed, layer.choice.weight, layer.choice.bias)
                pending = _mix(layer, layer.choice, normed, logits, record)
            elif low is None:
                pending = torch.mm(
                    decoding.swiglu(torch.mm(normed, layer.gate_up.t()), gelu=layer.gelu), layer.down.t()
                )
            else:
                pending, units = float8_weights.mlp(normed, low, x.dtype, gelu=layer.gelu)
            after = layer.after[1]
        return decoding.add_and_norm(x, pending, after, self.norm, each, units=units)[1]

    @property
    def small_batch_rows(self) -> int:
        """The most rows for which `small_batch_logits` is used; 0 where it does not compute what the model needs."""
        if not self._plain:
            return 0
        return 16 if self.float8 or self.is_mixture else small_batch.MOST

    @torch.inference_mode()
    def check_small_batch(self, policy: Policy) -> None:
        """Compare `small_batch_logits` with `hidden`; where it cannot run, or differs, it is not used."""
        if self.small_batch_rows and (wrong := self._small_batch_fault(policy)):
            log.warning("%s: the kernels for small batches %s, so they are not used", policy.source, wrong)
            self._plain = False

    def _small_batch_fault(self, policy: Policy) -> str | None:
        """What is wrong with the logits of lone tokens, which need no pages; None if nothing is."""
        exact = policy.dtype == torch.float32 and self.cache.values[0].scales is None  # 8 bits round values
        for count in (8, 16):
            device, head = policy.device, policy.head.weight
            tokens = torch.arange(count, device=device) * 7919 % policy.vocabulary
            first, trash = torch.zeros_like(tokens), torch.full_like(tokens, self.cache.pages * self.cache.page_size)
            table, lengths = first[:, None].to(torch.int32), torch.ones_like(tokens, dtype=torch.int32)
            logits = torch.empty(count, len(head), dtype=head.dtype, device=device)
            expected = torch.mm(self.hidden(tokens, first, trash, _Alone()), head.t())
            try:
                self.small_batch_logits(tokens, first, trash, table, lengths, head, logits)
            except (TritonError, RuntimeError) as error:
                return f"cannot be computed here ({error})"
            found = self.distance(logits.float(), expected.float())
            if not found < (0.2 if self.float8 else 1e-3 if exact else 0.1):  # 8 bits are cut in other places
                return f"differ ({found:.2g})"
        return None

    def small_batch_logits(
        self, tokens_B: Tensor, positions_B: Tensor, slots_B: Tensor, table: Tensor, lengths_B: Tensor, head: Tensor,
        logits: Tensor, record: RecordExperts | None = None, groups: Groups | None = None,
    ) -> Stream:  # fmt: skip
        """Logits of at most `small_batch_rows` new tokens, over the pages of their sequences.

        What `hidden` and a product with the weight of the head compute, in fewer kernels. A table with fewer rows is
        that of sequences which have several neighbouring ones. groups: of sequences that begin alike. Returns the
        stream after the last layer.
        """
        stream = self._small_batch_stream(tokens_B, positions_B, slots_B, table, lengths_B, record, groups)
        small_batch.normed_product(stream, self.norm.eps, head, out=logits)
        return stream

    def last_states(self, stream: Stream) -> Tensor:
        """What `hidden` gives, of the stream that `small_batch_logits` returns, in fp32."""
        width = stream.rows.shape[1]
        return stream.gained.float() * torch.rsqrt(stream.squares.sum(1, keepdim=True) / width + self.norm.eps)

    def _small_batch_stream(
        self, tokens_B: Tensor, positions_B: Tensor, slots_B: Tensor, table: Tensor, lengths_B: Tensor,
        record: RecordExperts | None, groups: Groups | None,
    ) -> Stream:  # fmt: skip
        gains = [layer.before_attention for layer in self.layers[1:]] + [self.norm.weight]
        stream = small_batch.embed(tokens_B, self.embedding, self.layers[0].before_attention, self._counters)
        for i, (layer, gain) in enumerate(zip(self.layers, gains, strict=True)):
            keys, values, how = self.cache.keys[i], self.cache.values[i], layer.attention
            low = self.float8[i] if self.float8 else None
            first, unit = (layer.qkv, None) if low is None else (low.qkv, low.before_qkv)
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
            if low is not None:
                unit = low.before_gate_up
                act = small_batch.normed_product(stream, layer.eps[1], low.gate_up, gated=True, unit=unit)
                small_batch.add_product(stream, act, low.down, gain)
            elif layer.choice is None:
                act = small_batch.normed_product(stream, layer.eps[1], layer.gate_up, gated=True)
                small_batch.add_product(stream, act, layer.down, gain)
            else:
                parts, normed = small_batch.normed_parts(stream, layer.eps[1], layer.choice.weight)
                small_batch.add_parts(stream, _mix(layer, layer.choice, normed, parts, record), gain)
        return stream


class _Alone:
    """The attention of tokens that see nothing but themselves, which gives their values."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        return v.repeat_interleave(len(q) // len(v), 0).transpose(0, 1)


def _mix(
    layer: DecoderLayer, choice: ExpertChoice, x_TH: Tensor, logits: Tensor, record: RecordExperts | None
) -> Tensor:
    """What the chosen experts of a layer make of rows; logits: of the router, `[T, E]` or `[parts, T, E]`."""
    gates_TK, experts_TK = expert_decoding.route(logits, choice.top_k, choice.renormalise, x_TH.dtype)
    if record is not None:
        record(choice.number, experts_TK)
    return expert_decoding.mix(x_TH, gates_TK, experts_TK, layer.gate_up, layer.down, choice.limits)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
