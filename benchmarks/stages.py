"""What each stage of an algorithm costs beside the forward and backward pass that it serves.

    python benchmarks/stages.py [--model smollm2-135m] [--prompts 8] [--group 8] [--tokens 64]

One step of random samples through every stage, each timed apart (median of several), for the choices that compute most;
then one forward and backward pass of the model over the same samples. Prints seconds and shares.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kitae.algorithms.config import AlgorithmConfig
from kitae.algorithms.objective import Objective
from kitae.algorithms.presets import BASE
from kitae.algorithms.stages import STAGES
from kitae.algorithms.tokens import TokenBatch
from kitae.data.packing import collate
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.observe.meter import Meter
from kitae.trainer.config import TrainingConfig
from kitae.trainer.trainer import Trainer
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
    trainer = Trainer(policy, TrainingConfig(steps=1), temperature=1.0)
    objective = Objective(AlgorithmConfig(preset="grpo"), a.tokens)
    batch = objective.batch(objective.advantages(objective.samples(groups)))
    trainer.forward_backward(batch, objective)
    model_seconds = min(_seconds(lambda: trainer.forward_backward(batch, objective)) for _ in range(3))

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
        objective = Objective(AlgorithmConfig(preset=preset), max_tokens)
        raw = [
            replace(s, logp_old_T=s.logp_mu_T, logp_ref_T=s.logp_mu_T, value_T=s.logp_mu_T)
            for s in objective.samples(groups)
        ]
        if preset == "grpo":
            found["S1 + S2: shaping, filter, records for the trainer"] = _median(lambda o=objective: o.samples(groups))
        found[f"S3: {label}"] = _median(lambda o=objective, s=raw: o.advantages(s))
        samples = objective.advantages(raw)
    found["S7: aggregation"] = _median(lambda: objective.batch(samples))
    ranked = Objective(AlgorithmConfig(preset="clip-cov"), max_tokens)
    found["S7: aggregation, with the covariances of clip-cov"] = _median(lambda: ranked.batch(samples))
    tokens = as_tokens(ranked.batch(samples).samples)
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
    whole = Objective(AlgorithmConfig(preset="opsm", kl_coef=0.01, reference="frozen"), max_tokens)
    found["S4 + S5 + S6 + S8 with metrics and gradient, all in one"] = _median(
        lambda: torch.autograd.grad(whole.loss(tokens, Meter()), tokens.logp_N)
    )
    return found


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
    micro = collate(samples, torch.device("cpu"))
    assert micro.logp_old_N is not None
    moved = torch.randn(len(micro.logp_old_N), generator=torch.Generator().manual_seed(0)) * 0.3
    return TokenBatch(
        logp_N=(micro.logp_old_N + moved).requires_grad_(),
        entropy_N=moved.abs(),
        logp_old_N=micro.logp_old_N,
        logp_mu_N=micro.logp_mu_N,
        advantage_N=micro.advantage_N,
        weight_N=micro.weight_N,
        sample_N=micro.sample_N,
        sequences=len(micro.samples),
        logp_ref_N=micro.logp_ref_N,
        lag_N=1 - micro.version_N,
        score_N=micro.score_N,
        cov_rank_N=micro.cov_rank_N,
    )


def _median(work: Callable[[], Any], repeats: int = 15) -> float:
    work()
    return statistics.median(_seconds(work) for _ in range(repeats))


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
