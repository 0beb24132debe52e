"""What each stage of an algorithm costs beside the forward and backward pass that it serves.

    python benchmarks/stages.py [--model smollm2-135m] [--prompts 8] [--group 8] [--tokens 64]

One step of random samples through every stage, each timed apart (median of several), for the choices that compute most;
then one forward and backward pass of the model over the same samples. Prints seconds and shares.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from training import GRPO, forward_backward, make_worker, prepared

from kitae.algorithms.config import AlgorithmConfig
from kitae.algorithms.control import Control
from kitae.algorithms.group_stages import Candidate, GroupStages
from kitae.algorithms.loss import PolicyLoss
from kitae.algorithms.loss_tokens import TokenBatch
from kitae.algorithms.presets import BASE
from kitae.algorithms.stages import STAGES
from kitae.data.packing import lay_out
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.observe.meter import Meter
from kitae.trainer.config import TrainingConfig
from kitae.trainer.forward import MicroBatch
from kitae.trainer.objectives import tokens_of
from kitae.types import Group, Message, Prompt, Rollout, Score, Segment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    a = parser.parse_args()
    groups = make_groups(a.prompts, a.group, a.tokens)
    policy = load_policy(ModelConfig(path=a.model))
    worker = make_worker(policy, TrainingConfig(steps=1), a.tokens)
    samples = prepared(groups, a.tokens)
    forward_backward(worker, samples)
    model_seconds = min(_seconds(lambda: forward_backward(worker, samples)) for _ in range(3))

    print(f"\n{a.prompts} × {a.group} samples of {a.tokens} tokens; forward and backward of {a.model}: ", end="")
    print(f"{model_seconds:.2f} s, {torch.get_num_threads()} threads\n")
    print("| what | ms | share of forward and backward |")
    print("|---|---|---|")
    for name, seconds in stage_seconds(groups, a.tokens).items():
        print(f"| {name} | {seconds * 1e3:.2f} | {seconds / model_seconds:.3%} |")


def stage_seconds(groups: list[Group], max_tokens: int) -> dict[str, float]:
    """Seconds of each stage on one step."""
    found: dict[str, float] = {}
    for preset, label in (("grpo", "group z-score"), ("ppo", "GAE, whitening")):
        stages = GroupStages(GRPO if preset == "grpo" else AlgorithmConfig(preset=preset), max_tokens)
        raw = [annotated(c) for c in stages.candidates(groups)]
        if preset == "grpo":
            found["S1 + S2: shaping, filter, records for the trainer"] = _median(lambda s=stages: s.candidates(groups))
        found[f"S3: {label}"] = _median(lambda s=stages, c=raw: s.advantages(c))
        candidates = stages.advantages(raw)
    found["S7: aggregation"] = _median(lambda: stages.weighted(candidates))
    ranked = GroupStages(AlgorithmConfig(preset="clip-cov"), max_tokens)
    found["S7: aggregation, with the covariances of clip-cov"] = _median(lambda: ranked.weighted(candidates))
    tokens = as_tokens(ranked.weighted(candidates))
    settings = {**BASE, "constant_length": max_tokens}
    for key in ("ratio", "gate", "correction", "kl"):
        stage = STAGES[key]
        costs = {}
        for name in stage.choices:
            function = stage.resolve(name, settings)[name]
            argument = tokens.logp_N - tokens.logp_old_N
            inputs = {"ratio": (argument, tokens), "gate": (argument.exp(), tokens)}.get(key, (tokens,))
            costs[name] = _median(lambda f=function, i=inputs: f(*i))
        dearest = max(costs, key=lambda n: costs[n])
        found[f"{stage.number}: {key}, dearest of {len(costs)} ({dearest})"] = costs[dearest]
    config = AlgorithmConfig.model_validate({"preset": "opsm", "kl": {"coef": 0.01}, "reference": "frozen"})
    loss, coefficients = PolicyLoss(config, max_tokens), Control(config).coefficients
    found["S4 + S5 + S6 + S8 with metrics and gradient, all in one"] = _median(
        lambda: torch.autograd.grad(loss(tokens, coefficients, Meter()), tokens.logp_N)
    )
    return found


def annotated(candidate: Candidate) -> Candidate:
    """As if every policy had given what the engine did, and the critic too."""
    for name in ("logp_old", "logp_ref", "value"):
        candidate = candidate.with_column(name, candidate.column("logp_mu"))
    return candidate


def make_groups(prompts: int, size: int, tokens: int) -> list[Group]:
    random = np.random.default_rng(0)

    def words(count: int) -> tuple[int, ...]:
        return tuple(int(t) for t in random.integers(10, 200, count))

    def rollout(group: int, index: int, prompt: tuple[int, ...]) -> Rollout:
        segment = Segment(
            "model",
            words(tokens),
            tuple(float(x) for x in random.uniform(-3, -0.1, tokens)),
            (0,) * tokens,
        )
        return Rollout.of(group, index, prompt, (segment,), "stop", "", Score(float(random.integers(0, 2))))

    return [
        Group(g, Prompt(str(g), (Message("user", "?"),), ""), tuple(rollout(g, i, prompt) for i in range(size)))
        for g, prompt in enumerate(words(40) for _ in range(prompts))
    ]


def as_tokens(samples: Any) -> TokenBatch:
    micro = MicroBatch.of(lay_out(samples), torch.device("cpu"))
    old_N = micro.columns["logp_old"]
    moved_N = torch.randn(len(old_N), generator=torch.Generator().manual_seed(0)) * 0.3
    return tokens_of(micro, (old_N + moved_N).requires_grad_(), moved_N.abs(), version=1)


def _median(work: Callable[[], Any], repeats: int = 15) -> float:
    work()
    return statistics.median(_seconds(work) for _ in range(repeats))


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
