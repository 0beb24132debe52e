"""Rollout speed: Kitae's native engine against `model.generate` of transformers, same machine, same run.

    python benchmarks/rollouts.py [--prompts 32] [--group 8] [--tokens 64] [--repeats 2] [--skip-plain] [--skip-peer]
    python benchmarks/rollouts.py --batches 1,2,4,8,16,32,64 [--tokens 64]
    make .venv-servers/vllm/.installed && python benchmarks/rollouts.py --vllm-python .venv-servers/vllm/bin/python

Same model (SmolLM2-135M in the dtype Kitae would choose), same prompts, every response exactly `tokens` long, sampled
at temperature 1 with the log-prob of each token. Prints tokens per second and the ratio; and the share of the floor:
the time of the matrix products alone at this batch, with weights packed by oneDNN through torch, measured between the
repeats. `--batches` compares groups of one sample at each batch size instead. With `--vllm-python`, vLLM's build for
CPUs samples the same, in a process of its own that is bound to all cores (`peers/vllm_rollouts.py`).
"""

import argparse
import asyncio
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kitae.engines.base import Request, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.models.config import ModelConfig
from kitae.models.load import find_model, load_policy

clock: Callable[[], float] = time.perf_counter  # `--processor-time` changes it


def make_prompts(tokenizer: object, count: int, length: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(0)
    vocabulary = len(tokenizer)  # type: ignore[arg-type]
    return [tuple(torch.randint(100, vocabulary, (length,), generator=generator).tolist()) for _ in range(count)]


def run_kitae(prompts: list[tuple[int, ...]], group: int, tokens: int, fast: bool, repeats: int) -> list[float]:
    policy = load_policy(ModelConfig())
    engine = NativeEngine(policy, EngineConfig(memory_gb=2.0, max_batch=len(prompts) * group), plain=not fast)

    async def once(round_: int) -> float:
        requests = [
            Request(f"{round_}/{p}/{i}", prompt, SamplingParams(max_tokens=tokens), seed=p * 1000 + i, share=f"{p}")
            for p, prompt in enumerate(prompts)
            for i in range(group)
        ]
        began = clock()
        done = await asyncio.gather(*(engine.generate(r) for r in requests))
        seconds = clock() - began
        assert all(len(c.tokens) == tokens for c in done)
        return len(done) * tokens / seconds

    async def everything() -> list[float]:
        await once(-1)  # warm up
        rates = [await once(r) for r in range(repeats)]
        await engine.close()
        return rates

    return asyncio.run(everything())


@torch.inference_mode()
def matmul_floor(batch: int, repeats: int = 5) -> float:
    """Tokens per second if a step were its matrix products alone, on weights packed by oneDNN."""
    policy = load_policy(ModelConfig(plain=True, device="cpu"))
    layer: Any = policy.decoder.layers[0]  # type: ignore[attr-defined]
    attn, mlp = layer.self_attn, layer.mlp
    together = [[attn.q_proj, attn.k_proj, attn.v_proj], [attn.o_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]
    shapes = [(sum(len(m.weight) for m in ms), ms[0].weight.shape[1]) for ms in together]
    # Each layer has weights of its own, as in the model: they do not all stay in the caches.
    products = [shape for _ in range(policy.layers) for shape in shapes] + [tuple(policy.head.weight.shape)]
    packed = [
        torch.ops.mkldnn._reorder_linear_weight(torch.randn(shape).to(policy.dtype), batch) for shape in products
    ]  # fmt: skip
    rows = {depth: torch.randn(batch, depth).to(policy.dtype) for _, depth in products}

    def step() -> float:
        began = clock()
        for weight, (_, depth) in zip(packed, products, strict=True):
            torch.ops.mkldnn._linear_pointwise(rows[depth], weight, None, "none", [], "")
        return clock() - began

    step()
    return batch / min(step() for _ in range(repeats))


@torch.inference_mode()
def run_generate(prompts: list[tuple[int, ...]], group: int, tokens: int, repeats: int) -> list[float]:
    policy_dtype = load_policy(ModelConfig()).dtype
    model = AutoModelForCausalLM.from_pretrained(find_model("smollm2-135m"), dtype=policy_dtype).eval()
    rows = torch.tensor([prompt for prompt in prompts for _ in range(group)])
    rates = []
    for _ in range(repeats):
        began = clock()
        out = model.generate(
            rows, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=tokens, min_new_tokens=tokens,
            return_dict_in_generate=True, output_logits=True, pad_token_id=0,
        )  # fmt: skip
        for step, logits in enumerate(out.logits):
            chosen = out.sequences[:, rows.shape[1] + step, None]
            torch.log_softmax(logits.float(), -1).gather(1, chosen)
        rates.append(rows.shape[0] * tokens / (clock() - began))
    return rates


def run_vllm(python: str, prompts: list[tuple[int, ...]], group: int, tokens: int, repeats: int) -> list[float]:
    dtype = str(load_policy(ModelConfig()).dtype).removeprefix("torch.")
    cores = sorted(os.sched_getaffinity(0))
    bound = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}"}
    with tempfile.TemporaryDirectory() as folder:
        rows, target = Path(folder) / "prompts.json", Path(folder) / "rates.json"
        rows.write_text(json.dumps(prompts))
        script = Path(__file__).parent / "peers" / "vllm_rollouts.py"
        sizes = [str(n) for n in (group, tokens, repeats)]
        done = subprocess.run(
            [python, str(script), str(find_model("smollm2-135m")), str(rows), *sizes, dtype, str(target)],
            env={**os.environ, **bound}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            print(f"vLLM ended with {done.returncode}:\n{done.stderr[-1000:]}")
            return []
        rates: list[float] = json.loads(target.read_text())
    return rates


def compare_batches(sizes: list[int], args: argparse.Namespace) -> None:
    tokenizer = load_policy(ModelConfig()).tokenizer
    print("| batch | Kitae tok/s | generate tok/s | ratio |\n|---|---|---|---|")
    for size in sizes:
        prompts = make_prompts(tokenizer, size, args.prompt_tokens)
        ours = max(run_kitae(prompts, 1, args.tokens, True, args.repeats))
        theirs = max(run_generate(prompts, 1, args.tokens, args.repeats))
        print(f"| {size} | {ours:.0f} | {theirs:.0f} | {ours / theirs:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--skip-peer", action="store_true")
    parser.add_argument("--skip-plain", action="store_true", help="Leave out the engine without compiled kernels.")
    parser.add_argument("--vllm-python", metavar="PYTHON", help="An interpreter that has vLLM's build for CPUs.")
    parser.add_argument("--batches", help="Batch sizes to compare one by one, such as 1,2,4,8.")
    parser.add_argument(
        "--processor-time", action="store_true", help="Tokens per processor second, on one thread: for a busy machine."
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.processor_time:
        global clock
        clock = time.process_time
        torch.set_num_threads(1)
    if args.batches:
        compare_batches([int(n) for n in args.batches.split(",")], args)
        return
    prompts = make_prompts(load_policy(ModelConfig()).tokenizer, args.prompts, args.prompt_tokens)
    rates = {
        "kitae": run_kitae(prompts, args.group, args.tokens, True, args.repeats),
    }
    if not args.skip_plain:
        rates["kitae, plain torch"] = run_kitae(prompts, args.group, args.tokens, False, args.repeats)
    if not args.skip_peer:
        rates["transformers generate"] = run_generate(prompts, args.group, args.tokens, args.repeats)
    if args.vllm_python:
        found = run_vllm(args.vllm_python, prompts, args.group, args.tokens, args.repeats)
        rates |= {"vLLM": found} if found else {}
    floor = max(matmul_floor(args.prompts * args.group) for _ in range(args.repeats))
    base = max(rates.get("transformers generate", [0.0])) or None
    print(f"{args.prompts} prompts × {args.group} samples × {args.tokens} tokens, {torch.get_num_threads()} threads")
    for name, values in rates.items():
        ratio = f"{max(values) / base:5.2f} ×" if base else ""
        print(f"  {name:24} {max(values):7.0f} tok/s  {ratio}  {max(values) / floor:4.0%} of the floor")
    print(f"  {'matrix products alone':24} {floor:7.0f} tok/s")
    if args.json:
        args.json.write_text(json.dumps(rates))


if __name__ == "__main__":
    main()
