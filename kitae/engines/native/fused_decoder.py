"""The decoder of a policy, computed layer by layer from a description of its layers instead of by its modules.

`FusedDecoder` is what the decoders for GPUs (`gpu_decoder`) and CPUs (`cpu_runner`) share: it reads the policy's own
parameters, and is used only after it agreed with the model's own forward pass on a probe. Weights with LoRA adapters
are copies, which `refresh` makes again when weights have changed.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from kitae.engines.native.decoder_layers import (
    DecoderLayer,
    MergedWeights,
    describe_layer,
    describe_norm,
    is_known,
    multipliers,
    rotary_tables,
)
from kitae.engines.native.page_cache import KVCache
from kitae.errors import EngineError
from kitae.models.agreement import gap
from kitae.models.attention_seam import AttentionCall, AttentionContext, SelfAttention
from kitae.models.policy import Policy

log = logging.getLogger("kitae")

_PROBE = 24  # tokens

RecordExperts = Callable[[int, Tensor], None]  # (number among the layers that mix experts, experts_TK)


class FusedDecoder:
    @classmethod
    def of(cls, policy: Policy, cache: KVCache) -> Self | None:
        """The decoder of a policy, if its layers are of a known kind and both agree on a probe."""
        if not cache.is_even or not is_known(policy) or not cls.covers(policy):
            return None
        with torch.inference_mode():
            tokens = torch.arange(_PROBE, device=policy.device) * 7919 % policy.vocabulary
            positions = torch.arange(_PROBE, device=policy.device)
            recorder = SelfAttention(positions)
            expected = policy.hidden(tokens, positions, recorder)
            with torch.inference_mode(False):
                found = cls(policy, cache, recorder.calls)
            if any(layer.turn[0].shape[1] != policy.head_dim for layer in found.layers):  # only a part is rotated
                return None
            trash = torch.full_like(positions, cache.pages * cache.page_size)
            got = found.hidden(tokens, positions, trash, SelfAttention(positions))
            apart = found.distance(got.float(), expected.float())
        if not apart < (1e-3 if policy.dtype == torch.float32 else 0.1):
            log.warning("%s: the fused decoder differs from the model (%.2g), so it is not used", policy.source, apart)
            return None
        return found

    @classmethod
    def covers(cls, policy: Policy) -> bool:
        """Whether the kernels can compute a policy of known structure."""
        return True

    def __init__(self, policy: Policy, cache: KVCache, attentions: Sequence[AttentionCall]) -> None:
        decoder: Any = policy.decoder
        self.heads = policy.heads
        self.cache = cache
        self.embedding: Tensor = decoder.embed_tokens.weight
        self.norm = describe_norm(decoder.norm)
        self.multipliers = multipliers(policy)
        self.layers: list[DecoderLayer] = []
        self._merged = MergedWeights()
        reach = min(policy.max_context, cache.pages * cache.page_size) + 1  # an ended row may stand one past the end
        tables = rotary_tables(policy, max(reach, _PROBE))
        for layer, how, turn in zip(decoder.layers, attentions, tables, strict=True):
            mixing = sum(known.choice is not None for known in self.layers)
            self.layers.append(describe_layer(layer, how, turn, mixing, self._merged))
        self.refresh()

    def refresh(self) -> None:
        """Make all copies of weights again, in place, since the weights have changed."""
        self._merged.fill()

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        context: AttentionContext,
        record: RecordExperts | None = None,
    ) -> Tensor:
        """Last hidden states `[T, H]`. Keys and values go to `slots_T` of the cache before the context attends.

        record: is called with the experts that each layer chooses.
        """
        raise NotImplementedError

    @property
    def is_mixture(self) -> bool:
        return any(layer.choice is not None for layer in self.layers)

    def distance(self, got: Tensor, expected: Tensor) -> float:
        """Between hidden states `[T, H]`, or logits: of all tokens, or, in a mixture, of most."""
        return gap(got, expected) if self.is_mixture else float((got - expected).norm() / expected.norm())

    def require_float8_layers(self, policy: Policy) -> None:
        """Raise `EngineError` unless the weights of all layers can be kept in 8 bits."""
        wrong = None
        if self.is_mixture:
            wrong = "experts have no kernels for weights in 8 bits"
        elif any(layer.first is None or layer.second is None for layer in self.layers):
            wrong = "its layers have no norm before attention or MLP, which bounds what 8 bits must hold"
        elif sizes := [size for layer in self.layers for size in (*layer.qkv.shape, *layer.down.shape) if size % 16]:
            wrong = f"products in 8 bits need sizes that are multiples of 16, got {sizes[0]}"
        if wrong is not None:
            raise EngineError(f"engine.weights_dtype = 'float8': {policy.source}: {wrong}")
