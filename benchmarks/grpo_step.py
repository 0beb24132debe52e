"""One whole GRPO step (sample, score, train): Kitae against TRL's GRPOTrainer, same machine, same prompts, same run.

    python benchmarks/grpo_step.py --peer-python PEER_ENV/bin/python [--prompts 8] [--group 8] [--tokens 64]

benchmarks/peers/README.md says how to make the peer's environment. Every response is exactly `tokens` long and rewards
differ within every group, so both sides do all the work. Kitae computes in the dtype it would choose here (bfloat16
on this class of machine, with fp32 master weights), TRL in fp32 with its defaults. Prints seconds and the ratio, and
processor seconds of all threads, which count on a busy machine (with OMP_NUM_THREADS=1: threads that wait also count).
"""

import argparse
import asyncio
import json
import resource
import subprocess
import time
from pathlib import Path

from training import forward_backward, make_worker, prepared

from kitae.data.chat import Chat
from kitae.engines.base import Request, SamplingParams, WeightUpdate
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.models.config import ModelConfig
from kitae.models.load import find_model, load_policy
from kitae.trainer.config import TrainingConfig
from kitae.types import Group, Message, Prompt, Rollout, Score, Segment

PEERS = Path(__file__).parent / "peers"


def kitae_steps(prompts: int, group: int, tokens: int, steps: int) -> list[dict[str, float]]:
    """Seconds of sampling, training and update of each step, after one warm-up step."""
    policy = load_policy(ModelConfig())
    engine = NativeEngine(policy, EngineConfig(memory_gb=1.0))
    worker = make_worker(policy, TrainingConfig(), tokens)
    chat = Chat(policy.tokenizer)
    conversations = json.loads((PEERS / "prompts.json").read_text())[:prompts]
    encoded = [chat.encode_prompt([Message(**m) for m in messages]) for messages in conversations]

    async def sample(step: int) -> list[Group]:
        async def one(p: int, i: int) -> Rollout:
            request = Request(
                f"{step}/{p}/{i}",
                encoded[p],
                SamplingParams(max_tokens=tokens),
                seed=step * 10_000 + p * 100 + i,
                share=f"{p}",
            )
            done = await engine.generate(request)
            segment = Segment("model", done.tokens, done.logprobs, done.versions)
            return Rollout.of(p, i, encoded[p], (segment,), done.finish, "", Score(float((p + i) % 3 == 0)))

        rollouts = await asyncio.gather(*(one(p, i) for p in range(prompts) for i in range(group)))
        return [Group(p, Prompt(str(p), (), ""), tuple(rollouts[p * group : (p + 1) * group])) for p in range(prompts)]

    async def everything() -> list[dict[str, float]]:
        rows = []
        for step in range(steps + 1):
            began, processor = time.perf_counter(), time.process_time()
            groups = await sample(step)
            sampled = time.perf_counter()
            forward_backward(worker, prepared(groups, tokens))
            trained = time.perf_counter()
            worker.optim_step()
            await engine.update_weights(WeightUpdate(step + 1))
            ended = time.perf_counter()
            rows.append(
                {
                    "total": ended - began,
                    "sample": sampled - began,
                    "train": trained - sampled,
                    "update": ended - trained,
                    "processor": time.process_time() - processor,
                }
            )
        await engine.close()
        return rows[1:]

    return asyncio.run(everything())


def peer_steps(python: str, prompts: int, group: int, tokens: int, steps: int) -> dict[str, object]:
    command = [python, str(PEERS / "trl_step.py"), "--model", str(find_model("smollm2-135m"))]
    command += ["--prompts", str(prompts), "--group", str(group), "--tokens", str(tokens), "--steps", str(steps)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, object] = json.loads(output.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", help="Python of an environment with trl 1.16.0; without it only Kitae runs.")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    rows = kitae_steps(args.prompts, args.group, args.tokens, args.steps)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    best = min(rows, key=lambda r: r["total"])
    print(f"{args.prompts} prompts × {args.group} samples × {args.tokens} tokens")
    parts = ", ".join(f"{k} {v:.1f}" for k, v in best.items() if k not in ("total", "processor"))
    print(f"  kitae   {best['total']:6.1f} s a step ({parts}), peak {memory:.1f} GB")
    least = min(row["processor"] for row in rows)
    print(f"          {least:6.1f} processor seconds a step")
    if args.peer_python:
        peer = peer_steps(args.peer_python, args.prompts, args.group, args.tokens, args.steps)
        seconds = peer["seconds_per_step"]
        assert isinstance(seconds, list)
        print(f"  TRL {peer['trl']} {min(seconds):6.1f} s a step (all: {seconds}), peak {peer['peak_rss_gb']} GB")
        print(f"  ratio   {min(seconds) / best['total']:.1f} ×")
        processor = peer["cpu_seconds_per_step"]
        assert isinstance(processor, list)
        print(f"          {min(processor):.1f} processor seconds, {min(processor) / least:.1f} ×")


if __name__ == "__main__":
    main()
