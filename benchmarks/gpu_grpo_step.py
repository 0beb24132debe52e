"""Where the time of whole GRPO steps goes on one GPU that both samples and trains.

    python benchmarks/gpu_grpo_step.py [--prompts 64] [--group 8] [--tokens 512] [--steps 4] [--plot split.png]
    python benchmarks/gpu_grpo_step.py --shape 32b --lora 16 --prompts 8 --tokens 128 --budget 4096 --chunk 2048

The pipeline of a real run (engine, verifier processes, journal, learner) with a model of the shape of Qwen2.5-1.5B in
bfloat16 and random weights: prompts of 128 tokens, responses of exactly `tokens`, a verifier that finds about half of
them right, on-policy. Only loading and saving are left out. The first step builds kernels and captures graphs. Shapes
`8b` and `32b` are those of Qwen3-8B and Qwen2.5-32B. With `--lora`, adapters are trained; activations are then computed
again, and adapters stay beside their weights, because copies of the weights would not fit.

generate  from the weights' arrival in the engine to the last token
score     texts, verdicts and the journal, until the last group is in the batch
prepare   rewards, advantages and samples
passes    forward and backward of all micro-batches, with packing and metrics
update    clipping and AdamW
sync      the groups' fates in the journal, and the new version for the engine
"""

import argparse
import asyncio
import contextlib
import tempfile
from pathlib import Path
from typing import Any

import torch
from gpu_rollouts import FLOPS, huge_policy, large_policy, qwen_policy
from gpu_training import operations, shape_of

from kitae.config.recipe import parse_config
from kitae.config.root import RLConfig
from kitae.engines.native.engine import NativeEngine
from kitae.envs.environment_registry import open_world
from kitae.envs.rollouts import episodes_of
from kitae.errors import Stopped
from kitae.evaluation.suites import own_suite
from kitae.kernels.allocation import gc_frozen
from kitae.models.config import ModelConfig
from kitae.models.facts import ModelFacts
from kitae.models.fuse import fuse
from kitae.models.lora import add_lora
from kitae.models.policy import Policy
from kitae.observe import timeline
from kitae.observe.meter import Totals
from kitae.observe.observer import Silent
from kitae.observe.step_report import StepReport
from kitae.rl.loops import NoEvaluations, Pipeline
from kitae.rl.weight_sync import WeightSync
from kitae.store.checkpoints import Frontier
from kitae.store.run_folder import RunStore
from kitae.study.memory_estimate import batch_tokens, hold
from kitae.trainer import objectives
from kitae.trainer.base import Batch
from kitae.trainer.start_trainer import local_trainer, make_learner
from kitae.types import Message, Prompt, Sample
from kitae.weights.probe import probe_tolerance

PARTS = ("generate", "score", "prepare", "passes", "update", "sync")
VERIFIER = '''
def even(response, reference, context):
    """Whether the numbers of the words have an even sum."""
    return float(sum(int(word[1:]) for word in response.split()) % 2 == 0)
'''


def word_tokenizer(vocabulary: int) -> Any:
    """One word for every token: w0, w1, …"""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="w0")


class Words:
    """Prompts of 128 words, without end."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def at(self, index: int) -> Prompt:
        words = (f"w{1 + (index * 7919 + i * 104729) % (self.vocabulary - 1)}" for i in range(128))
        return Prompt(f"words/{index}", (Message("user", " ".join(words)),), "")


class Watch(Silent):
    """Notes when steps end, and ends the run after the last that is wanted."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.rows: list[dict[str, Any]] = []
        self.pipeline: Pipeline | None = None

    def step(self, report: StepReport) -> None:
        gpu = torch.cuda.is_available()
        self.rows.append({**report.row(), "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if gpu else 0.0})
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        if len(self.rows) == self.steps and self.pipeline is not None:
            self.pipeline.stop()


def make_config(folder: Path, args: argparse.Namespace) -> RLConfig:
    (folder / "even.py").write_text(VERIFIER)
    return parse_config({
        "run": {"dir": str(folder)},
        "data": {"task": "arithmetic"},  # not read: the prompts are `Words`
        "verifier": {"name": f"{folder / 'even.py'}:even", "workers": args.workers},
        "sampling": {"max_tokens": args.tokens},
        "model": {"lora_rank": args.lora, "dtype": "bfloat16"},
        "engine": {
            "memory_gb": args.cache, "max_batch": min(512, args.prompts * args.group), "prefill_tokens": 8192,
        },
        "training": {
            "steps": args.steps + 1, "prompts_per_step": args.prompts, "group_size": args.group,
            "token_budget": args.budget, "lr": 1e-6, "moments": args.moments,
            "checkpoint_activations": bool(args.lora),
        },
        "checkpoint": {"every": 1000},
        "algorithm": {"preset": "grpo"},
    })  # fmt: skip


async def run(config: RLConfig, policy: Policy, watch: Watch) -> tuple[list[dict[str, Any]], tuple[Sample, ...]]:
    """The rows of timeline.jsonl, and the samples of the last batch."""
    store = RunStore.create(config)
    trainer = local_trainer(config, policy)
    learner = make_learner(config, trainer)
    last: list[Batch] = []
    forward_backward = trainer.forward_backward

    async def kept(batch: Batch) -> Totals:
        last[:] = [batch]
        return await forward_backward(batch)

    trainer.forward_backward = kept  # type: ignore[method-assign]
    engine = NativeEngine(policy, config.engine)
    weights = WeightSync(trainer, engine, recompute=False, tolerance=probe_tolerance(policy.dtype))
    try:
        async with own_suite(config).pool() as pool:
            episodes = episodes_of(config, engine, pool, open_world(config.env), ModelFacts.of(policy))
            stream: Any = Words(policy.vocabulary)
            pipeline = Pipeline(
                config, store, stream, episodes, engine, learner, weights, watch, Frontier(0, 0), NoEvaluations()
            )
            watch.pipeline = pipeline
            with contextlib.suppress(Stopped), gc_frozen():
                await pipeline.run()
    finally:
        await engine.close()
        await trainer.close()
        store.close()
    return timeline.read(store.folder), last[0].samples


def split(rows: list[dict[str, Any]], metrics: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Seconds of each part, for each step."""

    def times(part: str, step: int, which: str) -> list[float]:
        return [r[which] for r in rows if r["part"] == part and r["step"] == step]

    found = []
    began = min(times("generate", 0, "start"))
    for row in metrics:
        step = row["step"]
        sampled = max(times("generate", step - 1, "end"))
        (train,), (trained,), (synced,) = (
            times("train", step, "start"), times("train", step, "end"), times("sync", step, "end"),
        )  # fmt: skip
        passes, update = row["train_seconds"], row["update_seconds"]
        prepare = trained - train - passes - update
        parts = (sampled - began, train - sampled, prepare, passes, update, synced - trained)
        found.append(dict(zip(PARTS, parts, strict=True)))
        began = synced
    return found


def draw(splits: list[dict[str, float]], title: str, target: Path) -> None:
    from kitae.observe.plots import load_pyplot

    pyplot = load_pyplot()
    figure, axis = pyplot.subplots(figsize=(9, 0.5 * len(splits) + 1.6), constrained_layout=True)
    colours = ("#4c78a8", "#72b7b2", "#b279a2", "#f58518", "#e45756", "#54a24b")
    left = [0.0] * len(splits)
    for part, colour in zip(PARTS, colours, strict=True):
        widths = [s[part] for s in splits]
        axis.barh(range(1, len(splits) + 1), widths, left=left, color=colour, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.set_yticks(range(1, len(splits) + 1), [f"step {i}" for i in range(1, len(splits) + 1)])
    axis.invert_yaxis()
    axis.set_xlabel("seconds; the first step builds kernels and captures graphs")
    axis.set_title(title)
    axis.legend(ncols=len(PARTS), fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.3), frameon=False)
    figure.savefig(target, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--budget", type=int, default=16384, help="Tokens of a micro-batch.")
    parser.add_argument("--cache", type=float, default=12.0, help="GB of keys and values.")
    parser.add_argument("--workers", type=int, default=8, help="Processes that verify.")
    parser.add_argument("--layers", type=int, help="Fewer: a quick trial, on a CPU too.")
    parser.add_argument("--shape", choices=("1.5b", "8b", "32b"), default="1.5b")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK")
    parser.add_argument("--moments", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--chunk", type=int, default=8192, help="Rows of logits at a time.")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    objectives.logit_chunk = lambda config, device: args.chunk
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.shape == "1.5b":
        policy = qwen_policy(device, layers=args.layers or 28)
    else:
        policy = (
            large_policy(args.layers or 36, device) if args.shape == "8b" else huge_policy(args.layers or 64, device)
        )
    if args.lora:
        adapted = add_lora(policy.model, ModelConfig(path="-", lora_rank=args.lora)).eval()
        policy = Policy(adapted, None, policy.source)
        policy.to(device)
    policy.tokenizer = word_tokenizer(policy.vocabulary)
    fuse(policy.model, policy.device, policy.dtype)
    watch = Watch(args.steps)
    with tempfile.TemporaryDirectory() as scratch:
        config = make_config(Path(scratch), args)
        rows, samples = asyncio.run(run(config, policy, watch))
    splits = split(rows, watch.rows)
    title = f"{args.prompts} prompts × {args.group} samples × {args.tokens} tokens"
    name = torch.cuda.get_device_name() if device == "cuda" else device
    print(f"{name} torch {torch.__version__}; {title}")
    print(f"{'step':>4} {'total':>7} " + " ".join(f"{part:>8}" for part in PARTS) + f" {'tok/s':>8} {'peak GiB':>9}")
    for i, (s, row) in enumerate(zip(splits, watch.rows, strict=True), 1):
        total = sum(s.values())
        print(f"{i:4} {total:7.2f} " + " ".join(f"{s[part]:8.3f}" for part in PARTS)
              + f" {row['generated_tokens'] / total:8,.0f} {row['peak_gib']:9.1f}")  # fmt: skip
    best = min(splits[1:] or splits, key=lambda s: sum(s.values()))
    tokens, work = operations(samples, policy, config.training)
    train = best["passes"] + best["update"]
    last = watch.rows[-1]
    print(f"best: sampling {last['generated_tokens'] / best['generate']:,.0f} tok/s; training {tokens / train:,.0f}"
          f" tok/s, {work / train / FLOPS:.1%} of {FLOPS / 1e12:.0f} TFLOP/s; "
          f"gap of log-probs {last['logp_gap']:.4f}")  # fmt: skip
    parts = hold(config, shape_of(policy), policy.device, policy.dtype, batch_tokens(config, 128, args.tokens))
    size = sum(parts.values()) - parts["libraries"]
    print(f"predicted peak {size / 2**30:.1f} GiB: {', '.join(f'{n} {b / 2**30:.1f}' for n, b in parts.items() if b)}")
    if args.plot:
        draw(splits, f"GRPO step, {title}, {name}", args.plot)


if __name__ == "__main__":
    main()
