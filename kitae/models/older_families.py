"""Families from before transformers' attention interface, whose modules attend in a method of their own.

They hand on no keywords, so the context comes by way of the thread. Activations cannot be computed again for them.
"""

from types import MethodType
from typing import Any

from torch import Tensor

from kitae.models.attention_seam import attend_by_thread

_TRANSPOSED = ("openai-gpt",)  # keys come as [1, H, D, T]
_UNSCALED = ("gpt_neo",)
_METHOD = "_attn"


def is_older(model: Any) -> bool:
    return any(hasattr(type(module), _METHOD) for module in model.modules())


def adopt(model: Any) -> None:
    """Let the modules of such a family attend through the context. What they compute otherwise must be the usual:
    the checks that follow compare it with their own."""
    layers = [module for module in model.modules() if hasattr(type(module), _METHOD)]
    for number, module in enumerate(layers):
        module.layer_idx = number
        module.kitae_transposed = model.config.model_type in _TRANSPOSED
        module.kitae_scale = 1.0 if model.config.model_type in _UNSCALED else None
        module.kitae_window = model.config.window_size if getattr(module, "attention_type", "") == "local" else None
        setattr(module, _METHOD, MethodType(_attend, module))


def _attend(self: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> list[Any]:
    """`[1, H, T, D]` each, and so is what it returns; the keys may be transposed."""
    if self.kitae_transposed:
        key = key.transpose(2, 3)
    out = attend_by_thread(self, query.to(value.dtype), key.to(value.dtype), value, scaling=self.kitae_scale)
    return [out.transpose(1, 2), None][: 1 if self.kitae_transposed else 2]
