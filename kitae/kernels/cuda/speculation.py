"""Triton kernels of a step with draft tokens, as `kitae.engines.native.ngram_speculation` does it on the host.

A sequence has PER rows in such a step: its last token, and what followed that the last time it stood in the text, by
the longest match of up to three tokens. Texts and drafts never leave the device. Legend as in `decoding`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitae.kernels.cuda.decoding import COLUMNS, STOPS


@triton.jit
def _begin(
    state, table, texts, tokens, positions, slots, lengths, table_row, text_row, trash,
    C: tl.constexpr, PAGE: tl.constexpr, PER: tl.constexpr, POWER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What `decoding.begin` makes of the rows of a state, for PER rows a sequence; rows without a draft token are idle.

    One program a sequence. It looks at each place of the text for the last three tokens, BLOCK places at a time, and
    keeps the best: by the length of the match, then the latest.
    """
    row = tl.program_id(0)
    mine = state + row * C
    position = tl.load(mine + 1)
    count = tl.load(mine + 2)
    active = tl.load(mine + 5) != 0
    text = texts + row.to(tl.int64) * text_row
    last = tl.load(mine).to(tl.int32)
    second = tl.load(text + position - 1, mask=position >= 1, other=-1)
    third = tl.load(text + position - 2, mask=position >= 2, other=-1)
    best = tl.zeros([BLOCK], tl.int32)
    for start in range(0, tl.where(active, position, 0).to(tl.int32), BLOCK):
        place = start + tl.arange(0, BLOCK)
        one = (place < position) & (tl.load(text + place, mask=place < position, other=-2) == last)
        two = one & (tl.load(text + place - 1, mask=one & (place >= 1), other=-2) == second)
        three = two & (tl.load(text + place - 2, mask=two & (place >= 2), other=-2) == third)
        length = one.to(tl.int32) + two.to(tl.int32) + three.to(tl.int32)
        best = tl.maximum(best, tl.where(one, length * 0x10000000 + place.to(tl.int32) + 1, 0))
    found = tl.max(best, 0)
    begin = (found & 0xFFFFFFF).to(tl.int64)
    period = position + 1 - begin
    i = tl.arange(0, POWER)
    ours = i < PER
    real = active & ((i == 0) | ((found > 0) & (count + i < tl.load(mine + 3))))
    draft = tl.load(text + begin + (i - 1 + period) % period, mask=ours & real & (i > 0), other=0)
    here = position + tl.where(real, i, 0)
    page = tl.load(table + row * table_row + here // PAGE, mask=ours, other=0).to(tl.int64)
    tl.store(tokens + row * PER + i, tl.where((i > 0) & real, draft, last).to(tl.int64), mask=ours)
    tl.store(positions + row * PER + i, here, mask=ours)
    tl.store(slots + row * PER + i, tl.where(real, page * PAGE + here % PAGE, trash), mask=ours)
    tl.store(lengths + row * PER + i, tl.where(real, here + 1, 0).to(tl.int32), mask=ours)


def begin(
    state: Tensor, table: Tensor, texts: Tensor, per: int, page_size: int, trash: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, positions, slots and lengths as of `decoding.begin`, `per` rows for each of the state.

    texts: int32, a row for each of the state: all tokens of a sequence with the one that comes next, at its position.
    """
    batch = state.shape[0]
    tokens, positions, slots = torch.empty(3, batch * per, dtype=torch.int64, device=state.device)
    lengths = torch.empty(batch * per, dtype=torch.int32, device=state.device)
    _begin[(batch,)](
        state, table, texts, tokens, positions, slots, lengths, table.stride(0), texts.stride(0), trash,
        C=COLUMNS, PAGE=page_size, PER=per, POWER=triton.next_power_of_2(per), BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return tokens, positions, slots, lengths


@triton.jit
def _keep_accepted(
    state, texts, tokens, lengths, out, text_row, C: tl.constexpr, STOPS: tl.constexpr, PER: tl.constexpr
):  # fmt: skip
    """Keep what was drawn after accepted drafts, -1 in the other rows, and advance the state and the text.

    One program a sequence. A row counts if the row before it, which counts too, has drawn its token and did not end the
    sequence.
    """
    row = tl.program_id(0)
    mine = state + row * C
    text = texts + row.to(tl.int64) * text_row
    position = tl.load(mine + 1)
    count = tl.load(mine + 2)
    limit = tl.load(mine + 3)
    stops = tl.load(mine + 7 + tl.arange(0, STOPS))
    active = tl.load(mine + 5) != 0
    last = tl.load(mine)
    going = active
    ended = active & (count < 0)
    kept = count * 0
    for i in tl.static_range(PER):
        here = row * PER + i
        going = going & (tl.load(lengths + here) > 0) & (tl.load(tokens + here) == last)
        drawn = tl.load(out + here).to(tl.int64)
        tl.store(out + here, tl.where(going, drawn, -1).to(tl.int32))
        tl.store(text + position + i + 1, drawn.to(tl.int32), mask=going)
        last = tl.where(going, drawn, last)
        kept += going.to(tl.int64)
        ended = ended | (going & ((count + i + 1 >= limit) | (tl.sum((stops == drawn).to(tl.int32), 0) > 0)))
        going = going & ~ended
    tl.store(mine, last, mask=active)
    tl.store(mine + 1, position + kept, mask=active)
    tl.store(mine + 2, count + kept, mask=active)
    tl.store(mine + 5, tl.where(ended, 0, 1).to(tl.int64), mask=active)


def keep_accepted(state: Tensor, texts: Tensor, tokens: Tensor, lengths: Tensor, out: Tensor) -> None:
    """Write -1 into `out[0]`, drawn for the rows of `begin`, after rejected drafts; advance the state and the texts."""
    batch = state.shape[0]
    _keep_accepted[(batch,)](
        state, texts, tokens, lengths, out, texts.stride(0), C=COLUMNS, STOPS=STOPS, PER=len(tokens) // batch,
        num_warps=1,
    )  # fmt: skip
