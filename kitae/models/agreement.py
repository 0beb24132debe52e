"""Checks when a model is loaded that it computes the same with Kitae's attention as with its own.

A model that attends in another way, or reads positions differently, would otherwise train and sample wrongly without an
error. Fused modules know one attention only, so this check comes before them.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from kitae.errors import ModelError
from kitae.models import attention_seam
from kitae.models.attention_seam import AttentionCall, SelfAttention

_PROBE = 12  # tokens
_OWN = "eager"


def check_attention(model: Any, source: str) -> None:
    """Raise if the last hidden states differ by more than rounding, or if there are none."""
    name, config = f"{source}: {type(model).__name__}", model.config.get_text_config()
    positions = torch.arange(_PROBE, device=next(model.parameters()).device)
    tokens = positions * 7919 % config.vocab_size
    context = SelfAttention(positions)
    try:
        ours = _states(model, tokens, positions, kitae=context)
    except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(
            f"{name} must compute with the attention of Kitae, got {type(error).__name__}: {error}"
        ) from error
    _check_calls(name, config, context.calls)
    theirs = _with_its_own(model, tokens, positions)
    if theirs is not None and not (found := gap(ours, theirs)) < (1e-3 if model.dtype == torch.float32 else 0.1):
        raise ModelError(
            f"{name} must give the same with the attention of Kitae as with its own, got states that differ by "
            f"{found:.2g} of their size"
        )


def _check_calls(name: str, config: Any, calls: list[AttentionCall]) -> None:
    if (most := max(Counter(call.layer for call in calls).values(), default=1)) > 1:
        raise ModelError(f"{name} must attend once in a layer, got {most} times")
    if missing := _without_window(config, calls):
        raise ModelError(
            f"{name} must tell its attention how far a token sees, got a sliding_window of {config.sliding_window} "
            f"that layer {min(missing)} does not hand on"
        )


def _without_window(config: Any, calls: list[AttentionCall]) -> set[int]:
    """Layers that should have passed a window but did not; it is too long to be tested by computing. If the config does
    not say which layers have windows, one layer with a window is enough."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not isinstance(window, int) or not 0 < window < config.max_position_embeddings:
        return set()
    found = {call.layer for call in calls if call.window is not None}
    if not kinds:
        return set() if found else {0}
    return {i for i, kind in enumerate(kinds) if kind == "sliding_attention"} - found


def _states(model: Any, tokens: Tensor, positions: Tensor, **context: Any) -> Tensor:
    with torch.no_grad():
        found = model.get_decoder()(input_ids=tokens[None], position_ids=positions[None], use_cache=False, **context)
    states: Tensor = found.last_hidden_state[0].float()
    return states


def _with_its_own(model: Any, tokens: Tensor, positions: Tensor) -> Tensor | None:
    """The states with the model's own attention; None if it has none that can be selected."""
    try:
        model.set_attn_implementation(_OWN)
        return _states(model, tokens, positions)
    except (AttributeError, ImportError, RuntimeError, ValueError):
        return None
    finally:
        model.set_attn_implementation(attention_seam.NAME)


def gap(ours: Tensor, theirs: Tensor) -> float:
    """The median relative difference of states `[T, H]`: in a mixture, rounding may change a few tokens' experts."""
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-6)).median())
