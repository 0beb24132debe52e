"""Speculative decoding on the device: all tests of it there, and kernels of several rows of a sequence."""

import random
import sys
from pathlib import Path

import pytest
import torch

from kitae.engines.base import SamplingParams
from kitae.engines.native.ngram_speculation import NgramDrafts

sys.path.append(str(Path(__file__).parents[1] / "unit/engines"))
from test_fast_engine import mixed_requests
from test_kernels_on_gpu import DTYPES, close, made_pages
from test_native_engine import pages_gb, prompts
from test_speculation import *  # noqa: F403
from test_speculation import Completion, NativeEngine, Request, TinyPolicy, ask, with_engine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
PAGE = 4


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_same_answers_as_without(architecture: str, tiny_policy: TinyPolicy) -> None:
    """With groups, filters, and rows that end one after the other, so that widths change; in fp32, but for a draw that
    falls on the border of two tokens."""
    policy = tiny_policy(architecture)
    calm = [r for r in mixed_requests(45, 60) if r.sampling.top_k == 0]
    for requests in (mixed_requests(), calm):
        plain, steps = ask(policy, requests, draft_tokens=0)
        drafted, fewer = ask(policy, requests, draft_tokens=5)
        different = sum(one.tokens != other.tokens for one, other in zip(drafted, plain, strict=True))
        assert different <= 1 and fewer <= steps, (different, fewer, steps)


@pytest.mark.parametrize("draft_tokens", [1, 3, 15])
def test_exact_answers_are_the_same_bits(draft_tokens: int, tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy("llama", exact=True)
    requests = [Request(f"{i}", p, SamplingParams(0.5 * (i % 3), 50), i) for i, p in enumerate(prompts(6))]
    plain, _ = ask(policy, requests, draft_tokens=0)
    drafted, _ = ask(policy, requests, draft_tokens=draft_tokens)
    assert [(c.tokens, c.logprobs) for c in drafted] == [(c.tokens, c.logprobs) for c in plain]


def test_without_room_for_their_kernels_nothing_is_drafted(
    tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.errors import OutOfResources

    from kitae.kernels.cuda import speculation

    def too_large(*_: object) -> None:
        raise OutOfResources(300_000, 232_448, "shared memory")

    policy = tiny_policy("llama")
    requests = [Request(f"{i}", (i + 3, *range(5, 30)), SamplingParams(0.0, 40), i) for i in range(3)]
    plain, steps = ask(policy, requests, draft_tokens=0)
    monkeypatch.setattr(speculation, "begin", too_large)
    done, as_many = ask(policy, requests)
    assert [c.tokens for c in done] == [c.tokens for c in plain] and as_many >= steps


def test_texts_are_as_long_as_the_cache_can_hold(tiny_policy: TinyPolicy) -> None:
    """A model of a million positions does not cost 32 texts of that length; an answer that fills the cache is whole."""
    policy = tiny_policy("llama")
    request = Request("r", (5, 6, 7, 8), SamplingParams(0.0, 37), 0)  # 4 + 37 - 1 tokens are all that 10 pages hold
    plain, _ = ask(policy, [request], draft_tokens=0, page_size=PAGE, memory_gb=pages_gb(policy, 11, PAGE))

    async def use(engine: NativeEngine) -> tuple[Completion, int]:
        return await engine.generate(request), engine.runner.texts.shape[1]  # type: ignore[attr-defined]

    done, columns = with_engine(policy, use, draft_tokens=15, page_size=PAGE, memory_gb=pages_gb(policy, 11, PAGE))
    assert columns == 11 * PAGE + 1 and done.tokens == plain[0].tokens


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("how", ["plain", "window", "softcap", "sinks", "bias", "norm"])
@pytest.mark.parametrize("eight_bits", [False, True])
@pytest.mark.parametrize("per", [2, 5])
def test_attention_of_several_rows_of_a_sequence(
    dtype: torch.dtype, splits: int, how: str, eight_bits: bool, per: int
) -> None:
    """Against rows that are sequences of their own, with the same pages."""
    from kitae.kernels.cuda import decoding, paged

    torch.manual_seed(0)
    heads, kv_heads, dim = 6, 2, 24
    real = [per, 1, per - 1, 0]  # rows of each sequence that are not idle
    first = torch.tensor([1, 77, 110, 1], device="cuda")
    table = torch.randperm(120, device="cuda").view(4, 30).int()
    later = torch.tensor([[i if i < n else 0 for i in range(per)] for n in real], device="cuda")
    there = torch.tensor([[i < n for i in range(per)] for n in real], device="cuda").flatten()
    positions = (first[:, None] - 1 + later).flatten()
    lengths = torch.where(there, positions + 1, 0).int()
    pages = table.repeat_interleave(per, 0)
    slots = pages.gather(1, (positions // PAGE)[:, None])[:, 0].long() * PAGE + positions % PAGE
    slots = torch.where(there, slots, 120 * PAGE)
    qkv = torch.randn(4 * per, (heads + 2 * kv_heads) * dim, device="cuda").to(dtype)
    turn = [torch.randn(130, dim // 2, device="cuda").repeat(1, 2).to(dtype) for _ in range(2)]
    bias = torch.randn(qkv.shape[1], device="cuda").to(dtype) if how == "bias" else None
    gains = [torch.randn(dim, device="cuda").to(dtype) for _ in range(2)]
    norms = (gains[0], gains[1], 1e-6) if how == "norm" else None
    sinks = torch.randn(heads, device="cuda") if how == "sinks" else None
    settings = {"scale": 0.3, "window": 7 if how == "window" else None, "softcap": 5.0 if how == "softcap" else None}
    sides = [made_pages((121, kv_heads, PAGE, dim), dtype, eight_bits) for _ in range(2)]
    every = torch.arange(120 * PAGE, device="cuda")
    for side in sides:
        side.write(every // PAGE, every % PAGE, torch.randn(120 * PAGE, kv_heads, dim, device="cuda", dtype=dtype))
    stored = [(side.numbers.clone(), None if side.scales is None else side.scales.clone()) for side in sides]
    counters = torch.zeros(64, dtype=torch.int32, device="cuda")
    turned = paged.turn_and_attend(
        qkv, bias, norms, *turn, positions, slots, *stored, heads, table, lengths, counters,
        **settings, sinks=sinks, splits=splits, block=16,
    )  # fmt: skip
    pairs = [(side.numbers, side.scales) for side in sides]
    decoding.rotate_and_store(qkv, bias, norms, *turn, positions, slots, *pairs, heads)
    q = qkv.view(4 * per, -1, dim)[:, :heads]
    expected = paged.attend(q, *pairs, pages.contiguous(), lengths, **settings, sinks=sinks, block=16)
    got = paged.attend(q, *pairs, table, lengths, **settings, sinks=sinks, splits=splits, block=16)
    close(got[there], expected[there], dtype)
    close(turned.view_as(expected)[there], expected[there], dtype)
    assert not counters.any()


@pytest.mark.parametrize("seed", range(8))
def test_the_device_drafts_and_keeps_what_the_host_would(seed: int) -> None:
    from kitae.kernels.cuda import decoding, speculation

    rng, batch, trash = random.Random(seed), 6, 99999
    per = rng.choice([2, 4, 5])
    state = torch.zeros(batch, decoding.COLUMNS, dtype=torch.int64)
    state[:, decoding.STOP :] = -1
    texts = torch.zeros(batch, 3000, dtype=torch.int32)
    table = torch.arange(batch * 800).view(batch, 800).int()
    known = [[rng.randrange(60) for _ in range(rng.choice([1, 2, 3, 50, 2100]))] for _ in range(batch)]
    for row, text, own in zip(state, known, texts, strict=True):
        own[: len(text)] = torch.tensor(text)
        row[decoding.TOKEN], row[decoding.LENGTH], row[decoding.COUNT] = text[-1], len(text) - 1, 5
        row[decoding.LIMIT], row[decoding.ACTIVE] = 5 + rng.choice([1, 2, 3, 100]), int(rng.random() < 0.8)
        row[decoding.STOP] = rng.randrange(60)
    before = state.clone()
    on_device = [t.cuda() for t in (state, table, texts)]
    made = speculation.begin(*on_device, per, PAGE, trash)
    tokens, _, slots, lengths = (t.cpu().view(batch, per) for t in made)
    drawn = tokens.roll(-1, 1).int()
    wrong = torch.tensor([[rng.random() < 0.2 or i == per - 1 for i in range(per)] for _ in range(batch)])
    drawn[wrong] = torch.tensor([rng.randrange(60) for _ in range(int(wrong.sum()))], dtype=torch.int32)
    out = torch.stack((drawn.flatten(), torch.zeros(batch * per, dtype=torch.int32))).cuda()
    speculation.keep_accepted(on_device[0], on_device[2], made[0], made[3], out)
    state, texts, kept_rows = on_device[0].cpu(), on_device[2].cpu(), out[0].cpu().view(batch, per).tolist()
    for i, text in enumerate(known):
        _, _, count, limit, _, active = before[i, :6].tolist()
        rows = [text[-1], *NgramDrafts(text).draft(min(per - 1, limit - count - 1))] if active else []
        assert lengths[i].tolist() == [len(text) + j for j in range(len(rows))] + [0] * (per - len(rows))
        assert tokens[i, : len(rows)].tolist() == rows
        places = [len(text) - 1 + j for j in range(len(rows))]
        assert slots[i].tolist() == [800 * i * PAGE + p for p in places] + [trash] * (per - len(rows))
        kept: list[int] = []
        for j, row in enumerate(rows):
            if kept and (row != kept[-1] or count + len(kept) >= limit or kept[-1] == before[i, decoding.STOP]):
                break
            kept.append(int(drawn[i, j]))
        assert kept_rows[i] == kept + [-1] * (per - len(kept))
        assert texts[i, len(text) : len(text) + len(kept)].tolist() == kept
        ended = bool(kept) and (count + len(kept) >= limit or kept[-1] == before[i, decoding.STOP])
        last = kept[-1] if kept else text[-1]
        assert state[i, :3].tolist() == [last, len(text) - 1 + len(kept), count + len(kept)]
        assert bool(state[i, decoding.ACTIVE]) == (bool(active) and not ended)
