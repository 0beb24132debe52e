"""Triton kernels of the decoding step on a GPU, and the functions on tensors that launch them.

Import this module only where Triton is (`kitae.engines.native.gpu_runner` does): CPU machines need none. Each kernel
rounds where the Hugging Face module it stands for rounds, so that both agree to the last bits of the dtype. Legend: T
rows (tokens of a prompt, or one token for each of B sequences), Hq query heads, Hkv key-value heads, G = Hq / Hkv, D
head dimension, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitae.kernels import float8
from kitae.kernels.norms import Norm, NormRule

Stored = tuple[Tensor, Tensor | None]  # keys, or values, in pages; if in 8 bits, the scale of each head of a token

# Columns of a row of the engine's state, int64 `[B, COLUMNS]`: what the device knows about one sequence.
TOKEN = 0  # the last token; its key and value are not in the cache yet
LENGTH = 1  # tokens in the cache, which is the position of TOKEN
COUNT = 2  # tokens sampled so far: the position in the random stream
LIMIT = 3  # COUNT at which the sequence ends
SEED = 4
ACTIVE = 5  # 0: ended, or no sequence at all
INVERSE = 6  # 1 / temperature, the bits of a float32; 0 is greedy
STOP = 7  # the first stop token; -1: none
STOPS = 8
COLUMNS = STOP + STOPS

# Norms, MLP, rotary


@triton.jit
def normed(
    exact, weight, column, mask, eps, WIDTH: tl.constexpr, RULE: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """A row over its root mean square, times the weight: a `NormRule` says what is rounded to KIND, and when.

    A part of `_rms_norm`, which norms what is added as well as the sum.
    """
    scale = tl.rsqrt(tl.sum(exact * exact, 0) / WIDTH + eps)
    value = exact * scale
    if RULE == 0:
        value = value.to(KIND).to(tl.float32)
    gain = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    if RULE == 2:
        gain = gain + 1.0
    return (gain * value).to(KIND)


@triton.jit
def _rms_norm(
    x, y, y_units, after, before, unit, total, out, eps_after, eps_before, factor,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, SCALED: tl.constexpr, AFTER: tl.constexpr,
    BEFORE: tl.constexpr, UNITS: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    """total = x + the sum of the PARTS of y; out = the norm of total. PARTS = 0: x alone, no total.

    SCALED: the sum is multiplied by `factor` first, and rounded before and after. AFTER: the rule by which the sum is
    normed before it is added, -1: it is not; BEFORE: that of the norm of total, -1: there is none, and no out. UNITS: a
    row of y is multiplied by its own. EIGHT: out is in 8 bits, over `unit`.

    One program a row, which it holds in one block of BLOCK >= WIDTH columns. One read and one write of the row do the
    addition of the residual, both norms, and the sum over the experts of a token.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    value = tl.load(x + row * WIDTH + column, mask=mask, other=0.0)
    if PARTS > 0:
        other = tl.zeros([BLOCK], tl.float32)
        for part in tl.static_range(PARTS):
            line = (part * tl.num_programs(0) + row) * WIDTH  # in 64 bits, as row is: all parts of a long prompt
            other += tl.load(y + line + column, mask=mask, other=0.0).to(tl.float32)
        other = other.to(x.dtype.element_ty).to(tl.float32)
        if UNITS:
            other *= tl.load(y_units + row)
        if AFTER >= 0:
            other = normed(other, after, column, mask, eps_after, WIDTH, AFTER, x.dtype.element_ty).to(tl.float32)
        if SCALED:
            other = (other * factor).to(x.dtype.element_ty).to(tl.float32)
        value = (value.to(tl.float32) + other).to(x.dtype.element_ty)
        tl.store(total + row * WIDTH + column, value, mask=mask)
    if BEFORE >= 0:
        result = normed(value.to(tl.float32), before, column, mask, eps_before, WIDTH, BEFORE, x.dtype.element_ty)
        if EIGHT:
            result = result.to(tl.float32) / tl.load(unit)
        tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty), mask=mask)


def add_and_norm(
    x: Tensor, y: Tensor | None, after: Norm | None, before: Norm | None, factor: float = 1.0, *,
    units: Tensor | None = None, unit: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x + factor * y, and the norm of it, for rows `[T, H]`; without y, x and its norm.

    y may come in parts that are still to be added, `[parts, T, H]`. after: a norm of y, before it is added; before: the
    norm of the sum, which comes twice if there is none. units `[T]`: by which rows of y are multiplied first. unit
    `[]`: the norm is wanted in 8 bits, divided by it.
    """
    if y is None and before is None:
        return x, x
    rows, width = x.shape
    total = x if y is None else torch.empty_like(x)
    out = total if before is None else torch.empty_like(x, dtype=None if unit is None else float8.KIND)
    block = triton.next_power_of_2(width)
    _rms_norm[(rows,)](
        x, x if y is None else y, x if units is None else units, x if after is None else after.weight,
        x if before is None else before.weight, x if unit is None else unit, total, out,
        0.0 if after is None else after.eps, 0.0 if before is None else before.eps, factor,
        WIDTH=width, BLOCK=block, PARTS=0 if y is None else y.numel() // x.numel(), SCALED=factor != 1.0,
        AFTER=-1 if after is None else int(after.rule), BEFORE=-1 if before is None else int(before.rule),
        UNITS=units is not None, EIGHT=unit is not None,
        num_warps=min(8, max(1, block // 512)),
    )  # fmt: skip
    return total, out


def rms_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """`(x + factor * y, weight * norm(x + factor * y))` for rows `[T, H]`; without y, `(x, weight * norm(x))`.

    y may come in parts that are still to be added, `[parts, T, H]`.
    """
    return add_and_norm(x, y, None, Norm(weight, eps), factor)


@triton.jit
def activated(gate, up, GELU: tl.constexpr, KIND: tl.constexpr):
    """round(silu(gate)) * up, or GELU by its tanh form.

    No kernel but a part of one.
    """
    if GELU:  # (1 + tanh(u)) / 2 = sigmoid(2 u), and 2 u = sqrt(8 / pi) * (x + 0.044715 x³)
        act = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        act = gate * tl.sigmoid(gate)
    return (act.to(KIND).to(tl.float32) * up).to(KIND)


@triton.jit
def _swiglu(both, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    """out = round(silu(gate)) * up, where gate and up are the halves of a row of `both`. GELU: by its tanh form.

    Grid (rows, blocks of BLOCK columns). Gate and up come from one product, so the halves are read where they lie.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    gate = tl.load(both + row * 2 * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * WIDTH + WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, activated(gate, up, GELU, out.dtype.element_ty), mask=mask)


def swiglu(both: Tensor, *, gelu: bool = False) -> Tensor:
    """`silu(gate) * up`, where gate and up are the halves of each row; or GELU, in its tanh form, for SiLU."""
    rows, width = both.shape[0], both.shape[1] // 2
    out = torch.empty(rows, width, dtype=both.dtype, device=both.device)
    block = min(2048, triton.next_power_of_2(width))
    _swiglu[(rows, triton.cdiv(width, block))](both, out, WIDTH=width, BLOCK=block, GELU=gelu)
    return out


@triton.jit
def _rotate_and_store(
    qkv, bias, q_norm, k_norm, cos, sin, positions, slots, keys, values, key_scales, value_scales, eps,
    HQ: tl.constexpr, HKV: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, WIDE: tl.constexpr, PAIRS: tl.constexpr, BITS8: tl.constexpr,
):  # fmt: skip
    """Bias, norm of queries and keys, rotary, all in place in a row of qkv; keys and values also into their slot.

    NORM: a `NormRule`, -1: there is none; WIDE: one norm over all queries and one over all keys, not one a head.
    Products with cos and sin are rounded to the type of those. PAIRS: rotary mixes neighbours instead of halves.

    One program a row, with all heads `[HEADS, HALF]` twice: the lower and the upper half of each head, which rotary
    mixes. Four passes over the same few numbers become one, and the cache is written on the way; BITS8: in 8 bits, over
    a scale for each head.
    """
    row = tl.program_id(0).to(tl.int64)
    kind = qkv.dtype.element_ty
    head = tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    mask = (head < HQ + 2 * HKV) & (lane < D // 2)
    near = lane * 2 if PAIRS else lane
    STEP: tl.constexpr = 1 if PAIRS else D // 2
    low = head * D + near
    high = low + STEP
    line = qkv + row * (HQ + 2 * HKV) * D
    x = tl.load(line + low, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(line + high, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        x = (x + tl.load(bias + low, mask=mask, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
        y = (y + tl.load(bias + high, mask=mask, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    turns = head < HQ + HKV  # values are neither normed nor rotated
    if NORM >= 0:
        of_q = lane < D // 2
        of_k = of_q
        own_q = q_norm
        own_k = k_norm
        squares = tl.sum(x * x, 1) + tl.sum(y * y, 1)
        if WIDE:
            number = tl.arange(0, HEADS)
            all_q = tl.sum(tl.where(number < HQ, squares, 0.0), 0) / HQ
            all_k = tl.sum(tl.where((number >= HQ) & (number < HQ + HKV), squares, 0.0), 0) / HKV
            squares = tl.where(number < HQ, all_q, all_k)
            of_q = mask & (head < HQ)
            of_k = mask & (head >= HQ) & turns
            own_q = q_norm + head * D
            own_k = k_norm + (head - HQ) * D
        scale = tl.rsqrt(squares / D + eps)[:, None]
        gain_x = tl.where(head < HQ, tl.load(own_q + near, mask=of_q, other=0.0).to(tl.float32),
                          tl.load(own_k + near, mask=of_k, other=0.0).to(tl.float32))  # fmt: skip
        gain_y = tl.where(head < HQ, tl.load(own_q + near + STEP, mask=of_q, other=0.0).to(tl.float32),
                          tl.load(own_k + near + STEP, mask=of_k, other=0.0).to(tl.float32))  # fmt: skip
        normed_x = x * scale
        normed_y = y * scale
        if NORM == 0:
            normed_x = normed_x.to(kind).to(tl.float32)
            normed_y = normed_y.to(kind).to(tl.float32)
        if NORM == 2:
            gain_x = gain_x + 1.0
            gain_y = gain_y + 1.0
        x = tl.where(turns, (gain_x * normed_x).to(kind).to(tl.float32), x)
        y = tl.where(turns, (gain_y * normed_y).to(kind).to(tl.float32), y)
    angle = tl.load(positions + row) * D + lane
    part = cos.dtype.element_ty
    c = tl.load(cos + angle, mask=lane < D // 2, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=lane < D // 2, other=0.0).to(tl.float32)
    new_x = tl.where(turns, (x * c).to(part).to(tl.float32) - (y * s).to(part).to(tl.float32), x).to(kind)
    new_y = tl.where(turns, (y * c).to(part).to(tl.float32) + (x * s).to(part).to(tl.float32), y).to(kind)
    tl.store(line + low, new_x, mask=mask)
    tl.store(line + high, new_y, mask=mask)
    slot = tl.load(slots + row)
    place = slot // PAGE * HKV * PAGE + slot % PAGE
    is_key = mask & (head >= HQ) & (head < HQ + HKV)
    is_value = mask & (head >= HQ + HKV)
    key_place = place + (head - HQ) * PAGE
    value_place = place + (head - HQ - HKV) * PAGE
    if BITS8:
        exact_x = new_x.to(tl.float32)
        exact_y = new_y.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(exact_x), 1), tl.max(tl.abs(exact_y), 1))[:, None]
        unit = tl.where(largest > 0, largest / 127.0, 1.0)
        tl.store(key_scales + key_place, unit, mask=(head >= HQ) & (head < HQ + HKV))
        tl.store(value_scales + value_place, unit, mask=(head >= HQ + HKV) & (head < HQ + 2 * HKV))
        new_x = tl.floor(exact_x / unit + 0.5)
        new_y = tl.floor(exact_y / unit + 0.5)
    new_x = new_x.to(keys.dtype.element_ty)
    new_y = new_y.to(keys.dtype.element_ty)
    tl.store(keys + key_place * D + near, new_x, mask=is_key)
    tl.store(keys + key_place * D + near + STEP, new_y, mask=is_key)
    tl.store(values + value_place * D + near, new_x, mask=is_value)
    tl.store(values + value_place * D + near + STEP, new_y, mask=is_value)


def rotate_and_store(
    qkv: Tensor, bias: Tensor | None, norms: tuple[Tensor, Tensor, float] | None, cos: Tensor, sin: Tensor,
    positions: Tensor, slots: Tensor, keys: Stored, values: Stored, heads: int, rule: NormRule = NormRule.EARLY,
    pairs: bool = False,
) -> None:  # fmt: skip
    """Rows `[T, (Hq + 2 Hkv) · D]`, in place: bias, norm of queries and keys, rotary; then keys and values into pages.

    cos and sin `[positions, D]`; slots `[T]`: page · page_size + place in the page. Weights of norms are those of a
    head, `[D]`, or of all heads together, `[Hq · D]` and `[Hkv · D]`. pairs: rotary mixes neighbours, not halves.
    """
    (key_numbers, key_scales), (value_numbers, value_scales) = keys, values
    _, kv_heads, page_size, dim = key_numbers.shape
    q_norm, k_norm, eps = norms or (qkv, qkv, 0.0)
    wide = norms is not None and (q_norm.shape[0], k_norm.shape[0]) != (dim, dim)
    count = triton.next_power_of_2(heads + 2 * kv_heads)
    half = triton.next_power_of_2(dim // 2)
    _rotate_and_store[(qkv.shape[0],)](
        qkv, qkv if bias is None else bias, q_norm, k_norm, cos, sin, positions, slots, key_numbers, value_numbers,
        qkv if key_scales is None else key_scales, qkv if value_scales is None else value_scales, eps,
        HQ=heads, HKV=kv_heads, HEADS=count, D=dim, HALF=half, PAGE=page_size, BIAS=bias is not None,
        NORM=-1 if norms is None else int(rule), WIDE=wide, PAIRS=pairs, BITS8=key_scales is not None,
        num_warps=min(16, max(4, count * half // 512)) if wide else 4,
    )  # fmt: skip


# The beginning of a step


@triton.jit
def _begin(
    state, table, tokens, positions, slots, lengths, table_row, trash, C: tl.constexpr, PAGE: tl.constexpr
):  # fmt: skip
    """Tokens, positions, slots and lengths of a step from the rows of the state; idle rows get slot `trash`, length 0.

    One program a sequence. The state never leaves the device, so the host need not know it to launch the step.
    """
    row = tl.program_id(0)
    token = tl.load(state + row * C)
    position = tl.load(state + row * C + 1)
    active = tl.load(state + row * C + 5) != 0
    page = tl.load(table + row * table_row + position // PAGE).to(tl.int64)
    tl.store(tokens + row, token)
    tl.store(positions + row, position)
    tl.store(slots + row, tl.where(active, page * PAGE + position % PAGE, trash))
    tl.store(lengths + row, tl.where(active, position + 1, 0).to(tl.int32))


def begin(state: Tensor, table: Tensor, page_size: int, trash: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, positions, slots of the cache (`trash` for idle rows), lengths with the new token (0 for idle rows)."""
    batch = state.shape[0]
    tokens, positions, slots = torch.empty(3, batch, dtype=torch.int64, device=state.device)
    lengths = torch.empty(batch, dtype=torch.int32, device=state.device)
    _begin[(batch,)](
        state, table, tokens, positions, slots, lengths, table.stride(0), trash, C=COLUMNS, PAGE=page_size, num_warps=1
    )
    return tokens, positions, slots, lengths


# Logits


@triton.jit
def _transform(
    logits, count, scale, softcap, inverse, BLOCK: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr
):  # fmt: skip
    """logits = softcap * tanh(scale * logits / softcap), in place, rounded after each step as torch would do it.

    Grid (blocks of BLOCK numbers). One read and one write of the logits of all rows, which are larger than all that a
    layer writes, instead of four each.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    kind = logits.dtype.element_ty
    x = tl.load(logits + place, mask=mask, other=0.0).to(tl.float32)
    if SCALED:
        x = (x * scale).to(kind).to(tl.float32)
    if CAPPED:
        x = (x * inverse).to(kind).to(tl.float32)
        x = (2.0 * tl.sigmoid(2.0 * x) - 1.0).to(kind).to(tl.float32) * softcap
    tl.store(logits + place, x.to(kind), mask=mask)


def transform(logits: Tensor, scale: float, softcap: float | None) -> None:
    """What a model does to its logits after the head, in place."""
    if scale == 1.0 and softcap is None:
        return
    assert logits.is_contiguous()
    block, cap = 4096, softcap or 1.0
    _transform[(triton.cdiv(logits.numel(), block),)](
        logits, logits.numel(), scale, cap, 1.0 / cap,
        BLOCK=block, SCALED=scale != 1.0, CAPPED=softcap is not None, num_warps=8,
    )  # fmt: skip


# Sampling: one pass over the logits, one uniform number per row


@triton.jit
def _sum_blocks(
    logits, state, tops, sums, V, C: tl.constexpr, PER: tl.constexpr, BLOCK: tl.constexpr, NB: tl.constexpr
):  # fmt: skip
    """Maximum, and sum of exponentials below it, of each block of BLOCK logits over the temperature.

    Grid (rows, blocks of the vocabulary). It is the only pass over all logits: `_pick` reads one block of them.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inverse = tl.load(state + row // PER * C + 6).to(tl.int32).to(tl.float32, bitcast=True)
    inverse = tl.where(inverse == 0.0, 1.0, inverse)
    x = tl.load(logits + row * V + column, mask=column < V, other=float("-inf")).to(tl.float32) * inverse
    top = tl.max(x, 0)
    tl.store(tops + row * NB + block, top)
    tl.store(sums + row * NB + block, tl.sum(tl.exp(x - top), 0))


@triton.jit
def _pick(
    logits, state, tops, sums, out, V, rows,
    C: tl.constexpr, PER: tl.constexpr, STOPS: tl.constexpr, BLOCK: tl.constexpr, NB: tl.constexpr, NB2: tl.constexpr,
):  # fmt: skip
    """Draw a token by inverting the cumulative distribution at one uniform number, and advance the row of the state.

    One program a row: first the block in which the number falls, by the NB sums of `_sum_blocks`, then the token
    within it. Whether the sequence has ended is decided here, so the next step can be launched before the host knows.
    With PER > 1, which of its rows count is decided later (`speculation.keep_accepted`).
    """
    row = tl.program_id(0).to(tl.int64)
    mine = state + row // PER * C
    count = tl.load(mine + 2) + row % PER
    bits = tl.load(mine + 6).to(tl.int32).to(tl.float32, bitcast=True)
    greedy = bits == 0.0
    inverse = tl.where(greedy, 1.0, bits)
    # The log of the normaliser, and the block in which the token lies.
    index = tl.arange(0, NB2)
    tops_b = tl.load(tops + row * NB + index, mask=index < NB, other=float("-inf"))
    sums_b = tl.load(sums + row * NB + index, mask=index < NB, other=0.0)
    top = tl.max(tops_b, 0)
    mass = sums_b * tl.exp(tops_b - top)
    total = tl.sum(mass, 0)
    # splitmix64 of (seed, position): kitae.engines.native.sampler.uniforms
    z = tl.load(mine + 4).to(tl.uint64) + (count + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    uniform = (z >> 11).to(tl.float64) * 1.1102230246251565e-16
    threshold = (uniform * total.to(tl.float64)).to(tl.float32)
    passed = tl.cumsum(mass, 0) <= threshold
    block = tl.minimum(tl.sum(passed.to(tl.int32), 0), tl.max(tl.where(mass > 0, index, 0), 0))
    block = tl.where(greedy, tl.argmax(tops_b, 0), block)
    before = tl.sum(tl.where(index < block, mass, 0.0), 0)
    # The token within the block.
    column = tl.arange(0, BLOCK)
    inside = block * BLOCK + column < V
    x = tl.load(logits + row * V + block * BLOCK + column, mask=inside, other=float("-inf")).to(tl.float32) * inverse
    weight = tl.exp(x - top)
    place = tl.sum((tl.cumsum(weight, 0) <= threshold - before).to(tl.int32), 0)
    place = tl.minimum(place, tl.max(tl.where(weight > 0, column, 0), 0))  # rounding must not pick probability 0
    place = tl.where(greedy, tl.argmax(x, 0), place)
    logprob = tl.sum(tl.where(column == place, x, 0.0), 0) - top - tl.log(total)
    token = tl.minimum(block * BLOCK + place, V - 1).to(tl.int64)  # logits that are no numbers: one that exists
    active = tl.load(mine + 5) != 0
    tl.store(out + row, tl.where(active, token, -1).to(tl.int32))
    tl.store(out + rows + row, logprob.to(tl.int32, bitcast=True))
    if PER == 1:  # what the next step needs to know
        stops = tl.load(mine + 7 + tl.arange(0, STOPS))
        ended = (count + 1 >= tl.load(mine + 3)) | (tl.sum((stops == token).to(tl.int32), 0) > 0)
        length = tl.load(mine + 1)
        tl.store(mine, token, mask=active)
        tl.store(mine + 1, length + 1, mask=active)
        tl.store(mine + 2, count + 1, mask=active)
        tl.store(mine + 5, tl.where(ended, 0, 1).to(tl.int64), mask=active)


def sample(logits: Tensor, state: Tensor, block: int = 4096) -> Tensor:
    """Draw a token for every row of `[B, V]` and advance the state; int32 `[2, B]`: tokens, bits of the log-probs.

    The token is -1 where the row is not active. The draw is that of `sampler.sample`: the same uniform number of
    (seed, position), found in the cumulative distribution block by block. Where the state has fewer rows, each has as
    many neighbours in the logits, at one position after the other, and stays as it is.
    """
    batch, vocabulary = logits.shape
    per = batch // state.shape[0]
    assert per * state.shape[0] == batch
    assert logits.is_contiguous() and state.is_contiguous() and state.shape[1] == COLUMNS
    blocks = triton.cdiv(vocabulary, block)
    tops = torch.empty(batch, blocks, dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(tops)
    out = torch.empty(2, batch, dtype=torch.int32, device=logits.device)
    _sum_blocks[(batch, blocks)](logits, state, tops, sums, vocabulary, C=COLUMNS, PER=per, BLOCK=block, NB=blocks)
    _pick[(batch,)](
        logits, state, tops, sums, out, vocabulary, batch,
        C=COLUMNS, PER=per, STOPS=STOPS, BLOCK=block, NB=blocks, NB2=triton.next_power_of_2(blocks),
    )  # fmt: skip
    return out
