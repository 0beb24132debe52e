"""Prompts whose attention is computed once for all samples, against each sample's own.

Kernels alone, without a GPU, where Triton is installed, in fp32 by its interpreter:

    TRITON_INTERPRET=1 python -m pytest tests/gpu/test_prompts_on_gpu.py
"""

import asyncio
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kitae.engines.base import Completion, EngineStats, Request, SamplingParams, WeightUpdate
from kitae.engines.native.engine import NativeEngine
from kitae.engines.native.page_cache import Pages
from kitae.kernels.devices import has_triton
from kitae.models.policy import Policy

sys.path.append(str(Path(__file__).parents[1] / "unit/engines"))
from test_native_engine import pages_gb, with_engine

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and has_triton()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
pytestmark = [
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no GPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numpy, about rows of a tile that belong to nobody
]
TinyPolicy = Callable[..., Policy]
PAGE, DIM, KV_HEADS = 8, 24, 2
GROUPS = [(0, 3, 40), (3, 2, 8), (6, 2, 72)]  # the sixth sequence has nobody, the last two have ended or are idle
SEQUENCES = 9
PROMPTS = [40, 40, 40, 8, 8, 0, 72, 72, 0]


def made(dtype: torch.dtype, eight_bits: bool, pages: int) -> Pages:
    shape = (pages + 1, KV_HEADS, PAGE, DIM)
    numbers = torch.zeros(shape, dtype=torch.int8 if eight_bits else dtype, device=DEVICE)
    scales = torch.ones(shape[:-1], device=DEVICE) if eight_bits else None
    found = Pages(numbers, scales, dtype)
    every = torch.arange(pages * PAGE, device=DEVICE)
    found.write(every // PAGE, every % PAGE, torch.randn(pages * PAGE, KV_HEADS, DIM, device=DEVICE, dtype=dtype))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=on_gpu)])
@pytest.mark.parametrize("how", ["plain", "softcap", "sinks", "bias", "norm"])
@pytest.mark.parametrize("eight_bits", [False, True])
@pytest.mark.parametrize(("splits", "heads", "per"), [(1, 6, 1), (4, 6, 3), (4, 2, 1), (1, 8, 2)])
def test_what_samples_share_is_computed_once(
    dtype: torch.dtype, how: str, eight_bits: bool, splits: int, heads: int, per: int
) -> None:
    """splits: of what is shared, and of what is not."""
    from kitae.kernels.cuda import decoding, paged, shared_prompts

    torch.manual_seed(0)
    pages = SEQUENCES * 14
    table = torch.randperm(pages, device=DEVICE).view(SEQUENCES, 14).int()
    for first, count, tokens in GROUPS:
        table[first : first + count, : tokens // PAGE] = table[first, : tokens // PAGE]
    own = torch.tensor([1, 2, 30, 1, 17, 21, 9, 1, 1])
    before = (torch.tensor(PROMPTS) + own - 1).to(DEVICE)
    active = torch.tensor([True] * 7 + [False] * 2, device=DEVICE)
    positions = (before[:, None] + torch.arange(per, device=DEVICE)).flatten()
    there = active.repeat_interleave(per)
    lengths = torch.where(there, positions + 1, 0).int()
    slots = table.repeat_interleave(per, 0).gather(1, (positions // PAGE)[:, None])[:, 0].long() * PAGE
    slots = torch.where(there, slots + positions % PAGE, pages * PAGE)
    qkv = torch.randn(SEQUENCES * per, (heads + 2 * KV_HEADS) * DIM, device=DEVICE).to(dtype)
    turn = [torch.randn(130, DIM // 2, device=DEVICE).repeat(1, 2).to(dtype) for _ in range(2)]
    bias = torch.randn(qkv.shape[1], device=DEVICE).to(dtype) if how == "bias" else None
    gains = [torch.randn(DIM, device=DEVICE).to(dtype) for _ in range(2)]
    norms = (gains[0], gains[1], 1e-6) if how == "norm" else None
    softcap = 5.0 if how == "softcap" else None
    sinks = torch.randn(heads, device=DEVICE) if how == "sinks" else None
    settings: dict[str, Any] = {"scale": 0.3, "softcap": softcap}
    sides = [made(dtype, eight_bits, pages) for _ in range(2)]
    stored = [(side.numbers, side.scales) for side in sides]
    groups = shared_prompts.Groups(
        torch.tensor([*GROUPS, (0, 0, 0)], dtype=torch.int32, device=DEVICE),
        torch.tensor(PROMPTS, dtype=torch.int32, device=DEVICE),
        shared_prompts.most(heads, KV_HEADS, per),
    )
    of_queries = None if norms is None else (norms[0], norms[2])
    begun = shared_prompts.begin(
        qkv, *stored, heads, table, groups, **settings, splits=splits, block=16,
        turn=shared_prompts.Turning(bias, of_queries, turn[0], turn[1], positions),
    )  # fmt: skip
    counters = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    turned = paged.turn_and_attend(
        qkv, bias, norms, *turn, positions, slots, *stored, heads, table, lengths, counters, **settings, sinks=sinks,
        begun=begun, splits=splits, block=16,
    )  # fmt: skip
    decoding.rotate_and_store(qkv, bias, norms, *turn, positions, slots, *stored, heads)
    q = qkv.view(SEQUENCES * per, -1, DIM)[:, :heads]
    expected = paged.attend(q, *stored, table, lengths, **settings, sinks=sinks, splits=1, block=16)
    begun = shared_prompts.begin(q, *stored, heads, table, groups, **settings, splits=splits, block=16)
    got = paged.attend(q, *stored, table, lengths, **settings, sinks=sinks, begun=begun, splits=splits, block=16)
    for found in (got, turned.view_as(expected)):
        error = (found[there] - expected[there]).float().norm() / expected[there].float().norm()
        assert error < (1e-5 if dtype == torch.float32 else 1e-2)
    assert not got[~there].any() and not counters.any()


# Engines in which every prompt is worth it


def grouped_requests(tokens: int = 50) -> list[Request]:
    """Samples of prompts that fill several pages, two to thirteen of each, and one alone; they end at many times."""
    rng = random.Random(0)
    found = []
    for group, size in enumerate((5, 2, 13, 1, 8)):
        prompt = tuple(rng.randrange(3, 90) for _ in range(30 + 23 * group))
        for i in range(size):
            sampling = SamplingParams(0.0 if i == 1 else 0.8, tokens - (7 * i + group) % 31)
            found.append(Request(f"{group}/{i}", prompt, sampling, 100 * group + i, share=f"{group}"))
    return found


def answers(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, worth: int, modules: bool = False, **settings: Any
) -> tuple[list[Completion], set[tuple[int, int, bool]], EngineStats]:
    """With the steps that were computed: their sequences, rows of each, and whether they shared."""
    from kitae.engines.native.gpu_runner import CudaRunner

    monkeypatch.setattr(CudaRunner, "worth_sharing", worth)

    async def use(engine: NativeEngine) -> tuple[list[Completion], set[tuple[int, int, bool]], EngineStats]:
        runner: Any = engine.runner
        if modules:
            runner.decoder = None
        done = await asyncio.gather(*(engine.generate(r) for r in grouped_requests()))
        return done, set(runner._steps), engine.stats()

    return with_engine(policy, use, **settings)  # type: ignore[no-any-return]


def differing(one: list[Completion], other: list[Completion]) -> int:
    return sum(a.tokens != b.tokens for a, b in zip(one, other, strict=True))


@on_gpu
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize(
    "settings",
    [
        {"draft_tokens": 0},
        {"draft_tokens": 4, "max_batch": 6},
        {"draft_tokens": 0, "page_size": 4, "cache_dtype": "int8"},
        {"draft_tokens": 0, "max_batch": 70, "modules": True},
    ],
    ids=str,
)
def test_samples_are_those_of_prompts_that_are_read_for_each(
    architecture: str, settings: dict[str, Any], tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32, but for a draw that falls on the border of two tokens."""
    policy = tiny_policy(architecture)
    apart, steps, _ = answers(policy, monkeypatch, sys.maxsize, **settings)
    assert not any(shares for *_, shares in steps)
    together, steps, _ = answers(policy, monkeypatch, 0, **settings)
    assert any(shares for *_, shares in steps)
    assert differing(together, apart) <= (3 if "cache_dtype" in settings else 1)


@on_gpu
@pytest.mark.parametrize("host", [0.0, 0.01])
def test_samples_that_lose_their_pages_and_get_others(
    host: float, tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tiny_policy("qwen2")
    apart, *_ = answers(policy, monkeypatch, sys.maxsize, draft_tokens=0)
    crowded = {"memory_gb": pages_gb(policy, 60, 8), "page_size": 8, "host_memory_gb": host, "draft_tokens": 0}
    together, steps, stats = answers(policy, monkeypatch, 0, **crowded)
    assert stats.preemptions and any(shares for *_, shares in steps)
    assert differing(together, apart) <= 1


@on_gpu
def test_samples_before_and_after_an_update_share_no_pages(
    tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same prompt, computed by two versions of the weights, among neighbours."""
    from kitae.engines.native.gpu_runner import CudaRunner

    policy = tiny_policy("llama")
    first, second = (tuple(r for r in grouped_requests(90) if r.id[0] == "4")[part] for part in (slice(4), slice(4, 8)))

    async def use(engine: NativeEngine) -> list[Completion]:
        early = [asyncio.ensure_future(engine.generate(r)) for r in first]
        while engine.stats().generated_tokens < 20:
            await asyncio.sleep(0.001)
        held = [p.detach().clone() for p in policy.model.parameters()]
        try:
            for p, was in zip(policy.model.parameters(), held, strict=True):
                p.data.copy_(was * 1.02)
            await engine.update_weights(WeightUpdate(1))
            return await asyncio.gather(*early, *(engine.generate(r) for r in second))
        finally:
            for p, was in zip(policy.model.parameters(), held, strict=True):
                p.data.copy_(was)

    found = []
    for worth in (sys.maxsize, 0):
        monkeypatch.setattr(CudaRunner, "worth_sharing", worth)
        done: Any = with_engine(policy, use, draft_tokens=0)
        found.append([c for c in done if c.id in {r.id for r in second}])
    assert differing(*found) <= 1


@on_gpu
def test_without_room_for_its_kernel_prompts_are_read_for_each(
    tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.errors import OutOfResources

    from kitae.kernels.cuda import shared_prompts

    def too_large(*_: object, **__: object) -> None:
        raise OutOfResources(300_000, 232_448, "shared memory")

    policy = tiny_policy("llama")
    apart, *_ = answers(policy, monkeypatch, sys.maxsize, draft_tokens=0)
    monkeypatch.setattr(shared_prompts, "begin", too_large)
    together, steps, _ = answers(policy, monkeypatch, 0, draft_tokens=0)
    assert not any(shares for *_, shares in steps) and differing(together, apart) <= 1


@on_gpu
def test_nor_in_a_step_that_is_no_graph(tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    from kitae.engines.native.gpu_runner import CudaRunner

    monkeypatch.setattr(CudaRunner, "_step_for", lambda self, *key: ungraphed(*key))
    test_without_room_for_its_kernel_prompts_are_read_for_each(tiny_policy, monkeypatch)


def ungraphed(batch: int, width: int, shares: bool) -> Any:
    from kitae.engines.native.gpu_runner import _Step

    return _Step(batch, width, shares)
