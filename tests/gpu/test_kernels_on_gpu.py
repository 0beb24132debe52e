"""Each kernel of the decoding step against a plain reference."""

import numpy as np
import pytest
import torch

from kitae.engines.base import SamplingParams, stream_seed
from kitae.engines.native import sampler
from kitae.engines.native.page_cache import Pages
from kitae.kernels.base import GateLimits
from kitae.models.attention_seam import causal_mask, masked_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DTYPES = [torch.float32, torch.bfloat16]
DEVICE = "cuda"


def close(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> None:
    error = (a.float() - b.float()).norm() / b.float().norm()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2), error


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_and_mlp(dtype: torch.dtype) -> None:
    from kitae.kernels.cuda import decoding

    x, y, weight = (torch.randn(s, device="cuda", dtype=dtype) for s in ((5, 700), (5, 700), (700,)))
    total, normed = decoding.rms_norm(x, y, weight, 1e-6)
    assert torch.equal(total, x + y)
    exact = total.float() * torch.rsqrt(total.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    close(normed, weight * exact.to(dtype), dtype)
    parts = torch.randn(4, 5, 700, device="cuda")
    close(decoding.rms_norm(x, parts, weight, 1e-6)[0], x + parts.sum(0).to(dtype), dtype)
    both = torch.randn(5, 1400, device="cuda", dtype=dtype)
    close(decoding.swiglu(both), torch.nn.functional.silu(both[:, :700]) * both[:, 700:], dtype)
    by_gelu = torch.nn.functional.gelu(both[:, :700], approximate="tanh") * both[:, 700:]
    close(decoding.swiglu(both, gelu=True), by_gelu, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.125, None), (1.0, 30.0), (0.3, 5.0)])
def test_logits_are_transformed_in_place(scale: float, softcap: float | None, dtype: torch.dtype) -> None:
    from kitae.kernels.cuda import decoding
    from kitae.models.logprobs import HeadTransform

    logits = 9 * torch.randn(7, 1001, device=DEVICE).to(dtype)
    expected = HeadTransform(scale, softcap)(logits)
    decoding.transform(logits, scale, softcap)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 2**-7)


def made_norm(family: str, width: int, dtype: torch.dtype) -> torch.nn.Module:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    made = {"llama": LlamaRMSNorm, "olmo2": Olmo2RMSNorm, "gemma3": Gemma3RMSNorm}[family](width)
    made.weight.data.normal_(0.5, 0.3)
    return made.to(DEVICE, dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "olmo2", "gemma3"])
def test_norms_of_each_family(family: str, dtype: torch.dtype) -> None:
    """Of what is added and of the sum, either or both, and with parts that are still to be added."""
    from kitae.kernels.cuda import decoding
    from kitae.models.layer_kinds import norm_of

    after, before = (made_norm(family, 700, dtype) for _ in range(2))
    x, y = (torch.randn(5, 700, device=DEVICE).to(dtype) for _ in range(2))
    parts = torch.randn(3, 5, 700, device=DEVICE)
    for given, what in ((y, y), (parts, parts.sum(0).to(dtype))):
        for a, b in ((after, before), (after, None), (None, before)):
            total, out = decoding.add_and_norm(x, given, a and norm_of(a), b and norm_of(b))
            expected = x + (a(what) if a else what)
            close(total, expected, dtype)
            close(out, b(expected) if b else expected, dtype)
            off = (out - (b(total) if b else total)).abs() > 1e-5
            assert off.float().mean() < 1e-2, "rounded elsewhere than in the module"
    x_alone, out = decoding.add_and_norm(x, None, None, norm_of(before))
    assert x_alone is x
    close(out, before(x), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tables", ["of the model", "in float32"])
@pytest.mark.parametrize("heads", [(3, 2), (32, 32)])
@pytest.mark.parametrize("family", ["llama", "olmo2", "gemma3"])
@pytest.mark.parametrize(("wide", "pairs"), [(False, False), (True, False), (False, True)])
def test_norms_and_rotary_of_queries_and_keys(
    wide: bool, pairs: bool, family: str, heads: tuple[int, int], tables: str, dtype: torch.dtype
) -> None:
    """wide: one norm over all queries, and one over all keys; pairs: rotary mixes neighbours."""
    from kitae.kernels.cuda import decoding
    from kitae.models.layer_kinds import norm_of

    (hq, hkv), dim, page, count = heads, 48, 8, 11
    of_q, of_k = (made_norm(family, dim * (h if wide else 1), dtype) for h in heads)
    qkv = torch.randn(count, (hq + 2 * hkv) * dim, device=DEVICE).to(dtype)
    angles = 9 * torch.rand(64, dim // 2, device=DEVICE).repeat(1, 2)
    kind = dtype if tables == "of the model" else torch.float32
    cos, sin = angles.cos().to(kind), angles.sin().to(kind)
    positions, slots = torch.randint(64, (count,), device=DEVICE), torch.randperm(4 * page, device=DEVICE)[:count]
    q, k, v = qkv.clone().split([hq * dim, hkv * dim, hkv * dim], 1)
    q, k = (n(t.reshape(count, -1, len(n.weight))).view(count, -1, dim) for n, t in ((of_q, q), (of_k, k)))

    def turned(t: torch.Tensor, kind: torch.dtype = dtype) -> torch.Tensor:
        c, s = (table[positions][:, None].to(torch.promote_types(kind, table.dtype)) for table in (cos, sin))
        t = t.to(kind)
        if pairs:
            t = torch.cat((t[..., ::2], t[..., 1::2]), -1)
        other = torch.cat((-t[..., dim // 2 :], t[..., : dim // 2]), -1)
        t = (t * c + other * s).to(kind)
        return torch.stack(t.chunk(2, -1), -1).flatten(-2) if pairs else t

    pages = [torch.zeros(4, hkv, page, dim, device=DEVICE, dtype=dtype) for _ in range(2)]
    norm, other = norm_of(of_q), norm_of(of_k)
    assert norm is not None and other is not None
    decoding.rotate_and_store(
        qkv, None, (norm.weight, other.weight, norm.eps), cos, sin, positions, slots, (pages[0], None),
        (pages[1], None), hq, norm.rule, pairs,
    )  # fmt: skip
    got = qkv.view(count, -1, dim)
    close(got[:, :hq], turned(q), dtype)
    close(got[:, hq : hq + hkv], turned(k), dtype)
    exact = turned(q, torch.float64)  # a product may be added before it is rounded, which is nearer to it
    off, theirs = ((found - exact).abs().mean() for found in (got[:, :hq], turned(q)))
    assert off < 1.02 * theirs + 1e-6, "rounded more than in the modules"
    for side, stored in zip((got[:, hq : hq + hkv], v.view(count, hkv, dim)), pages, strict=True):
        assert torch.equal(stored[slots // page, :, slots % page], side)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 7, 16, 17, 64])
def test_products_of_a_few_rows(rows: int, dtype: torch.dtype) -> None:
    """The stream, products that norm what they read, and products that add to it; counters are zeros again."""
    from kitae.kernels.cuda import decoding, small_batch

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").to(dtype)

    table, gain, weight, back = randn(50, 1000), randn(1000), randn(600, 1000) / 30, randn(1000, 300) / 17
    counters = torch.zeros(64, dtype=torch.int32, device="cuda")
    tokens = torch.randint(50, (rows,), device="cuda")
    stream = small_batch.embed(tokens, table, gain, counters)
    assert torch.equal(stream.rows, table[tokens])
    for _ in range(2):
        normed = decoding.rms_norm(stream.rows, None, gain, 1e-6)[1]
        close(small_batch.normed_product(stream, 1e-6, weight), normed @ weight.t(), dtype)
        parts, kept = small_batch.normed_parts(stream, 1e-6, weight)
        close(kept, normed, dtype)
        close(parts.sum(0), normed @ weight.t(), dtype)
        act = small_batch.normed_product(stream, 1e-6, weight, gated=True)
        close(act, decoding.swiglu(normed @ weight.t()), dtype)
        for splits in (1, 4):
            expected = stream.rows.float() + act.float() @ back.float().t()
            gain = randn(1000)
            small_batch.add_product(stream, act, back, gain, splits=splits)
            close(stream.rows, expected, dtype)
            close(stream.gained, stream.rows.float() * gain.float(), dtype)
            close(stream.squares.sum(-1), stream.rows.float().pow(2).sum(-1), torch.float32)
    parts = torch.randn(3, rows, 1000, device="cuda")
    expected = stream.rows.float() + parts.sum(0)
    small_batch.add_parts(stream, parts, gain)
    close(stream.rows, expected, dtype)
    close(stream.gained, stream.rows.float() * gain.float(), dtype)
    close(stream.squares.sum(-1), stream.rows.float().pow(2).sum(-1), torch.float32)
    assert not counters.any()


def test_the_sum_of_parts_does_not_depend_on_who_comes_last() -> None:
    from kitae.kernels.cuda import small_batch

    counters = torch.zeros(64, dtype=torch.int32, device="cuda")
    table = torch.randn(50, 1536, device="cuda").bfloat16()
    x, weight = (torch.randn(shape, device="cuda").bfloat16() for shape in ((5, 8960), (1536, 8960)))
    found = []
    for _ in range(30):
        stream = small_batch.embed(torch.arange(5, device="cuda"), table, table[0], counters)
        small_batch.add_product(stream, x, weight, table[0])
        found.append(stream.rows)
    assert all(torch.equal(rows, found[0]) for rows in found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("how", ["plain", "window", "softcap", "sinks", "bias", "norm"])
@pytest.mark.parametrize("eight_bits", [False, True])
def test_attention_that_turns_its_rows_itself(dtype: torch.dtype, splits: int, how: str, eight_bits: bool) -> None:
    """Against rotary and attention one after the other: what comes out, and what is in the pages."""
    from kitae.kernels.cuda import decoding, paged

    heads, kv_heads, dim, page = 6, 2, 24, 4
    lengths = torch.tensor([1, 77, 120, 0], device="cuda", dtype=torch.int32)
    positions = (lengths.long() - 1).clamp(min=0)
    table = torch.randperm(120, device="cuda").view(4, 30).int()
    slots = table.gather(1, (positions // page)[:, None])[:, 0].long() * page + positions % page
    slots[3] = 120 * page  # nobody is there
    qkv = torch.randn(4, (heads + 2 * kv_heads) * dim, device="cuda").to(dtype)
    turn = [torch.randn(130, dim // 2, device="cuda").repeat(1, 2).to(dtype) for _ in range(2)]
    bias = torch.randn(qkv.shape[1], device="cuda").to(dtype) if how == "bias" else None
    gains = [torch.randn(dim, device="cuda").to(dtype) for _ in range(2)]
    norms = (gains[0], gains[1], 1e-6) if how == "norm" else None
    settings = {"scale": 0.3, "window": 7 if how == "window" else None, "softcap": 5.0 if how == "softcap" else None}
    sinks = torch.randn(heads, device="cuda") if how == "sinks" else None
    one, other = (made_pages((121, kv_heads, page, dim), dtype, eight_bits) for _ in range(2))
    every = torch.arange(120 * page, device="cuda")
    for pages in (one, other):
        pages.write(every // page, every % page, torch.randn(120 * page, kv_heads, dim, device="cuda", dtype=dtype))
    stored = [(side.numbers.clone(), None if side.scales is None else side.scales.clone()) for side in (one, other)]
    counters = torch.zeros(64, dtype=torch.int32, device="cuda")
    got = paged.turn_and_attend(
        qkv, bias, norms, *turn, positions, slots, *stored, heads, table, lengths, counters,
        **settings, sinks=sinks, splits=splits, block=16,
    )  # fmt: skip
    pairs = [(side.numbers, side.scales) for side in (one, other)]
    decoding.rotate_and_store(qkv, bias, norms, *turn, positions, slots, *pairs, heads)
    q = qkv.view(4, -1, dim)[:, :heads]
    expected = paged.attend(q, *pairs, table, lengths, **settings, sinks=sinks, block=16)
    close(got.view_as(expected)[:3], expected[:3], dtype)
    assert not got[3].any() and not counters.any()
    for (numbers, scales), side in zip(stored, (one, other), strict=True):
        # Sums in another order may round to the neighbour; in 8 bits, a number and its scale.
        off = {"atol": 2.0, "rtol": 0.0} if eight_bits else {"atol": 1e-2, "rtol": 2**-7}
        torch.testing.assert_close(numbers[:120].float(), side.numbers[:120].float(), **off)
        if scales is not None and side.scales is not None:
            torch.testing.assert_close(scales[:120], side.scales[:120], atol=0, rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalise", [True, False])
def test_the_largest_gates_of_a_softmax(dtype: torch.dtype, renormalise: bool) -> None:
    from kitae.kernels.cuda import expert_decoding

    logits = torch.randn(70, 60, device="cuda").to(dtype)
    gates, chosen = expert_decoding.route(logits, 6, renormalise, dtype)
    expected = logits.float().softmax(-1).topk(6).values
    torch.testing.assert_close(gates, expected / expected.sum(-1, keepdim=True) if renormalise else expected)
    assert all(len(set(row)) == 6 for row in chosen.tolist())
    if dtype == torch.float32:
        pieces = torch.stack([logits * 0.25, logits * 0.75])
        assert torch.equal(expert_decoding.route(pieces, 6, renormalise, dtype)[1], chosen)
    again = logits.float().softmax(-1).gather(1, chosen.long())
    torch.testing.assert_close(again, expected, msg="ties may be chosen otherwise, but weigh the same")


def test_logits_that_are_not_finite_choose_experts_that_exist() -> None:
    from kitae.kernels.cuda import expert_decoding

    logits = torch.full((4, 60), float("nan"), device="cuda")
    chosen = expert_decoding.route(logits, 6, True, torch.float32)[1]
    assert chosen.min() >= 0 and chosen.max() < 60


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "count", "top"), [(1, 4, 2), (3, 128, 8), (40, 4, 2), (40, 128, 8), (700, 5, 3), (3000, 16, 4)]
)
def test_products_of_experts(tokens: int, count: int, top: int, dtype: torch.dtype) -> None:
    """Alone, sorted, with experts that nobody chose, and in blocks of every size."""
    from kitae.kernels.cuda import decoding, expert_decoding

    width, inner = 200, 144
    x = torch.randn(tokens, width, device="cuda", dtype=dtype)
    gate_up = torch.randn(count, 2 * inner, width, device="cuda", dtype=dtype) / 14
    down = torch.randn(count, width, inner, device="cuda", dtype=dtype) / 12
    logits = torch.randn(tokens, count, device="cuda", dtype=dtype)
    logits[:, 1] = -30
    gates, chosen = expert_decoding.route(logits, top, True, dtype)
    expected = torch.zeros(top, tokens, width, device="cuda")
    for expert in range(count):
        token, slot = (chosen == expert).nonzero(as_tuple=True)
        made = decoding.swiglu(x[token] @ gate_up[expert].t()) @ down[expert].t() if len(token) else x[token]
        expected[slot, token] = made.float() * gates[token, slot, None]
    close(expert_decoding.mix(x, gates, chosen, gate_up, down), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "count", "top"), [(1, 4, 2), (3, 32, 4), (40, 4, 2), (700, 5, 3), (3000, 16, 4)])
def test_products_of_limited_experts(tokens: int, count: int, top: int, dtype: torch.dtype) -> None:
    """Those of gpt-oss, by its own function for what is gated, which reaches its limits here."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    from kitae.kernels.cuda import expert_decoding

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE).to(dtype)

    class Own:
        alpha, limit = 1.702, 1.5

    width, inner = 200, 144
    x, gate_up, down = randn(tokens, width), randn(count, width, 2 * inner) / 8, randn(count, inner, width) / 12
    limited = GateLimits(randn(count, 2 * inner), randn(count, width), Own.alpha, Own.limit)
    logits = randn(tokens, count)
    logits[:, 1] = -30
    gates, chosen = expert_decoding.route(logits, top, True, dtype)
    expected = torch.zeros(top, tokens, width, device=DEVICE)
    for expert in range(count):
        token, slot = (chosen == expert).nonzero(as_tuple=True)
        both = x[token] @ gate_up[expert] + limited.gate_up_bias[expert]
        made = GptOssExperts._apply_gate(Own, both) @ down[expert] + limited.down_bias[expert]
        expected[slot, token] = made.float() * gates[token, slot, None]
    close(expert_decoding.mix(x, gates, chosen, gate_up, down, limited), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("how", ["plain", "window", "softcap", "sinks"])
@pytest.mark.parametrize("eight_bits", [False, True])
def test_attention_over_pages(dtype: torch.dtype, splits: int, how: str, eight_bits: bool) -> None:
    from kitae.kernels.cuda import paged

    kv_heads, group, dim, page = 2, 3, 24, 4
    keys, values = (made_pages((120, kv_heads, page, dim), dtype, eight_bits) for _ in range(2))
    every = torch.arange(120 * page, device="cuda")
    for pages in (keys, values):
        rows = torch.randn(120 * page, kv_heads, dim, device="cuda", dtype=dtype)
        pages.write(every // page, every % page, rows)
    table = torch.randperm(120, device="cuda").view(4, 30).int()
    lengths = [1, 77, 120, 0]
    q = torch.randn(4, 10, dim, device="cuda", dtype=dtype)[:, : kv_heads * group]  # rows with a stride
    window, softcap = (7 if how == "window" else None), (5.0 if how == "softcap" else None)
    sinks = torch.randn(6, device="cuda") if how == "sinks" else None
    out = paged.attend(
        q, (keys.numbers, keys.scales), (values.numbers, values.scales), table,
        torch.tensor(lengths, device="cuda", dtype=torch.int32),
        scale=0.3, window=window, softcap=softcap, sinks=sinks, splits=splits, block=16,
    )  # fmt: skip
    for i, length in enumerate(lengths[:3]):
        k, v = (t.read(table[i].long()).transpose(0, 1).flatten(1, 2)[:, :length].float() for t in (keys, values))
        last = torch.tensor([length - 1], device="cuda")
        allowed = causal_mask(last, torch.arange(length, device="cuda"), window)
        expected = masked_attention(q[i][:, None].float(), k, v, allowed, scale=0.3, softcap=softcap, sinks=sinks)[0]
        close(out[i], expected, dtype)
    assert not out[3].any()


def made_pages(shape: tuple[int, ...], dtype: torch.dtype, eight_bits: bool) -> Pages:
    numbers = torch.zeros(shape, device="cuda", dtype=torch.int8 if eight_bits else dtype)
    return Pages(numbers, torch.zeros(shape[:-1], device="cuda") if eight_bits else None, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_are_stored_in_8_bits_as_pages_do(dtype: torch.dtype) -> None:
    from kitae.kernels.cuda import decoding

    heads, kv_heads, page, dim = 6, 2, 4, 24
    qkv = torch.randn(5, (heads + 2 * kv_heads) * dim, device="cuda").to(dtype)
    turn = [torch.randn(9, dim, device="cuda").to(dtype) for _ in range(2)]
    positions, slots = torch.tensor([0, 3, 8, 1, 2], device="cuda"), torch.tensor([3, 17, 40, 41, 7], device="cuda")
    stored = {}
    for eight_bits in (False, True):
        sides = [made_pages((20, kv_heads, page, dim), dtype, eight_bits) for _ in range(2)]
        pairs = [(side.numbers, side.scales) for side in sides]
        decoding.rotate_and_store(qkv.clone(), None, None, *turn, positions, slots, *pairs, heads)
        stored[eight_bits] = sides
    for plain, small in zip(stored[False], stored[True], strict=True):
        expected = made_pages((20, kv_heads, page, dim), dtype, True)
        expected.write(slots // page, slots % page, plain.at(slots // page, slots % page))
        torch.testing.assert_close(small.scales, expected.scales)
        assert (small.numbers.int() - expected.numbers.int()).abs().max() <= 1


@pytest.mark.parametrize("vocabulary", [300, 4096, 151936])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sampling_inverts_the_distribution(vocabulary: int, dtype: torch.dtype) -> None:
    """The uniform number of (seed, position) lies within the interval of the token drawn, but for fp32 rounding."""
    from kitae.kernels.cuda import decoding

    count = 64
    logits = (torch.randn(count, vocabulary, device="cuda") * 3).to(dtype)
    temperatures = [(1.0, 0.7, 0.0, 1.3)[i % 4] for i in range(count)]
    seeds = [stream_seed("x", i) for i in range(count)]
    state = torch.full((count, decoding.COLUMNS), -1, dtype=torch.int64)
    inverse = np.array([1 / t if t else 0 for t in temperatures], dtype=np.float32).view(np.int32).astype(np.int64)
    state[:, decoding.LENGTH], state[:, decoding.COUNT], state[:, decoding.LIMIT] = 5, torch.arange(count), count
    state[:, decoding.SEED], state[:, decoding.ACTIVE] = torch.tensor(seeds), 1
    state[:, decoding.INVERSE] = torch.from_numpy(inverse)
    state[9, decoding.ACTIVE] = 0
    uniform = sampler.uniforms(seeds, list(range(count)))
    draws = [sampler.RowDraw(SamplingParams(t)) for t in temperatures]
    tokens, *_ = sampler.sample(logits, draws, uniform, kernels=None)
    state[8, decoding.STOP + 3] = tokens[8]
    device_state = state.cuda()
    out = decoding.sample(logits, device_state).cpu()
    after = device_state.cpu()
    drawn = [i for i in range(count) if i != 9]
    assert out[0, 9] == -1 and torch.equal(after[9], state[9]), "an idle row is left alone"
    for i in drawn:
        token, temperature = int(out[0, i]), temperatures[i]
        logp = torch.log_softmax(logits[i].double() / (temperature or 1.0), -1).cpu()
        assert out[1].view(torch.float32)[i].item() == pytest.approx(logp[token].item(), abs=1e-4)
        if temperature == 0:
            assert token == tokens[i]
        else:
            end = logp.exp().cumsum(-1)[token].item()
            assert end - logp[token].exp().item() - 1e-5 <= uniform[i] <= end + 1e-5
    assert (after[drawn, decoding.LENGTH] == 6).all()
    assert torch.equal(after[drawn, decoding.TOKEN], out[0, drawn].long())
    ended = [i for i in drawn if not after[i, decoding.ACTIVE]]
    assert set(ended) <= {8, count - 1} and count - 1 in ended


@pytest.mark.parametrize("vocabulary", [300, 9000])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_draw_a_token_that_exists(vocabulary: int, temperature: float) -> None:
    """The next step has been launched with it before the host reads that something is wrong."""
    from kitae.kernels.cuda import decoding

    logits = torch.full((3, vocabulary), float("nan"), device="cuda")
    logits[1, : vocabulary // 2] = 0.0
    state = torch.zeros(3, decoding.COLUMNS, dtype=torch.int64)
    state[:, decoding.LIMIT], state[:, decoding.ACTIVE], state[:, decoding.STOP :] = 9, 1, -1
    state[:, decoding.INVERSE] = int(np.float32(temperature).view(np.int32))
    tokens, logprobs = decoding.sample(logits, state.cuda()).cpu()
    assert tokens.min() >= 0 and tokens.max() < vocabulary
    assert not logprobs.view(torch.float32).isfinite().any()


def test_parts_lie_further_apart_than_32_bits_reach() -> None:
    """What 8 experts of each token of a long prompt made, before it is added."""
    from kitae.kernels.cuda import decoding

    rows, width = 38_000, 8192
    x = torch.zeros(rows, width, device="cuda", dtype=torch.bfloat16)
    parts = torch.empty(8, rows, width, device="cuda", dtype=torch.bfloat16)
    for i in range(8):
        parts[i] = i + 1
    total, _ = decoding.rms_norm(x, parts, torch.ones(width, device="cuda", dtype=torch.bfloat16), 1e-6)
    assert (total == 36).all()


@pytest.mark.parametrize("length", [8192, 10_001])
def test_a_long_sequence_alone(length: int) -> None:
    """cuDNN is only asked where flash attention would do the same."""
    from kitae.kernels.cuda import flash

    q, k, v = (torch.randn(length, heads, 64, device="cuda").bfloat16() for heads in (6, 2, 2))
    bounds = flash.Bounds.of([length], [length], q.device)
    with torch.no_grad():
        fast = flash.attend(q, k, v, bounds, scale=0.2, window=None)
        close(fast, flash.attend(q, k, v, bounds, scale=0.2, window=length), torch.bfloat16)
    q.requires_grad_()
    flash.attend(q, k, v, bounds, scale=0.2, window=None).sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()
