"""Matrix products of exact mode: what they give for a row depends on that row alone, bit for bit.

Libraries choose how to add up a matrix product by its shape, so a token's log-prob depends on how many others are
computed with it. Here it does not. On a CPU matrix products run in tiles of a fixed number of rows, the last one filled
up: the library always gets the same shape, and all rows of a shape are added up alike. On a GPU they are a Triton
kernel whose programs each add up whole rows in order.

Gradients may come from any kernel. `kitae.models.exact` puts a model together from these and from
`kitae.kernels.exact.exact_attention`.
"""

from typing import Any

import torch
from torch import Tensor

from kitae.kernels.cpu import ops
from kitae.kernels.devices import has_triton

TILE = 64  # rows of a matrix product on a CPU: fewer cost large batches more, more cost single sequences more
MANY = {"cpu": TILE + 1, "cuda": 1025}  # rows above which a product is computed as that of any number


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` for rows `[T, K]` and weight `[N, K]`, without a gradient."""
    if out is None:
        out = x.new_empty(len(x), len(weight))
    if x.device.type == "cuda":
        from kitae.kernels.exact import exact_gpu

        exact_gpu.product(x.contiguous(), weight, bias, out)
        return out
    x = x.contiguous()
    if x.data_ptr() % 64:  # libraries may treat the first elements of unaligned rows apart
        x = x.clone()
    whole = len(x) // TILE * TILE
    for i in range(0, whole, TILE):
        _multiply(x[i : i + TILE], weight, bias, out[i : i + TILE])
    if rest := len(x) - whole:
        tile = x.new_zeros(TILE, x.shape[1])
        tile[:rest] = x[whole:]
        out[whole:] = _multiply(tile, weight, bias, x.new_empty(TILE, len(weight)))[:rest]
    return out


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, len(weight))
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            torch.mm(grad, weight).view(x.shape) if needs_x else None,
            torch.mm(grad.t(), x.reshape(-1, x.shape[-1])) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What `torch.nn.functional.linear` computes, differentiable."""
    out: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return out


def missing(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why these kernels cannot be used, or None."""
    if device.type == "cpu":
        needs = "a C++ compiler, float32 or bfloat16, and heads of 16, 32, 64, 80, 96, 128 or 256"
        return None if ops.available(device, dtype, head_dim) else f"on a CPU it needs {needs}"
    known = dtype in (torch.float32, torch.bfloat16) and head_dim % 16 == 0 and head_dim <= 256
    if device.type != "cuda" or not has_triton() or not known:
        return "it needs a CPU, or a CUDA GPU with Triton; float32 or bfloat16; heads of a multiple of 16 up to 256"
    return None
