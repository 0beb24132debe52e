"""Families from before transformers' attention interface, whose modules attend in a method of their own.

They hand on no keywords, so the context comes by way of the thread.
"""

from types import MethodType
from typing import Any

from torch import Tensor

from kitae.models.attention_seam import attend_by_thread

_TRANSPOSED = ("openai-gpt",)  # keys come as [1, H, D, T]
_UNSCALED = ("gpt_neo",)
_PROJECTED = ("xglm",)  # all that modules compute beside projections is attention
_METHOD = "_attn"


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
    if model.config.model_type in _PROJECTED:
        for module in model.modules():
            if {name for name, _ in module.named_children()} == {"q_proj", "k_proj", "v_proj", "out_proj"}:
                module.forward = MethodType(_project_and_attend, module)


def _attend(self: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> list[Any]:
    """`[1, H, T, D]` each, and so is what it returns; the keys may be transposed."""
    if self.kitae_transposed:
        key = key.transpose(2, 3)
    out = attend_by_thread(self, query.to(value.dtype), key.to(value.dtype), value, scaling=self.kitae_scale)
    return [out.transpose(1, 2), None][: 1 if self.kitae_transposed else 2]


def _project_and_attend(self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    q, k, v = (
        project(hidden_states).view(1, hidden_states.shape[1], self.num_heads, self.head_dim).transpose(1, 2)
        for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    out = attend_by_thread(self, q, k, v, scaling=self.scaling)
    return self.out_proj(out.flatten(2)), None
