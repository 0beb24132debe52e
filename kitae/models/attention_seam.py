"""The seam between Hugging Face modules and Kitae's two uses of them.

Models run with the attention implementation "kitae". Each call of the model has a context object as the keyword
`kitae`. The layers pass it their queries, keys and values, and the context decides which tokens attend to which: packed
sequences in training, a paged cache in decoding. There is no global state and no patched model code.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kitae.models.latent import Latent, SeesLatents, latent_of, projections_of
from kitae.models.parts import text_part
from kitae.models.pass_context import of_thread
from kitae.models.state_seam import MixerCall, States

NAME = "kitae"


class AttentionContext(Protocol):
    """Attention over one packed row of T tokens.

    q `[Hq, T, D]`, k and v `[Hkv, T, D]`, rotary already applied; the last dimension is contiguous, the others may be
    strided. Where keys and values differ in size, the shorter ones end in zeros. Returns `[T, Hq, D]`. `window`: a
    token sees itself and window - 1 tokens before it. `sinks` `[Hq]`: an extra logit per head that takes part in the
    softmax only. Must be free of side effects when gradients are on (activation checkpointing calls it twice).
    """

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor: ...


def _forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    kitae: AttentionContext | None = None,
    position_ids: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    kitae = getattr(position_ids, CARRIED, None) if kitae is None else kitae
    assert kitae is not None, "a model with attention 'kitae' must be called with kitae=<context>"
    assert attention_mask is None or attention_mask is UNMASKED, "what attends to what may not be in a mask of its own"
    assert query.shape[0] == 1, f"expected one packed row, got {query.shape[0]}"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    window = getattr(module, WINDOW, None) if sliding_window is None else sliding_window
    q, k, v = (t.squeeze(0) for t in (query, key, value))
    size = max(k.shape[2], v.shape[2])
    q, k, padded = (t if t.shape[2] == size else pad(t, (0, size - t.shape[2])) for t in (q, k, v))
    out = kitae.attend(layer, q, k, padded, scale=scale, window=window, softcap=softcap, sinks=s_aux)
    return out[..., : v.shape[2]].contiguous().unsqueeze(0), None


class _Unmasked:
    """Stands for a mask where a layer must have one; each part of it is the whole."""

    def __getitem__(self, _: Any) -> "_Unmasked":
        return self


UNMASKED = _Unmasked()


def attend_by_thread(module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, *, scaling: float | None) -> Tensor:
    """As the attention interface has it, with the context of the thread."""
    return _forward(module, q, k, v, None, scaling=scaling, kitae=of_thread())[0]


CARRIED = "kitae"
"""The attribute of position ids that is the context, for layers that hand on positions, but no other keyword."""


def keywords(context: AttentionContext, tokens_T: Tensor, positions_T: Tensor) -> dict[str, Any]:
    """How a model, or its decoder, is called on a packed row. Positions may be `[3, T]`."""
    position_ids = positions_T.unsqueeze(-2)
    setattr(position_ids, CARRIED, context)
    return {"input_ids": tokens_T.unsqueeze(0), "position_ids": position_ids, "use_cache": False, "kitae": context}


WINDOW = "kitae_window"
"""The attribute of an attention module whose window is known from its mask alone (`kitae.models.masks`)."""


def use_attention(model: Any, name: str) -> None:
    """Let a model attend through the interface of this name; the modules of older families only make its masks then.
    Raises what transformers raises if there is no such interface for the model."""
    model = text_part(model)
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        model.config._attn_implementation = name


def attach_latents(model: torch.nn.Module) -> None:
    """Let the projections of latents tell them to the context of the thread."""

    def tell(expand: Any, given: tuple[Tensor, ...]) -> None:
        context: Any = of_thread()
        if isinstance(context, SeesLatents):
            context.tell(expand, given[0])

    for expand in projections_of(model):
        expand.register_forward_pre_hook(tell)


def register() -> None:
    ALL_ATTENTION_FUNCTIONS.register(NAME, _forward)


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Reference attention of one sequence: q `[Hq, L, D]`, k and v `[Hkv, S, D]`, allowed `[L, S]` → `[L, Hq, D]`.

    Grouped queries are folded into rows instead of expanding the keys. Softmax is in fp32.
    """
    heads, length, dim = q.shape
    kv_heads, span, _ = k.shape
    rows = q.reshape(kv_heads, heads // kv_heads * length, dim)
    scores = torch.bmm(rows, k.transpose(1, 2)).float().mul_(scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(heads, length, span)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        column = sinks.float().view(heads, 1, 1).expand(heads, length, 1)
        weights = torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    mixed = torch.bmm(weights.to(v.dtype).view(kv_heads, -1, span), v)
    return mixed.view(heads, length, dim).transpose(0, 1)


def causal_mask(query_positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
    """`[L, S]`: which key positions each query position sees."""
    distance = query_positions[:, None] - key_positions[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """`AttentionCall(layer=0, size=(2, 64), scale=0.125, window=None, softcap=None, sinks=None, latent=None)`.

    A layer's call of attention. size: heads of keys and values, and numbers of each. latent: what they are made of.
    """

    layer: int
    size: tuple[int, int]
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    latent: Latent | None


class SelfAttention(SeesLatents):
    """One sequence attending to itself, with its tokens in any order. It records the calls, for checks and probes.

    Mixers run its tokens in the order of their positions; their states at the end are recorded too.
    """

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions
        self.calls: list[AttentionCall] = []
        self.states: dict[int, States] = {}  # by mixer

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        latent = latent_of(self.told(), k, v)
        self.calls.append(AttentionCall(layer, (k.shape[0], k.shape[2]), scale, window, softcap, sinks, latent))
        mask = causal_mask(self.positions, self.positions, window)
        return masked_attention(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks)

    def carry(self, call: MixerCall) -> None:
        self.states[call.number] = call.run(self.positions.argsort()[None], {})
