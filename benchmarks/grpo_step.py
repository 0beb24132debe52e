"""One whole GRPO step (sample, score, train): Kitae against TRL's GRPOTrainer, same machine, same prompts, same run.

    python benchmarks/grpo_step.py --peer-python PEER_ENV/bin/python [--prompts 8] [--group 8] [--tokens 64]
    OMP_NUM_THREADS=1 python benchmarks/grpo_step.py --variants all --peer-python PEER_ENV/bin/python

benchmarks/peers/README.md says how to make the peer's environment. Every response is exactly `tokens` long and rewards
differ within every group, so both sides do all the work. Kitae computes in the dtype it would choose here (bfloat16
on CPUs with AMX, with fp32 master weights), TRL in fp32 with its defaults. Prints seconds and the ratio, and
processor seconds of all threads, which count on a busy machine (with OMP_NUM_THREADS=1: threads that wait also count).
Variants are settings that need less memory, each in a process of its own. GB are 10⁹ bytes.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

from training import forward_backward, make_worker, prepared

from kitae.data.chat import Chat
from kitae.engines.base import Request, SamplingParams, WeightUpdate
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.kernels.allocation import dismiss_team
from kitae.models.config import ModelConfig
from kitae.models.load import find_model, load_policy
from kitae.observe.progress import peak_memory_gb
from kitae.trainer.config import TrainingConfig
from kitae.types import Group, Message, Prompt, Rollout, Score, Segment

PEERS = Path(__file__).parent / "peers"
SMALL = {"moments": "bfloat16", "token_budget": 512}
VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "no cache beside the trainer": {"keep_cache": False},
    "and moments in 16 bits": {"keep_cache": False, "moments": "bfloat16"},
    "and rows of 512 tokens, 256 of logits": {"keep_cache": False, **SMALL},
    "rows of 256 tokens instead": {"keep_cache": False, **SMALL, "token_budget": 256},
    "rows of 512, activations again": {"keep_cache": False, **SMALL, "checkpoint_activations": True},
}


def kitae_steps(
    prompts: int, group: int, tokens: int, steps: int, training: TrainingConfig, *, keep_cache: bool
) -> list[dict[str, float]]:
    """Seconds of sampling, training and update of each step, after one warm-up step.

    As in a run with `pipeline.max_staleness = 0`, the engine stands still while the trainer works.
    """
    policy = load_policy(ModelConfig())
    engine = NativeEngine(policy, EngineConfig(memory_gb=1.0, keep_cache=keep_cache))
    worker = make_worker(policy, training, tokens)
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
            sampled, learning = time.perf_counter(), time.process_time()
            await engine.pause()
            forward_backward(worker, prepared(groups, tokens))
            trained = time.perf_counter()
            worker.optim_step()
            dismiss_team()  # as the trainer's thread does
            await engine.update_weights(WeightUpdate(step + 1))
            await engine.resume()
            ended = time.perf_counter()
            rows.append(
                {
                    "total": ended - began,
                    "sample": sampled - began,
                    "train": trained - sampled,
                    "update": ended - trained,
                    "processor": time.process_time() - processor,
                    "processor of training": time.process_time() - learning,
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
    parser.add_argument("--variants", default="plain", help=f"all, or some of: {', '.join(VARIANTS)} (separated by ;)")
    args = parser.parse_args()
    names = list(VARIANTS) if args.variants == "all" else args.variants.split(";")
    print(f"{args.prompts} prompts × {args.group} samples × {args.tokens} tokens", flush=True)
    if len(names) == 1:
        peaks = {names[0]: report(names[0], args)}
    else:
        peaks = {name: in_another_process(name) for name in names}
    if args.peer_python:
        compare(args, peaks)


Found = tuple[float, float, float]  # seconds, processor seconds, GB at the peak


def report(name: str, args: argparse.Namespace) -> Found:
    settings = dict(VARIANTS[name])
    keep_cache = bool(settings.pop("keep_cache", True))
    training = TrainingConfig.model_validate(settings)
    rows = kitae_steps(args.prompts, args.group, args.tokens, args.steps, training, keep_cache=keep_cache)
    memory = peak_memory_gb() * 2**30 / 1e9
    best = min(rows, key=lambda r: r["total"])
    parts = ", ".join(f"{k} {best[k]:.1f}" for k in ("sample", "train", "update"))
    least = min(row["processor"] for row in rows)
    print(f"  kitae   {best['total']:6.1f} s a step ({parts}), peak {memory:.2f} GB; {name}")
    learning = min(row["processor of training"] for row in rows)
    print(f"          {least:6.1f} processor seconds a step, {learning:.1f} of them in training and update", flush=True)
    return best["total"], least, memory


def in_another_process(name: str) -> Found:
    """This script once more, with this variant alone."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import grpo_step; grpo_step.child({name!r})"
    )
    given = [a for i, a in enumerate(sys.argv[1:]) if "--variants" not in (a, sys.argv[i])]
    output = subprocess.run([sys.executable, "-c", code, *given], check=True, stdout=subprocess.PIPE, text=True).stdout
    *said, last = output.strip().splitlines()
    print("\n".join(said), flush=True)
    seconds, processor, memory = json.loads(last)
    return seconds, processor, memory


def child(name: str) -> None:
    parser = argparse.ArgumentParser()
    for option, default in (("--prompts", 8), ("--group", 8), ("--tokens", 64), ("--steps", 2)):
        parser.add_argument(option, type=int, default=default)
    args, _ = parser.parse_known_args()
    print(json.dumps(report(name, args)))


def compare(args: argparse.Namespace, variants: dict[str, Found]) -> None:
    one_to_warm_up = args.steps + 1  # in which there are no moments yet
    peer = peer_steps(args.peer_python, args.prompts, args.group, args.tokens, one_to_warm_up)
    theirs, theirs_processor, peak = (peer[k] for k in ("seconds_per_step", "cpu_seconds_per_step", "peak_rss_gb"))
    assert isinstance(theirs, list) and isinstance(theirs_processor, list) and isinstance(peak, float)
    print(f"  TRL {peer['trl']} {min(theirs):6.1f} s a step (all: {theirs}), peak {peak} GB")
    print(f"          {min(theirs_processor):6.1f} processor seconds a step (all: {theirs_processor})")
    for name, (seconds, processor, memory) in variants.items():
        print(
            f"  {min(theirs) / seconds:.1f} × as fast, {min(theirs_processor) / processor:.1f} × in processor seconds, "
            f"{memory / peak:.0%} of the memory: {name}"
        )


if __name__ == "__main__":
    main()
