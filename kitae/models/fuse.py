"""Run the slow small modules of a model (norms, gated MLPs) through one compiled kernel each, where that is exact.

A module is replaced only after its own forward pass and the fused one agreed on a probe, so an unknown variant (a
norm that adds 1 to its weight, say) simply stays as it is. Parameters, names and saved models do not change.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from kitae.kernels import ops


def fuse(model: nn.Module, device: torch.device, dtype: torch.dtype) -> int:
    """Replace what can be replaced; returns how many modules were."""
    kernels = ops.training_kernels(device, dtype)
    if kernels is None:
        return 0
    return sum(_fuse_norm(m, kernels) or _fuse_mlp(m, kernels) for m in model.modules())


def _fuse_norm(module: Any, kernels: Any) -> bool:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(eps, float) or weight is None:
        return False

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return kernels.rms_norm(hidden_states, self.weight, eps)  # type: ignore[no-any-return]

    return _swap_if_equal(module, forward, weight)


def _fuse_mlp(module: Any, kernels: Any) -> bool:
    parts = ("gate_proj", "up_proj", "down_proj", "act_fn")
    if not all(hasattr(module, part) for part in parts) or not isinstance(module.gate_proj, nn.Module):
        return False
    if not isinstance(module.act_fn, nn.SiLU) and type(module.act_fn).__name__ != "SiLUActivation":
        return False

    def forward(self: Any, x: Tensor) -> Any:
        gate, up, down = self.gate_proj(x), self.up_proj(x), self.down_proj
        # With an adapter these are other classes, and the outputs may be needed elsewhere.
        plain = all(type(m) is nn.Linear for m in (self.gate_proj, self.up_proj, down))
        if joint is not None and plain and down.bias is None:
            return joint(gate, up, down.weight)
        return down(kernels.swiglu(gate, up))

    joint = getattr(kernels, "swiglu_linear", None)
    first: Any = module.gate_proj
    return _swap_if_equal(module, forward, first.weight)


def _swap_if_equal(module: Any, function: Any, weight: Tensor) -> bool:
    fused = MethodType(function, module)  # bound, so that a deep copy of the model uses its own weights
    width, dtype = weight.shape[-1], weight.dtype
    probe = torch.linspace(-3, 3, 2 * width, dtype=torch.float32).sin().view(1, 2, width).to(weight.device, dtype)
    with torch.inference_mode():
        try:
            expected, got = module(probe), fused(probe)
        except (RuntimeError, TypeError, AssertionError):
            return False
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        if not torch.allclose(expected.float(), got.float(), rtol=tolerance, atol=tolerance):
            return False
    module.forward = fused
    return True
