"""Whether a model computes with the attention of Kitae what it computes with its own: tried when it is loaded.

A model that attends in a way of its own, or reads positions otherwise, would train and sample without a complaint, and
wrongly. Fused modules know one attention alone, so this comes before them.
"""

from typing import Any

import torch
from torch import Tensor

from kitae.errors import ModelError
from kitae.models import attention
from kitae.models.attention import causal_mask, masked_attention

_PROBE = 12  # tokens
_OWN = "eager"


def check_attention(model: Any, source: str) -> None:
    """Raise where the last hidden states differ by more than rounding, or where there are none."""
    device = next(model.parameters()).device
    tokens = torch.arange(_PROBE, device=device) * 7919 % model.config.get_text_config().vocab_size
    row = {"input_ids": tokens[None], "position_ids": torch.arange(_PROBE, device=device)[None], "use_cache": False}
    decoder, context = model.get_decoder(), _Counting(row["position_ids"][0])
    try:
        with torch.no_grad():
            ours = decoder(**row, kitae=context).last_hidden_state[0].float()
    except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(
            f"{source}: {type(model).__name__} must compute with the attention of Kitae, got "
            f"{type(error).__name__}: {error}"
        ) from error
    if max(context.calls.values(), default=1) > 1:
        raise ModelError(
            f"{source}: a layer of {type(model).__name__} must attend once, got {max(context.calls.values())} times"
        )
    if (window := _window(model.config.get_text_config())) is not None and not context.windows:
        raise ModelError(
            f"{source}: {type(model).__name__} must tell its attention how far a token sees, got a sliding_window of "
            f"{window} that no layer hands on"
        )
    theirs = _with_its_own(model, decoder, row)
    if theirs is not None and not (gap := _gap(ours, theirs)) < (1e-3 if ours.dtype == model.dtype else 0.1):
        raise ModelError(
            f"{source}: {type(model).__name__} must give the same with the attention of Kitae as with its own, got "
            f"states that differ by {gap:.2g} of their size"
        )


def _window(config: Any) -> int | None:
    """What some layers must ask for: it is too long to be tried."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    short = isinstance(window, int) and 0 < window < config.max_position_embeddings
    return window if short and "sliding_attention" in kinds else None


def _with_its_own(model: Any, decoder: Any, row: dict[str, Any]) -> Tensor | None:
    """None: it has none that can be chosen."""
    try:
        model.set_attn_implementation(_OWN)
        with torch.no_grad():
            found: Tensor = decoder(**row).last_hidden_state[0].float()
    except (AttributeError, ImportError, NotImplementedError, RuntimeError, ValueError):
        return None
    finally:
        model.set_attn_implementation(attention.NAME)
    return found


def _gap(ours: Tensor, theirs: Tensor) -> float:
    """Of most tokens: in a mixture, some may choose another expert by a hair."""
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-6)).median())


class _Counting:
    """One sequence attending to itself."""

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions
        self.calls: dict[int, int] = {}
        self.windows = False

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        self.calls[layer] = self.calls.get(layer, 0) + 1
        self.windows |= window is not None
        mask = causal_mask(self.positions, self.positions, window)
        return masked_attention(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks)
