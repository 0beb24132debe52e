"""Rollout speed: Kitae's native engine against `model.generate` of transformers, same machine, same run.

    python benchmarks/rollouts.py [--prompts 32] [--group 8] [--tokens 64] [--repeats 2] [--skip-plain] [--skip-peer]

Same model (SmolLM2-135M in the dtype Kitae would choose), same prompts, every response exactly `tokens` long, sampled
at temperature 1 with the log-prob of each token. Prints tokens per second and the ratio.
"""

import argparse
import asyncio
import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from kitae.config import EngineConfig, ModelConfig
from kitae.engines.base import Request, SamplingParams
from kitae.engines.native.engine import NativeEngine
from kitae.models.load import find_model, load_policy


def make_prompts(tokenizer: object, count: int, length: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(0)
    vocabulary = len(tokenizer)  # type: ignore[arg-type]
    return [tuple(torch.randint(100, vocabulary, (length,), generator=generator).tolist()) for _ in range(count)]


def run_kitae(prompts: list[tuple[int, ...]], group: int, tokens: int, fast: bool, repeats: int) -> list[float]:
    policy = load_policy(ModelConfig())
    engine = NativeEngine(policy, EngineConfig(memory_gb=2.0, max_batch=len(prompts) * group, fast=fast))

    async def once(round_: int) -> float:
        requests = [
            Request(f"{round_}/{p}/{i}", prompt, SamplingParams(max_tokens=tokens), seed=p * 1000 + i, share=f"{p}")
            for p, prompt in enumerate(prompts)
            for i in range(group)
        ]
        began = time.perf_counter()
        done = await asyncio.gather(*(engine.generate(r) for r in requests))
        seconds = time.perf_counter() - began
        assert all(len(c.tokens) == tokens for c in done)
        return len(done) * tokens / seconds

    async def everything() -> list[float]:
        await once(-1)  # warm up
        rates = [await once(r) for r in range(repeats)]
        await engine.close()
        return rates

    return asyncio.run(everything())


@torch.inference_mode()
def run_generate(prompts: list[tuple[int, ...]], group: int, tokens: int, repeats: int) -> list[float]:
    policy_dtype = load_policy(ModelConfig()).dtype
    model = AutoModelForCausalLM.from_pretrained(find_model("smollm2-135m"), dtype=policy_dtype).eval()
    rows = torch.tensor([prompt for prompt in prompts for _ in range(group)])
    rates = []
    for _ in range(repeats):
        began = time.perf_counter()
        out = model.generate(
            rows, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=tokens, min_new_tokens=tokens,
            return_dict_in_generate=True, output_logits=True, pad_token_id=0,
        )  # fmt: skip
        for step, logits in enumerate(out.logits):
            chosen = out.sequences[:, rows.shape[1] + step, None]
            torch.log_softmax(logits.float(), -1).gather(1, chosen)
        rates.append(rows.shape[0] * tokens / (time.perf_counter() - began))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--skip-peer", action="store_true")
    parser.add_argument("--skip-plain", action="store_true", help="Leave out the engine without compiled kernels.")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    prompts = make_prompts(load_policy(ModelConfig()).tokenizer, args.prompts, args.prompt_tokens)
    rates = {
        "kitae": run_kitae(prompts, args.group, args.tokens, True, args.repeats),
    }
    if not args.skip_plain:
        rates["kitae, plain torch"] = run_kitae(prompts, args.group, args.tokens, False, args.repeats)
    if not args.skip_peer:
        rates["transformers generate"] = run_generate(prompts, args.group, args.tokens, args.repeats)
    base = max(rates.get("transformers generate", [0.0])) or None
    print(f"{args.prompts} prompts × {args.group} samples × {args.tokens} tokens, {torch.get_num_threads()} threads")
    for name, values in rates.items():
        ratio = f"{max(values) / base:5.2f} ×" if base else ""
        print(f"  {name:24} {max(values):7.0f} tok/s  {ratio}")
    if args.json:
        args.json.write_text(json.dumps(rates))


if __name__ == "__main__":
    main()
