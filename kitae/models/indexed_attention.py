"""Layers whose tokens see those that an index picks (DeepSeek-V3.2, GLM-5), in sequences that the index takes whole.

An index of k tokens picks all of a sequence of at most k. So sequences are no longer than that (`kitae.models.parts`),
the index is not computed, and it is not trained.
"""

from inspect import signature
from types import MethodType
from typing import Any

from kitae.models.attention_seam import UNMASKED


def take_all(model: Any) -> None:
    """Let layers with an index attend as others do."""
    for module in model.modules():
        if not hasattr(module, "indexer") or "attention_mask" not in signature(module.forward).parameters:
            continue
        if module.indexer is not None:
            module.indexer.forward = MethodType(_nothing, module.indexer)
        module.register_forward_pre_hook(_with_a_mask, with_kwargs=True)


def _nothing(self: Any, *_: Any, **__: Any) -> tuple[()]:
    return ()


def _with_a_mask(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Such layers read a part of their mask for the index."""
    if named.get("attention_mask") is None:
        named = {**named, "attention_mask": UNMASKED}
    return given, named
