"""Rollout speed of the native engine on one GPU, against what the hardware allows.

    python benchmarks/gpu_rollouts.py [--path fused] [--profile] [--repeats 2] [--mixture --layers 8] [--lora 16]
    python benchmarks/gpu_rollouts.py --family gemma2 [--memory-gb 80]

A model of the shape of Qwen2.5-1.5B in bfloat16 with random weights: speed does not depend on their values. With
`--mixture` the shape is that of Qwen3-30B-A3B: 128 experts, of which each token takes 8. With `--family` it is that of
Gemma-2-2B, Gemma-3-1B, Granite-3.3-2B, Phi-3-mini, OLMo-2-1B, SmolLM3-3B, or of gpt-oss-20b with 8 layers; `group` is
short of cache with 24 GB for some: Gemma-2 takes 30, OLMo-2 36, Phi-3 107. Sampling at temperature 1, with the log-prob
of every token. Workloads: `group`, 64 prompts of 128 tokens × 8 samples × 512 tokens;
`ragged`, the same prompts with log-normal response lengths from 16 to 2,048; `one`, a single sequence of 256 tokens.
`refill`, 400 prompts of 100 tokens × 6 samples of 16 to 1,024, more than there are slots: each answer that ends makes
room for the next, as when a file of prompts is sampled or training runs behind sampling (its floor is that of all at
once).
On request `8k`, 64 × 8 answers of 8,192 tokens, which need 120 GB of cache (`--memory-gb 60 --host-memory-gb 64`: what
has no room waits in the memory of the host), `64x8k`, one for each prompt, `32k`, 16 answers of 32,000, and `16k`, one
group of 8 with 16,000;
`prompt4096`, `prompt16384` and `prompt32768`, one prompt of that length, whose tokens are counted, and two tokens;
`long`, 16 prompts of 4,096 tokens × 8 samples × 512 tokens, and `longest`, one of 32,000 × 8 × 512: prompts that are
read once for all samples (`--apart`: for each).

The floor is the time in which one step's matrix products can run at 774 TFLOP/s or their weights be read at 4.2 TB/s,
whichever takes longer, plus the time to read keys and values, those in the window where a layer has one, and prompts
once for all samples (without a window): measured rates of an H200, see docs/performance.md. Of a mixture only experts
that some token takes are read, as many as independent, even choices give.
"""

import argparse
import asyncio
import math
import random
import sys
import time
from collections import Counter
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from kitae.engines.base import Completion, Request, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.models import attention_seam
from kitae.models.config import ModelConfig
from kitae.models.fuse import fuse
from kitae.models.lora import add_lora
from kitae.models.policy import Policy

FLOPS, BYTES = 774e12, 4.2e12  # per second


def qwen_policy(device: str = "cuda", dtype: torch.dtype = torch.bfloat16, layers: int = 28) -> Policy:
    config = Qwen2Config(
        vocab_size=151936, hidden_size=1536, num_hidden_layers=layers, num_attention_heads=12, num_key_value_heads=2,
        intermediate_size=8960, max_position_embeddings=32768, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    return _policy(config, device, dtype, "qwen2.5-1.5b shape")


def large_policy(layers: int = 36, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Policy:
    config = Qwen3Config(
        vocab_size=151936, hidden_size=4096, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, intermediate_size=12288, max_position_embeddings=32768, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    return _policy(config, device, dtype, "qwen3-8b shape")


def normed_policy(layers: int = 28, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Policy:
    config = Qwen3Config(
        vocab_size=151936, hidden_size=2048, num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, intermediate_size=6144, max_position_embeddings=32768, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    return _policy(config, device, dtype, "qwen3-1.7b shape")


def huge_policy(layers: int = 64, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Policy:
    config = Qwen2Config(
        vocab_size=152064, hidden_size=5120, num_hidden_layers=layers, num_attention_heads=40, num_key_value_heads=8,
        intermediate_size=27648, max_position_embeddings=32768, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    return _policy(config, device, dtype, "qwen2.5-32b shape")


def mixture_policy(
    layers: int = 48, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, experts: int = 128
) -> Policy:
    config = Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=4,
        head_dim=128, moe_intermediate_size=768, num_experts=experts, num_experts_per_tok=8, norm_topk_prob=True,
        max_position_embeddings=32768, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    return _policy(config, device, dtype, "qwen3-30b-a3b shape")


FAMILIES: dict[str, dict[str, Any]] = {  # by --family; what else they have is the default of transformers
    "gemma2": {
        "vocab_size": 256000, "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216, "max_position_embeddings": 8192,
        "sliding_window": 4096, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "tie_word_embeddings": True,
    },
    "gemma3": {
        "vocab_size": 262144, "hidden_size": 1152, "num_hidden_layers": 26, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 6912, "max_position_embeddings": 32768,
        "sliding_window": 512, "query_pre_attn_scalar": 256, "tie_word_embeddings": True,
    },
    "granite": {
        "vocab_size": 49159, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 8192, "max_position_embeddings": 131072,
        "embedding_multiplier": 12.0, "attention_multiplier": 0.015625, "residual_multiplier": 0.22,
        "logits_scaling": 8.0, "tie_word_embeddings": True,
    },
    "phi3": {
        "vocab_size": 32064, "hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "intermediate_size": 8192, "max_position_embeddings": 4096, "sliding_window": 2047,
        "tie_word_embeddings": False,
    },
    "olmo2": {
        "vocab_size": 100352, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16,
        "num_key_value_heads": 16, "intermediate_size": 8192, "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "smollm3": {
        "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 4, "intermediate_size": 11008, "max_position_embeddings": 65536,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        "vocab_size": 201088, "hidden_size": 2880, "num_hidden_layers": 8, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "max_position_embeddings": 131072,
        "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "tie_word_embeddings": False,
    },
}  # fmt: skip


def family_policy(
    family: str, layers: int | None = None, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> Policy:
    shape = FAMILIES[family] | ({"num_hidden_layers": layers} if layers else {})
    config = AutoConfig.for_model({"gemma3": "gemma3_text"}.get(family, family), **shape)
    return _policy(config, device, dtype, f"{family} shape")


def _policy(config: Any, device: str, dtype: torch.dtype, name: str) -> Policy:
    attention_seam.register()
    with torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention_seam.NAME)
    return Policy(model.eval(), None, name)


Workload = list[tuple[int, tuple[int, ...], int]]  # prompt number, prompt, tokens wanted


def workloads(vocabulary: int = 150000) -> dict[str, Workload]:
    rng, top = random.Random(0), min(150000, vocabulary)
    prompts = [tuple(rng.randrange(1000, top) for _ in range(128)) for _ in range(64)]
    long = tuple(rng.randrange(1000, top) for _ in range(32768))
    lengths = [min(2048, max(16, int(rng.lognormvariate(5.8, 0.9)))) for _ in range(512)]
    return {
        "group": [(p, prompt, 512) for p, prompt in enumerate(prompts) for _ in range(8)],
        "ragged": [(i // 8, prompts[i // 8], n) for i, n in enumerate(lengths)],
        "one": [(0, prompts[0], 256)],
        **{f"{n}": [(p, prompt, 256) for p, prompt in enumerate(prompts[:n])] for n in (8, 16, 64)},
        "8k": [(p, prompt, 8192) for p, prompt in enumerate(prompts) for _ in range(8)],
        "64x8k": [(p, prompt, 8192) for p, prompt in enumerate(prompts)],
        "16k": [(0, prompts[0], 16_000)] * 8,
        "32k": [(p, prompt, 32_000) for p, prompt in enumerate(prompts[:16])],
        "long": [(p, long[p : p + 4096], 512) for p in range(16) for _ in range(8)],
        "longest": [(0, long[:32000], 512)] * 8,
        **{f"prompt{n}": [(0, long[: n - 8], 2)] for n in (4096, 16384, 32768)},
        "refill": [
            (p, long[p : p + 100], min(1024, max(16, int(rng.lognormvariate(5.4, 0.6)))))
            for p in range(400)
            for _ in range(6)
        ],
    }


def floor(work: Workload, policy: Policy) -> float:
    """Seconds that the hardware needs at least."""
    config: Any = policy.base.config
    embedding = config.vocab_size * config.hidden_size
    total = sum(p.numel() for p in policy.base.parameters())
    if not config.tie_word_embeddings:
        total -= embedding  # rows of it are looked up; if it is tied, it is the head as well
    mixed = sum(p.numel() for name, p in policy.base.named_parameters() if ".experts." in name)
    experts = getattr(config, "num_experts", getattr(config, "num_local_experts", 1))
    taken = config.num_experts_per_tok / experts if mixed else 1.0
    active = total - mixed * (1 - taken)
    reaches = windows(policy)
    per_token = 2 * policy.kv_heads * policy.head_dim * 2  # of one layer
    unique = {p: len(prompt) for p, prompt, _ in work}
    pairs = sum(n * min(w, n) - min(w, n) ** 2 / 2 for n in unique.values() for w in reaches)
    attended = 4 * policy.heads * policy.head_dim * pairs
    seconds = (2 * (active - embedding) * sum(unique.values()) + attended) / FLOPS
    for step in range(1, max(n for *_, n in work)):  # the first token comes with the prompt
        going = [(p, len(prompt)) for p, prompt, n in work if n > step]
        seen = [length + step for _, length in going]
        read = total - mixed * (1 - taken) ** len(seen)
        once = sum(dict(going).values()) + step * len(going)
        looked_at = sum(
            times * (once if math.isinf(w) else sum(min(w, n) for n in seen)) for w, times in Counter(reaches).items()
        )
        seconds += max(2 * active * len(seen) / FLOPS, 2 * read / BYTES) + looked_at * per_token / BYTES
    return seconds


def windows(policy: Policy) -> list[float]:
    """Of each layer, as many tokens as its attention may reach."""
    positions = torch.arange(2, device=policy.device)
    context = attention_seam.SelfAttention(positions)
    with torch.inference_mode():
        policy.hidden(torch.zeros_like(positions), positions, context)
    return [math.inf if call.window is None else call.window for call in context.calls]


async def run(engine: NativeEngine, work: Workload, name: str, tokens: int | None = None) -> float:
    """Seconds."""
    requests = [
        Request(f"{name}/{i}", prompt, SamplingParams(max_tokens=tokens or n), seed=i, share=f"{p}")
        for i, (p, prompt, n) in enumerate(work)
    ]
    began = time.perf_counter()
    slots = asyncio.Semaphore(2 * 512 if name.startswith("refill") else len(requests))

    async def ask(request: Request) -> Completion:
        async with slots:
            return await engine.generate(request)

    done = await asyncio.gather(*map(ask, requests))
    seconds = time.perf_counter() - began
    assert all(len(c.tokens) == r.sampling.max_tokens for c, r in zip(done, requests, strict=True))
    return seconds


async def measure(
    policy: Policy, path: str, repeats: int, names: list[str], profile: bool, draft_tokens: int, **settings: Any
) -> None:
    known = workloads(policy.vocabulary)
    chosen = {name: work for name, work in known.items() if name in names}
    began = time.perf_counter()
    config = EngineConfig.model_validate({"max_batch": 512, "prefill_tokens": 8192, **settings})
    engine = NativeEngine(policy, config, plain=path == "plain", draft_tokens=draft_tokens)
    if path == "modules":
        engine.runner.decoder = None  # type: ignore[attr-defined]
    await run(engine, known["one"], "first", tokens=2)
    decoder = "modules" if getattr(engine.runner, "decoder", None) is None else "kernels"
    print(f"first answer {time.perf_counter() - began:.1f} s after the engine was asked for; {decoder} decode")
    print(f"{'workload':11} {'tokens':>8} {'cold tok/s':>11} {'tok/s':>8} {'floor':>8} {'share':>6}")
    for name, work in chosen.items():
        tokens = sum(len(prompt) if name.startswith("prompt") else n for _, prompt, n in work)
        cold = tokens / await run(engine, work, f"{name}/cold")
        best = max([cold, *[tokens / await run(engine, work, f"{name}/{i}") for i in range(repeats)]])
        stats = engine.stats()
        limit = tokens / floor(work, policy)
        print(f"{name:11} {tokens:8} {cold:11,.0f} {best:8,.0f} {limit:8,.0f} {best / limit:6.0%}", flush=True)
        if stats.preemptions:
            print(
                f"{'':11} {stats.preemptions} preemptions so far, {stats.restored} of them brought back from the host"
            )
    if profile:
        await print_profile(engine, chosen)
    await engine.close()


async def print_profile(engine: NativeEngine, chosen: dict[str, Workload]) -> None:
    from torch.profiler import ProfilerActivity

    for name, work in chosen.items():
        tokens = min(64, max(n for *_, n in work))
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profile:
            seconds = await run(engine, work, f"{name}/profile", tokens=tokens)
        print(f"{name}, {tokens} tokens each: {seconds:.3f} s; {idle(profile)}")
        rows = sorted(profile.key_averages(), key=lambda r: -r.self_device_time_total)[:22]
        for row in rows:
            total = row.self_device_time_total
            print(f"  {total / 1e3:9.2f} ms {row.count:7} × {total / row.count:8.1f} µs  {row.key[:90]}")


def idle(profile: Any) -> str:
    """How long no kernel ran between the first and the last, and how much of that in gaps that a host makes."""
    spans = sorted((e.time_range.start, e.time_range.end) for e in profile.events() if e.device_type.name == "CUDA")
    gaps, reached = [], spans[0][1]
    for start, end in spans:
        gaps.append(max(0.0, start - reached))
        reached = max(reached, end)
    long = [gap for gap in gaps if gap > 10]
    whole = reached - spans[0][0]
    return (
        f"no kernel for {sum(gaps) / 1e3:.1f} of {whole / 1e3:.1f} ms, {sum(long) / 1e3:.1f} in {len(long)} gaps"
        " above 10 µs"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--workloads", default="group,ragged,one")
    parser.add_argument(
        "--path",
        choices=("fused", "modules", "plain"),
        default="fused",
        help="fused: the default; modules: graphs of the model's own modules; plain: neither kernels nor graphs.",
    )
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--mixture", action="store_true")
    parser.add_argument("--shape", choices=("8b", "32b"), help="a larger dense model")
    parser.add_argument("--family", choices=tuple(FAMILIES), help="the shape of a model of this family")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--memory-gb", type=float, default=24.0, help="of the cache")
    parser.add_argument("--host-memory-gb", type=float, default=0.0)
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="of adapters on all layers")
    parser.add_argument("--float8", action="store_true", help="weights in 8 bits; the floor is of those in 16")
    parser.add_argument("--draft-tokens", type=int, default=0, help="all rejected here: what they cost")
    parser.add_argument("--apart", action="store_true", help="prompts are read for each of their samples")
    args = parser.parse_args()
    if args.apart:
        from kitae.engines.native.gpu_runner import CudaRunner

        CudaRunner.worth_sharing = sys.maxsize
    if args.family:
        policy = family_policy(args.family, args.layers)
    elif args.shape:
        policy = large_policy(args.layers or 36) if args.shape == "8b" else huge_policy(args.layers or 64)
    else:
        policy = mixture_policy(args.layers or 48) if args.mixture else qwen_policy(layers=args.layers or 28)
    if args.lora:
        policy = Policy(add_lora(policy.model, ModelConfig(path="-", lora_rank=args.lora)).eval(), None, policy.source)
        policy.to("cuda")
    if args.path != "plain":
        fuse(policy.model, policy.device, policy.dtype)
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    settings = {
        "memory_gb": args.memory_gb,
        "host_memory_gb": args.host_memory_gb,
        "weights_dtype": "float8" if args.float8 else "model",
    }
    asyncio.run(
        measure(policy, args.path, args.repeats, args.workloads.split(","), args.profile, args.draft_tokens, **settings)
    )


if __name__ == "__main__":
    main()
