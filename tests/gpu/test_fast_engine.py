"""The engine's graphs and kernels on a GPU: all tests of the engine once more, and the fast path against the plain."""

import asyncio
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kitae.engines.base import Completion, Request, SamplingParams, WeightUpdate
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.engines.native.gpu_decoder import GpuDecoder
from kitae.engines.native.page_cache import KVCache
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.policy import Policy
from kitae.models.tiny import ARCHITECTURES, make_tiny

sys.path.append(str(Path(__file__).parents[1] / "unit/engines"))
from test_native_engine import *  # noqa: F403
from test_native_engine import prompts, with_engine
from test_swapping import *  # noqa: F403

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
TinyPolicy = Callable[..., Policy]


def mixed_requests(count: int = 30, tokens: int = 40) -> list[Request]:
    """Groups, singles, greedy and filtered rows, of different lengths."""
    requests = []
    for i, prompt in enumerate(prompts(count // 3, seed=1)):
        for j in range(3):
            filters = {"top_p": 0.9, "top_k": 50, "min_p": 0.01} if (i, j) == (2, 1) else {}
            sampling = SamplingParams(0.0 if (i + j) % 7 == 0 else 0.8, tokens - 3 * i, **filters)  # type: ignore[arg-type]
            requests.append(Request(f"{i}/{j}", prompt, sampling, 10 * i + j, share=f"{i}"))
    return requests


def generate(policy: Policy, requests: list[Request], **settings: Any) -> list[Completion]:
    done = with_engine(policy, lambda e: asyncio.gather(*(e.generate(r) for r in requests)), **settings)
    assert isinstance(done, list)
    return done


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_same_tokens_as_the_plain_path(architecture: str, tiny_policy: TinyPolicy) -> None:
    """In fp32, but for a draw that falls on the border of two tokens."""
    policy = tiny_policy(architecture)
    different = 0
    for fast, plain in zip(
        generate(policy, mixed_requests(), plain=False), generate(policy, mixed_requests(), plain=True), strict=True
    ):
        assert fast.finish == plain.finish and len(fast.tokens) == len(plain.tokens)
        pairs = enumerate(zip(fast.tokens, plain.tokens, strict=True))
        same = next((i for i, (a, b) in pairs if a != b), len(fast.tokens))
        different += same < len(fast.tokens)
        torch.testing.assert_close(
            torch.tensor(fast.logprobs[:same]), torch.tensor(plain.logprobs[:same]), atol=1e-4, rtol=0
        )
    assert different <= 1


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma3"])
def test_bf16_rounds_no_worse_than_the_modules(architecture: str, tmp_path: Path) -> None:
    """A deeper model with heads of 64: what both paths report against one exact pass with the same weights."""
    from kitae.models.attention_seam import causal_mask, masked_attention

    make_tiny(tmp_path, architecture, hidden=256, layers=8)
    policy = load_policy(ModelConfig(path=str(tmp_path), dtype="bfloat16", device="cuda"))
    exact = load_policy(ModelConfig(path=str(tmp_path), dtype="float32", device="cuda"))
    for p, q in zip(exact.model.parameters(), policy.model.parameters(), strict=True):
        p.data.copy_(q.data)
    gaps: dict[bool, list[torch.Tensor]] = {True: [], False: []}

    class Whole:
        def __init__(self, length: int) -> None:
            self.positions = torch.arange(length, device="cuda")

        def attend(self, layer: int, q: Any, k: Any, v: Any, *, window: int | None, **rest: Any) -> torch.Tensor:
            return masked_attention(q, k, v, causal_mask(self.positions, self.positions, window), **rest)

    for plain in (False, True):
        requests = [Request(str(i), p, SamplingParams(max_tokens=60), i) for i, p in enumerate(prompts(40))]
        for request, done in zip(requests, generate(policy, requests, plain=plain, memory_gb=0.2), strict=True):
            row = torch.tensor(request.prompt_tokens + done.tokens[:-1], device="cuda")
            with torch.inference_mode():
                states = exact.hidden(row, torch.arange(len(row), device="cuda"), Whole(len(row)))
                logits = exact.logits(states[len(request.prompt_tokens) - 1 :]).float()
            expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(done.tokens, device="cuda")[:, None])[:, 0]
            gaps[plain].append((expected.cpu() - torch.tensor(done.logprobs)).abs())
    fast_gap, plain_gap = (torch.cat(gaps[plain]).mean().item() for plain in (False, True))
    assert fast_gap < 1.25 * plain_gap, (fast_gap, plain_gap)


def test_tokens_do_not_depend_on_the_batch_in_flight(tiny_policy: TinyPolicy) -> None:
    """Sequences join and leave all the time: rows move, buckets change, pages are reused."""
    policy = tiny_policy("qwen2")
    requests = [
        Request(f"{i}", prompts(1, seed=i)[0], SamplingParams(max_tokens=5 + i * 37 % 90), i) for i in range(60)
    ]
    alone = {c.id: c.tokens for c in generate(policy, requests, max_batch=60)}
    crowded = {"max_batch": 60, "memory_gb": 0.0016}
    for settings in ({"max_batch": 7}, {"max_batch": 13, "page_size": 4}, crowded, crowded | {"host_memory_gb": 0.01}):
        for c in generate(policy, requests, **settings):  # type: ignore[arg-type]
            assert c.tokens == alone[c.id], settings


def test_graphs_are_captured_once_for_each_bucket(tiny_policy: TinyPolicy) -> None:
    async def use(engine: NativeEngine) -> None:
        steps = engine.runner._steps  # type: ignore[attr-defined]
        few, many = (4, 1, False), (24, 1, False)
        for batch, expected in ((3, {few}), (4, {few}), (20, {few, many}), (3, {few, many})):
            before = dict(steps)
            sampling = SamplingParams(max_tokens=10)
            await asyncio.gather(*(engine.generate(Request(f"{i}", (5, 6, i), sampling, i)) for i in range(batch)))
            assert set(steps) == expected and all(steps[b] is before[b] for b in before)
            assert all(s._graph is not None for s in steps.values())

    with_engine(tiny_policy("qwen2"), use, draft_tokens=0)


def test_graphs_are_captured_again_after_somebody_has_moved_the_weights(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy("qwen2")

    async def use(engine: NativeEngine) -> None:
        found = []
        for version in range(3):
            found.append(await engine.generate(Request(f"{version}", (5, 6, 7), SamplingParams(max_tokens=10), 1)))
            steps = engine.runner._steps.values()  # type: ignore[attr-defined]
            assert steps and all(s._graph is not None for s in steps)
            for parameter in policy.model.parameters():
                parameter.data = parameter.data.clone()
            await engine.update_weights(WeightUpdate(version + 1))
        assert all(done.tokens == found[0].tokens for done in found)

    with_engine(policy, use)


def test_a_freed_cache_takes_the_graphs_and_their_memory_with_it(tiny_policy: TinyPolicy) -> None:
    async def use(engine: NativeEngine) -> None:
        for i in range(2):
            await engine.generate(Request(f"{i}", (5, 6, 7), SamplingParams(max_tokens=5), 1))
            runner = weakref.ref(engine.runner)
            await engine.pause()
            assert runner() is None, "nobody waits for the garbage collector"
            await engine.resume()

    with_engine(tiny_policy("qwen2"), use, keep_cache=False)


def test_stop_tokens_end_a_row_on_the_device(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy("qwen2")
    free = generate(policy, [Request(f"{i}", (5, 6, i), SamplingParams(max_tokens=80), i) for i in range(20)])
    stops = (3, 17, 40, 99, 120)
    asked = SamplingParams(max_tokens=80, stop_tokens=stops)
    stopped = generate(policy, [Request(f"{i}", (5, 6, i), asked, i) for i in range(20)])
    many = SamplingParams(max_tokens=80, stop_tokens=(*stops, *range(300, 320)))  # more than a row holds
    by_host = generate(policy, [Request(f"{i}", (5, 6, i), many, i) for i in range(20)])
    assert [(c.tokens, c.finish) for c in by_host] == [(c.tokens, c.finish) for c in stopped]
    for whole, cut in zip(free, stopped, strict=True):
        ends = [i for i, token in enumerate(whole.tokens) if token in stops]
        assert cut.tokens == whole.tokens[: ends[0] + 1 if ends else 80]
        assert cut.finish == ("stop" if ends else "length")


def test_weights_written_in_flight_reach_the_graphs(tiny_policy: TinyPolicy) -> None:
    """In place: the graphs stay. Moved elsewhere: they are captured again."""
    policy = tiny_policy("qwen2")
    request = Request("r", (5, 6, 7), SamplingParams(0.0, 30), 0)

    async def use(engine: NativeEngine) -> list[Completion]:
        done = [await engine.generate(request)]
        steps = dict(engine.runner._steps)  # type: ignore[attr-defined]
        with torch.no_grad():
            for p in policy.model.parameters():
                p.add_(torch.randn_like(p) * 0.1)
        await engine.update_weights(WeightUpdate(1))
        done.append(await engine.generate(request))
        assert engine.runner._steps == steps  # type: ignore[attr-defined]
        for p in policy.model.parameters():
            p.data = p.data.clone().mul_(1.1)
        await engine.update_weights(WeightUpdate(2))
        done.append(await engine.generate(request))
        return done

    done = with_engine(policy, use)
    assert len({c.tokens for c in done}) >= 2 and [c.versions[0] for c in done] == [0, 1, 2]
    assert done[2].tokens == generate(policy, [request], plain=True)[0].tokens


@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "keep"])
def test_updates_in_flight_and_suspending_leave_mixed_rows_alone(recompute: bool, tiny_policy: TinyPolicy) -> None:
    """Groups, greedy and filtered rows: the weights get new numbers, then all is suspended and continued elsewhere."""
    policy = tiny_policy("qwen2")
    requests = mixed_requests()
    whole = generate(policy, requests)

    async def interrupted(engine: NativeEngine) -> list[Completion]:
        tasks = [asyncio.create_task(engine.generate(r)) for r in requests]
        for version, tokens in enumerate((50, 150, 250), 1):
            while engine.stats().generated_tokens < tokens:
                await asyncio.sleep(0.0005)
            await engine.update_weights(WeightUpdate(version, recompute=recompute))
        while engine.stats().generated_tokens < 350:
            await asyncio.sleep(0.0005)
        await engine.suspend()
        return [await task for task in tasks]

    parts = with_engine(policy, interrupted)
    assert sum(p.finish == "suspended" for p in parts) > len(parts) // 2
    assert all(list(p.versions) == sorted(p.versions) for p in parts) and {v for p in parts for v in p.versions} > {
        0,
        3,
    }
    rest = [(i, replace(r, prior=parts[i].sampled)) for i, r in enumerate(requests) if parts[i].finish == "suspended"]
    done = list(parts)
    for (i, _), completion in zip(rest, generate(policy, [r for _, r in rest]), strict=True):
        done[i] = completion
    assert sum(a.tokens != b.tokens for a, b in zip(done, whole, strict=True)) <= 1
    assert [c.finish for c in done] == [c.finish for c in whole]


def test_the_joined_weights_train_and_save_as_before(tiny_policy: TinyPolicy, tmp_path: Path) -> None:

    from kitae.models.written_folder import export_policy

    policy = tiny_policy("qwen2")
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    generate(policy, mixed_requests())
    for name, p in policy.model.named_parameters():
        assert p.requires_grad and torch.equal(p, before[name]), name
    export_policy(policy, tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    for name, p in loaded.named_parameters():
        assert torch.equal(p, before[name].cpu()), name


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen3_moe", "gpt_oss"])
def test_8_bits_by_kernels_and_by_modules(architecture: str, tiny_policy: TinyPolicy) -> None:
    """Both read the same numbers and scales; a number on the border of two may be rounded otherwise."""
    policy, gaps = tiny_policy(architecture), []
    paths = (generate(policy, mixed_requests(), plain=plain, cache_dtype="int8") for plain in (False, True))
    for fast, plain in zip(*paths, strict=True):
        pairs = enumerate(zip(fast.tokens, plain.tokens, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), len(fast.tokens))
        gaps += [abs(a - b) for a, b in zip(fast.logprobs[:same], plain.logprobs[:same], strict=True)]
    assert sum(gaps) / len(gaps) < 1e-3


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_adapters_merged_and_beside_their_weights(architecture: str, tiny_policy: TinyPolicy) -> None:
    """Before and after an update of the adapters."""
    policy = tiny_policy(architecture, lora_rank=4)

    def change(seed: int) -> None:
        torch.manual_seed(seed)
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0, 0.05)

    async def use(engine: NativeEngine) -> list[Completion]:
        first = await asyncio.gather(*(engine.generate(r) for r in mixed_requests()))
        change(2)
        await engine.update_weights(WeightUpdate(1))
        second = [replace(r, id=f"again/{r.id}") for r in mixed_requests()]
        return [*first, *await asyncio.gather(*(engine.generate(r) for r in second))]

    found = []
    for settings, fused in (({}, True), ({"plain": True}, False)):
        change(1)

        async def checked(engine: NativeEngine, fused: bool = fused) -> list[Completion]:
            assert (getattr(engine.runner, "decoder", None) is not None) == fused
            return await use(engine)

        found.append(with_engine(policy, checked, **settings))  # type: ignore[arg-type]
    for others in found[1:]:
        same = [a.tokens == b.tokens for a, b in zip(found[0], others, strict=True)]
        assert sum(same) >= len(same) - 2, "but for draws on a border"


def test_kernels_for_a_few_that_differ_are_not_used(
    tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    policy = tiny_policy("llama")
    fused = GpuDecoder.of(policy, KVCache(policy, 0.01, 16))
    assert fused is not None and fused.small_batch_rows == 64
    right = GpuDecoder.small_batch_logits

    def wrong(self: GpuDecoder, *args: Any) -> None:
        right(self, *args)
        args[6].mul_(1.01)

    monkeypatch.setattr(GpuDecoder, "small_batch_logits", wrong)
    fused.check_small_batch(policy)
    assert fused.small_batch_rows == 0 and "differ" in caplog.text


def test_engine_config_plain_uses_no_graphs(tiny_policy: TinyPolicy) -> None:
    engine = NativeEngine(tiny_policy(), EngineConfig(memory_gb=0.01), plain=True)
    assert type(engine.runner).__name__ == "ModelRunner"
    asyncio.run(engine.close())
