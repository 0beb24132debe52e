"""The experts of a layer in a training step on a CPU, as one differentiable function.

Pairs of a token and an expert are sorted by expert once. Then some experts at a time, those that have any, read their
rows, compute with them, and add what they made to the rows of their tokens: what lies in between is of a few hundred
pairs, or of one expert. A token's experts are added in their own order, whatever the number of threads.

Legend: T tokens, K experts of each, S = T · K pairs, E experts, H width of the model, I inner width of an expert.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kitae.kernels.cpu import ops
from kitae.kernels.cpu.gradients import StackGradient
from kitae.kernels.memory import keep, kept

_ROWS = 512  # of a block: what lies in between stays in the cache, and short parts are gathered and gated at once


class _Block(NamedTuple):
    """Sorted pairs of some experts: where they begin and end, and, counted from there, those of each expert."""

    at: slice
    parts: list[tuple[int, slice]]


def _blocks(chosen_TK: Tensor, experts: int) -> list[_Block]:
    """Of the experts that were chosen; a block has as few more rows than `_ROWS` as whole experts allow."""
    found, parts, start, end = [], [], 0, 0
    counts = torch.bincount(chosen_TK.flatten(), minlength=experts).tolist()
    if len(counts) > experts:
        raise IndexError(f"experts are numbered from 0 to {experts - 1}, got {len(counts) - 1}")
    for expert, count in enumerate(counts):
        if count:
            parts.append((expert, slice(end - start, end - start + count)))
            end += count
        if end - start >= _ROWS or (parts and expert == experts - 1):
            found.append(_Block(slice(start, end), parts))
            parts, start = [], end
    return found


def _times(rows: Tensor, weights: Tensor, block: _Block, out: Tensor | None = None) -> Tensor:
    """The rows of each expert times its own of the weights `[E, K, N]`."""
    out = rows.new_empty(len(rows), weights.shape[2]) if out is None else out
    for expert, part in block.parts:
        torch.mm(rows[part], weights[expert], out=out[part])
    return out


class _Experts(torch.autograd.Function):
    """Keeps gates and ups `[S, 2 I]` beside its inputs. Rows of tokens are gathered again in the backward pass, and
    gated products made again, in the places of their gradients."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, chosen_TK: Tensor, gates_TK: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        blocks = _blocks(chosen_TK, len(down))
        order_S = chosen_TK.flatten().argsort(stable=True)
        token_S, gate_S = order_S // chosen_TK.shape[1], gates_TK.flatten()[order_S].float()
        both_S2I = x_TH.new_empty(len(order_S), gate_up.shape[1])
        out_TH = torch.zeros(x_TH.shape, dtype=torch.float32)
        for block in blocks:
            token, both = token_S[block.at], both_S2I[block.at]
            _times(x_TH[token], gate_up.transpose(1, 2), block, out=both)
            made = _times(ops.gate_rows(both), down.transpose(1, 2), block)
            ops.add_rows(out_TH, token, made, gate_S[block.at])
        keep(ctx, x_TH, gates_TK, gate_up, down, both_S2I, order_S, token_S, gate_S)
        ctx.blocks = blocks
        return out_TH.to(x_TH.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """That of a gate is the product of an expert's activations with their gradient: outputs are not needed."""
        x_TH, gates_TK, gate_up, down, both_S2I, order_S, token_S, gate_S = kept(ctx)
        of_x, _, _, of_gate_up, of_down = ctx.needs_input_grad
        dgate_up, ddown = StackGradient(gate_up, of_gate_up), StackGradient(down, of_down)
        dx_TH = torch.zeros(x_TH.shape, dtype=torch.float32) if of_x else None
        dgate_S = torch.empty_like(gate_S)
        for block in ctx.blocks:
            token, both = token_S[block.at], both_S2I[block.at]
            dmade = grads[0][token]
            act = _times(dmade, down, block)
            dgate_S[block.at] = ops.gate_rows_again(act, both, gate_S[block.at])
            ddown.add(block.parts, dmade, act)
            if of_gate_up:
                dgate_up.add(block.parts, both, x_TH[token])
            if dx_TH is not None:
                ops.add_rows(dx_TH, token, _times(both, gate_up, block))
        torch.autograd.graph.increment_version(both_S2I)  # so that torch refuses a second backward pass
        dgates_TK = torch.empty_like(gate_S).index_copy_(0, order_S, dgate_S).view(gates_TK.shape).to(gates_TK.dtype)
        return None if dx_TH is None else dx_TH.to(x_TH.dtype), None, dgates_TK, dgate_up.made, ddown.made


def experts(x: Tensor, chosen: Tensor, gates: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """See `kitae.kernels.base.Experts`."""
    out: Tensor = _Experts.apply(x, chosen, gates, gate_up, down)  # type: ignore[no-untyped-call]
    return out
