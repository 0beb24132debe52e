"""Decoding of families of models on a CPU, each beside its own matrix products, in one run.

    python benchmarks/cpu_families.py [--families llama,gemma2,mixtral] [--sequences 64] [--tokens 32] [--modules]
    python benchmarks/cpu_families.py --wide --sequences 1,16,64 [--modules] [--dtype bfloat16]

Every family has the sizes of SmolLM2-135M (width 576, MLP 1,536, 9 query and 3 key heads of 64, vocabulary 49,152) and
eight layers with random weights; mixtures have 16 experts of width 384, of which a token takes four. `--wide`: one
layer of the shape of Qwen3-30B-A3B (width 2,048, 128 experts of 768, of which a token takes eight) and a small
vocabulary. The floor is the time of the matrix products of a step, on weights packed by oneDNN through torch, of
mixtures with as many rows for each expert as there are on average. `--modules`: also the engine on the models' own
modules. Everything by processor time of one thread (`--threads 2`: by the clock), so that a busy machine matters less.
"""

import argparse
import asyncio
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kitae.engines.base import Request, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.native.cpu_runner import PackedDecoder
from kitae.engines.native.decoder_layers import inner_of, router_of
from kitae.engines.native.engine import NativeEngine
from kitae.models import attention_seam
from kitae.models.fuse import fuse
from kitae.models.policy import Policy

SIZES: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 2048,
    "tie_word_embeddings": True, "query_pre_attn_scalar": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {
    "num_experts": 16, "num_local_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 384,
}  # fmt: skip
WIDE: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 2048, "num_hidden_layers": 1, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}  # fmt: skip
MIXTURES = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss")
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "granite", "phi3", "olmo2", "smollm3", *MIXTURES)

clock: Callable[[], float] = time.process_time


def policy_of(family: str, sizes: dict[str, Any], dtype: torch.dtype) -> Policy:
    wanted = sizes | ({} if family not in MIXTURES else EXPERTS | sizes)
    if family in ("mixtral", "olmoe", "gpt_oss"):
        wanted["intermediate_size"] = wanted["moe_intermediate_size"]
    known = AutoConfig.for_model(family)
    config = AutoConfig.for_model(family, **{name: value for name, value in wanted.items() if hasattr(known, name)})
    attention_seam.register()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention_seam.NAME)
    policy = Policy(model.eval(), None, family)
    fuse(policy.model, policy.device, policy.dtype)
    return policy


def rate(policy: Policy, sequences: int, tokens: int, repeats: int) -> float:
    """Tokens a second, the best of several runs. Prompts of eight tokens are in the time."""
    engine = NativeEngine(policy, EngineConfig(memory_gb=0.5, max_batch=sequences))
    rows = torch.randint(3, policy.vocabulary, (sequences, 8), generator=torch.Generator().manual_seed(0)).tolist()

    async def once(number: int) -> float:
        sampling = SamplingParams(max_tokens=tokens)
        asked = [Request(f"{number}/{i}", tuple(row), sampling, seed=i, share=f"{i}") for i, row in enumerate(rows)]
        began = clock()
        done = await asyncio.gather(*map(engine.generate, asked))
        return sum(len(answer.tokens) for answer in done) / (clock() - began)

    async def several() -> float:
        await once(-1)
        best = max([await once(number) for number in range(repeats)])
        await engine.close()
        return best

    return asyncio.run(several())


def products(policy: Policy, sequences: int) -> list[tuple[int, int, int]]:
    """Rows, columns and depth of each product of a step."""
    decoder: Any = policy.decoder
    hidden, heads = policy.head.weight.shape[1], policy.heads * policy.head_dim
    found = [(sequences, *policy.head.weight.shape)]
    for layer in decoder.layers:
        inner, copies, rows = inner_of(layer.mlp), 1, sequences
        if hasattr(layer.mlp, "experts"):
            router = router_of(layer.mlp)
            copies = min(len(router.weight), sequences * router.top_k)
            rows = -(-sequences * router.top_k // copies)
            found.append((sequences, len(router.weight), hidden))
        found += [(sequences, heads + 2 * policy.kv_heads * policy.head_dim, hidden), (sequences, hidden, heads)]
        found += [(rows, 2 * inner, hidden), (rows, hidden, inner)] * copies
    return found


@torch.inference_mode()
def floor(policy: Policy, sequences: int, repeats: int = 5) -> float:
    """Tokens a second if a step were its products alone."""
    wanted = products(policy, sequences)
    packed = [torch.ops.mkldnn._reorder_linear_weight(torch.randn(n, k, dtype=policy.dtype), m) for m, n, k in wanted]
    rows = {(m, k): torch.randn(m, k, dtype=policy.dtype) for m, _, k in wanted}

    def step() -> float:
        began = clock()
        for weight, (m, _, k) in zip(packed, wanted, strict=True):
            torch.ops.mkldnn._linear_pointwise(rows[m, k], weight, None, "none", [], "")
        return clock() - began

    step()
    return sequences / min(step() for _ in range(repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--sequences", default="64")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--modules", action="store_true")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    global clock
    clock = time.process_time if args.threads == 1 else time.perf_counter
    torch.set_num_threads(args.threads)
    families = ["qwen3_moe"] if args.wide else args.families.split(",")
    print("| family | sequences | Kitae tok/s | products alone | share | on the modules |\n|---|---|---|---|---|---|")
    for family in families:
        policy = policy_of(family, WIDE if args.wide else SIZES, getattr(torch, args.dtype))
        for sequences in map(int, args.sequences.split(",")):
            limits = [floor(policy, sequences)]
            ours, plain = rate(policy, sequences, args.tokens, args.repeats), 0.0
            limits.append(floor(policy, sequences))
            if args.modules:
                with patch.object(PackedDecoder, "of", lambda *_: None):
                    plain = rate(policy, sequences, args.tokens, args.repeats)
            share = ours / max(limits)
            modules = f"{plain:.0f}" if plain else ""
            print(f"| {family} | {sequences} | {ours:.0f} | {max(limits):.0f} | {share:.0%} | {modules} |", flush=True)


if __name__ == "__main__":
    main()
