"""The experts of a layer in a training step on a CPU, as one differentiable function.

Pairs of a token and an expert are sorted by expert once. Then some experts at a time, those that have any, read their
rows, compute with them, and add what they made to the rows of their tokens: what lies in between is of a few hundred
pairs, or of one expert. A token's experts are added in their own order, whatever the number of threads.

Legend: T tokens, K experts of each, S = T · K pairs, E experts, H width of the model, I inner width of an expert.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kitae.kernels.allocation import keep, kept
from kitae.kernels.base import GateLimits
from kitae.kernels.cpu import ops
from kitae.kernels.cpu.gradients import StackGradient

_ROWS = 512  # of a block: what lies in between stays in the cache, and short parts are gathered and gated at once


class _Block(NamedTuple):
    """Sorted pairs of some experts: where they begin and end, and, counted from there, those of each expert."""

    at: slice
    parts: list[tuple[int, slice]]


def _blocks(chosen_TK: Tensor, experts: int) -> list[_Block]:
    """Blocks of the chosen experts, each with as few more rows than `_ROWS` as whole experts allow."""
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


def _times(
    rows: Tensor, weights: Tensor, block: _Block, *, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """The rows of each expert times its own of the weights `[E, K, N]`, plus its own bias."""
    out = rows.new_empty(len(rows), weights.shape[2]) if out is None else out
    for expert, part in block.parts:
        if bias is None:
            torch.mm(rows[part], weights[expert], out=out[part])
        else:
            torch.addmm(bias[expert], rows[part], weights[expert], out=out[part])
    return out


class _Experts(torch.autograd.Function):
    """Keeps gates and ups `[S, 2 I]` beside its inputs. Rows of tokens are gathered again in the backward pass, and
    gated products made again, in the places of their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        chosen_TK: Tensor,
        gates_TK: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        limits: GateLimits | None,
    ) -> Tensor:
        blocks = _blocks(chosen_TK, len(down))
        order_S = chosen_TK.flatten().argsort(stable=True)
        token_S, gate_S = order_S // chosen_TK.shape[1], gates_TK.flatten()[order_S].float()
        to_both, to_out = (w if limits else w.transpose(1, 2) for w in (gate_up, down))
        both_S2I = x_TH.new_empty(len(order_S), to_both.shape[2])
        out_TH = torch.zeros(x_TH.shape, dtype=torch.float32)
        for block in blocks:
            token, both = token_S[block.at], both_S2I[block.at]
            _times(x_TH[token], to_both, block, bias=gate_up_bias, out=both)
            made = _times(ops.gate_rows(both, limits), to_out, block, bias=down_bias)
            ops.add_rows(out_TH, token, made, gate_S[block.at])
        keep(ctx, x_TH, gates_TK, gate_up, down, gate_up_bias, down_bias, both_S2I, order_S, token_S, gate_S)
        ctx.blocks, ctx.limits = blocks, limits
        return out_TH.to(x_TH.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of a gate is the product of an expert's activations with theirs: outputs are not needed."""
        x_TH, gates_TK, gate_up, down, gate_up_bias, down_bias, both_S2I, order_S, token_S, gate_S = kept(ctx)
        limits: GateLimits | None = ctx.limits
        of_x, _, _, *of_weights, _ = ctx.needs_input_grad
        learning = zip((gate_up, down, gate_up_bias, down_bias), of_weights, strict=True)
        made = [StackGradient(weights, needed, turned=limits is not None) for weights, needed in learning]
        dgate_up, ddown, dgate_up_bias, ddown_bias = made
        from_both, from_out = (w.transpose(1, 2) if limits else w for w in (gate_up, down))
        dx_TH = torch.zeros(x_TH.shape, dtype=torch.float32) if of_x else None
        dgate_S = torch.empty_like(gate_S)
        for block in ctx.blocks:
            token, both, gate = token_S[block.at], both_S2I[block.at], gate_S[block.at]
            dmade = grads[0][token]
            act = _times(dmade, from_out, block)
            dgate = ops.gate_rows_again(act, both, gate, limits)
            ddown.add(block.parts, dmade, act)
            if limits is not None:
                for expert, part in block.parts:
                    dgate[part] += dmade[part].float() @ down_bias[expert].float()
                ddown_bias.add_rows(block.parts, dmade, gate)
                dgate_up_bias.add_rows(block.parts, both)
            dgate_S[block.at] = dgate
            if of_weights[0]:
                dgate_up.add(block.parts, both, x_TH[token])
            if dx_TH is not None:
                ops.add_rows(dx_TH, token, _times(both, from_both, block))
        torch.autograd.graph.increment_version(both_S2I)  # so that torch refuses a second backward pass
        dgates_TK = torch.empty_like(gate_S).index_copy_(0, order_S, dgate_S).view(gates_TK.shape).to(gates_TK.dtype)
        return None if dx_TH is None else dx_TH.to(x_TH.dtype), None, dgates_TK, *(each.made for each in made), None


def experts(
    x: Tensor, chosen: Tensor, gates: Tensor, gate_up: Tensor, down: Tensor, limits: GateLimits | None = None
) -> Tensor:
    """See `kitae.kernels.base.Experts`."""
    biases = (None, None) if limits is None else (limits.gate_up_bias, limits.down_bias)
    out: Tensor = _Experts.apply(x, chosen, gates, gate_up, down, *biases, limits)  # type: ignore[no-untyped-call]
    return out
