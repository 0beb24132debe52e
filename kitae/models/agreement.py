"""Checks when a model is loaded that it computes the same with Kitae's attention and kernels as by itself.

A model that attends in another way, or reads positions differently, would otherwise train and sample wrongly without an
error. What it computes by itself is kept before anything of it is changed, and compared after each change. So would
one with mixers that cannot go on from the states that they give.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kitae.errors import ModelError
from kitae.models import attention_seam
from kitae.models.attention_seam import AttentionCall, SelfAttention, keywords, use_attention
from kitae.models.parts import context_of, decoder_of
from kitae.models.pass_context import by_thread
from kitae.models.routing import is_router
from kitae.models.state_seam import MixerCall, mixers_of

_LENGTHS = (3, 24)  # tokens of the sequences that are tried; most bugs show early in a sequence, or late
_PAUSED = 12  # of the sequence in which mixers pause
_OWN = "eager"


def own_states(model: Any) -> list[Tensor] | None:
    """The last hidden states of some sequences with the model's own attention; None if it has none that can be
    selected."""
    try:
        use_attention(model, _OWN)
        rows = [_sequence(model, length) for length in _LENGTHS]
        return [
            _states(model, input_ids=tokens[None], position_ids=positions[None], use_cache=False)
            for tokens, positions in rows
        ]
    except (AttributeError, ImportError, RuntimeError, TypeError, ValueError):
        return None
    finally:
        use_attention(model, attention_seam.NAME)


def check_attention(model: Any, source: str, own: Sequence[Tensor] | None, *, windows_known: bool = False) -> None:
    """Raise if the last hidden states differ from the model's own by more than rounding, or if there are none.

    windows_known: whether the masks of the model have said what each layer sees. Otherwise a layer that should have a
    window must hand it on: it may be too long to be tried.
    """
    name = f"{source}: {type(model).__name__}"
    for number, length in enumerate(_LENGTHS):
        tokens, positions = _sequence(model, length)
        context = SelfAttention(positions)
        try:
            with by_thread(context):
                ours = _states(model, **keywords(context, tokens, positions))
        except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            if not context.calls and not isinstance(error, AssertionError):
                raise _without_interface(name) from error
            raise ModelError(
                f"{name} must compute with the attention of Kitae, got {type(error).__name__}: {error}"
            ) from error
        if not windows_known:
            _check_windows(name, model.config.get_text_config(), context.calls)
        if own is not None and not _are_alike(model, ours, own[number]):
            raise _different(name, ours, own[number]) if context.calls else _without_interface(name)


def _are_alike(model: Any, ours: Tensor, theirs: Tensor) -> bool:
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.1
    apart = _apart(ours, theirs)
    # In a mixture rounding may change the experts of some tokens; else no token may be far off.
    mixes = any(map(is_router, model.modules()))
    return bool(apart.median() < tolerance and (mixes or apart.max() < 3 * tolerance))


def _different(name: str, ours: Tensor, theirs: Tensor) -> ModelError:
    return ModelError(
        f"{name} must give the same with the attention of Kitae as with its own, got states that differ by "
        f"{float(_apart(ours, theirs).max()):.2g} of their size"
    )


def _without_interface(name: str) -> ModelError:
    return ModelError(f"{name} must attend by way of transformers' attention interface, got modules that do not")


def _apart(ours: Tensor, theirs: Tensor) -> Tensor:
    """The relative difference of the states of each token."""
    apart: Tensor = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-6)
    return apart


def check_pauses(model: Any, source: str) -> None:
    """Raise if mixers do not give the same with pauses, but for rounding."""
    if not (mixers := mixers_of(model)):
        return
    tokens, positions = _sequence(model, _PAUSED)
    paused = _Paused(positions)
    with by_thread(paused):
        _states(model, **keywords(paused, tokens, positions))
    if not paused.gap < (1e-4 if model.dtype == torch.float32 else 0.05):
        kinds = ", ".join(sorted({type(mixer).__name__ for mixer in mixers}))
        raise ModelError(
            f"{source}: {type(model).__name__} must go on from a state as if there had been no pause, got outputs of "
            f"{kinds} that differ by {paused.gap:.2g} of their size"
        )


class _Paused(SelfAttention):
    """Mixers compute a row in the ways that trainer and engine have: from the start, on from a state that two
    sequences have in common, one of which is filled up, and one token alone. gap: how much that changes what they
    return."""

    gap = 0.0

    def carry(self, call: MixerCall) -> None:
        rows = torch.arange(call.tokens, device=call.device)
        call.run(rows[None])
        paused = call.anew()
        common = paused.run(rows[None, :7], {})
        branches = torch.stack((rows[7:11], torch.where(rows[7:11] < 9, rows[7:11], call.tokens)))
        states = paused.run(branches, {name: state.repeat_interleave(2, 0) for name, state in common.items()})
        paused.run(rows[None, 11:], {name: state[:1] for name, state in states.items()})
        whole, parts = (_first(each.result())[0].flatten(1).float() for each in (call, paused))
        for after in (slice(7, 11), slice(11, 12)):
            self.gap = max(self.gap, gap(parts[after], whole[after]))


def _first(returned: Any) -> Tensor:
    found: Tensor = returned[0] if isinstance(returned, tuple) else returned
    return found


def _check_windows(name: str, config: Any, calls: list[AttentionCall]) -> None:
    if missing := _without_window(config, calls):
        raise ModelError(
            f"{name} must tell its attention how far a token sees, got a sliding_window of {config.sliding_window} "
            f"that layer {min(missing)} does not hand on"
        )


def _without_window(config: Any, calls: list[AttentionCall]) -> set[int]:
    """Layers that should have passed a window but did not. If the config does not say which layers have windows, one
    layer with a window is enough."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not isinstance(window, int) or not 0 < window < context_of(config):
        return set()
    found = {call.layer for call in calls if call.window is not None}
    if not kinds:
        return set() if found else {0}
    return {i for i, kind in enumerate(kinds) if kind == "sliding_attention"} - found


def _sequence(model: Any, length: int) -> tuple[Tensor, Tensor]:
    positions = torch.arange(length, device=next(model.parameters()).device)
    return (positions + 1) * 7919 % model.config.get_text_config().vocab_size, positions


def _states(model: Any, **given: Any) -> Tensor:
    with torch.no_grad():
        found = decoder_of(model)(**given)
    states: Tensor = found.last_hidden_state[0].float()
    return states


def gap(ours: Tensor, theirs: Tensor) -> float:
    """The median relative difference of states `[T, H]`: in a mixture, rounding may change a few tokens' experts."""
    return float(_apart(ours, theirs).median())
