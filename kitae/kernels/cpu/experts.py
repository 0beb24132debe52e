"""The experts of a layer in a training step on a CPU, as one differentiable function.

Pairs of a token and an expert are sorted by expert once. Then each expert that has any reads its rows, computes with
them, and adds what it made to the rows of its tokens: what lies in between is of one expert only, and small. A token's
experts are added in their own order, so no sum depends on the number of threads.

Legend: T tokens, K experts of each, S = T · K pairs, E experts, H width of the model, I inner width of an expert.
"""

from typing import Any

import torch
from torch import Tensor

from kitae.kernels.cpu import ops
from kitae.kernels.cpu.gradients import StackGradient


def _parts(chosen_TK: Tensor, experts: int) -> list[tuple[int, slice]]:
    """Each expert that was chosen, with its place among the sorted pairs."""
    counts = torch.bincount(chosen_TK.flatten(), minlength=experts)
    ends = counts.cumsum(0).tolist()
    return [(e, slice(end - n, end)) for e, (n, end) in enumerate(zip(counts.tolist(), ends, strict=True)) if n]


class _Experts(torch.autograd.Function):
    """Keeps gates and ups `[S, 2 I]` beside its inputs. Rows of tokens are gathered again in the backward pass, and
    gated products made again, in the places of their gradients."""

    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, chosen_TK: Tensor, gates_TK: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        x_TH, parts = x_TH.contiguous(), _parts(chosen_TK, len(down))
        order_S = chosen_TK.flatten().argsort(stable=True)
        token_S, gate_S = order_S // chosen_TK.shape[1], gates_TK.flatten()[order_S].float()
        both_S2I = x_TH.new_empty(len(order_S), gate_up.shape[1])
        out_TH = torch.zeros(x_TH.shape, dtype=torch.float32)
        for expert, at in parts:
            torch.mm(x_TH[token_S[at]], gate_up[expert].t(), out=both_S2I[at])
            made = torch.mm(ops.gate_rows(both_S2I[at]), down[expert].t())
            ops.add_rows(out_TH, token_S[at], made, gate_S[at])
        ctx.save_for_backward(x_TH, gates_TK, gate_up, down, both_S2I, order_S, token_S, gate_S)
        ctx.parts = parts
        return out_TH.to(x_TH.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """That of a gate is the product of an expert's activations with their gradient: outputs are not needed."""
        x_TH, gates_TK, gate_up, down, both_S2I, order_S, token_S, gate_S = ctx.saved_tensors
        of_x, _, _, *of_weights = ctx.needs_input_grad
        dgate_up, ddown = (StackGradient(w, needed) for w, needed in zip((gate_up, down), of_weights, strict=True))
        dx_TH = torch.zeros(x_TH.shape, dtype=torch.float32) if of_x else None
        dgate_S = torch.empty_like(gate_S)
        for expert, at in ctx.parts:
            dmade, both = grads[0][token_S[at]], both_S2I[at]
            act = torch.mm(dmade, down[expert])
            dgate_S[at] = ops.gate_rows_again(act, both, gate_S[at])
            ddown.add(expert, dmade, act)
            dgate_up.add(expert, both, x_TH[token_S[at]])
            if dx_TH is not None:
                ops.add_rows(dx_TH, token_S[at], torch.mm(both, gate_up[expert]))
        torch.autograd.graph.increment_version(both_S2I)  # so that torch refuses a second backward pass
        dgates_TK = torch.empty_like(gate_S).index_copy_(0, order_S, dgate_S).view(gates_TK.shape).to(gates_TK.dtype)
        return None if dx_TH is None else dx_TH.to(x_TH.dtype), None, dgates_TK, dgate_up.made, ddown.made


def experts(x: Tensor, chosen: Tensor, gates: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """See `kitae.kernels.base.Experts`."""
    out: Tensor = _Experts.apply(x, chosen, gates, gate_up, down)  # type: ignore[no-untyped-call]
    return out
