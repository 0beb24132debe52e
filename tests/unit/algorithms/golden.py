"""One fixed batch, and what every preset makes of it: the loss and the gradient of each token.

    python tests/unit/algorithms/golden.py     write tests/data/golden_presets.json anew, after a change that was meant

Five groups of four: mixed, mixed with a truncated answer, all correct, all wrong, one correct. 44 loss tokens whose
log-probs under π_θ, π_old, μ, π_ref and a teacher, and values, are drawn once from a seeded generator. Methods by turns
get the same answers cut into turns.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from objective import Objective
from short_settings import algorithm_with

from kitae.algorithms.group_stages import replace_samples
from kitae.algorithms.presets import PRESETS
from kitae.algorithms.requirements import Trait
from kitae.data.packing import lay_out
from kitae.observe.meter import Meter
from kitae.trainer.forward import MicroBatch
from kitae.trainer.objectives import tokens_of
from kitae.types import FloatArray, Group, Message, Prompt, Rollout, Sample, Score, Segment

FILE = Path(__file__).parents[2] / "data" / "golden_presets.json"
MAX_TOKENS = 6
OVERRIDES: dict[str, Any] = {"pass-at-k": {"advantage": {"k": 2}}}  # of four answers, any four have the correct one
SCORES = ((1, 0, 0, 1), (0, 1, 1, 1), (1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 1, 0))
LENGTHS = ((2, 1, 3, 2), (6, 1, 2, 1), (1, 2, 2, 3), (2, 3, 1, 1), (4, 2, 3, 2))


def golden_groups(turns: bool = False) -> list[Group]:
    """turns: each answer in turns of two tokens, worth a tenth of their number, and what is left at the last."""
    random = np.random.default_rng(7)

    def answer(group: int, index: int, score: float, length: int) -> Rollout:
        logprobs = tuple(float(x) for x in random.uniform(-3, -0.1, length).astype(np.float32))
        segment = Segment("model", tuple(range(10, 10 + length)), logprobs, (4,) * length)
        finish: Any = "length" if length >= MAX_TOKENS else "stop"
        return Rollout.of(group, index, (1, 2, 3), in_turns(segment) if turns else (segment,), finish, "", Score(score))

    return [
        Group(
            group,
            Prompt(f"golden/{group}", (Message("user", "?"),), ""),
            tuple(answer(group, i, s, n) for i, (s, n) in enumerate(zip(scores, lengths, strict=True))),
            greedy=answer(group, -1, float(group % 2), 2),
        )
        for group, (scores, lengths) in enumerate(zip(SCORES, LENGTHS, strict=True))
    ]


def in_turns(s: Segment) -> tuple[Segment, ...]:
    """After each the environment says a word, which is another in every third turn."""
    cuts = [slice(start, start + 2) for start in range(0, len(s.tokens), 2)]
    return tuple(
        part
        for n, cut in enumerate(cuts)
        for part in (
            Segment("model", s.tokens[cut], s.logprobs[cut], s.versions[cut], 0.1 * n if n + 1 < len(cuts) else None),
            Segment.observed((90 + n % 3,)),
        )
    )


def golden_logprobs(sample: Sample, name: str) -> FloatArray:
    """Log-probs of one sample under one policy: π_old near μ, π_θ and π_ref near π_old, whatever a preset keeps."""
    near = sample.columns["logp_mu"] if name == "old" else golden_logprobs(sample, "old")
    spread = {"old": 0.7, "theta": 0.4, "ref": 0.5, "teacher": 0.6}[name]
    random = np.random.default_rng([sample.group, sample.index, *name.encode()])
    moved = near + random.normal(0, spread, sample.length)
    return np.where(sample.mask_T, np.minimum(moved, -0.01), 0).astype(np.float32)


def golden_values(sample: Sample) -> FloatArray:
    random = np.random.default_rng([sample.group, sample.index, 99])
    return np.where(sample.mask_T, random.uniform(0, 1, sample.length), 0).astype(np.float32)


def golden_row(preset: str, device: str = "cpu") -> dict[str, Any]:
    """Loss, gradient of each token (nested by sample), and the groups that were dropped."""
    objective = Objective(algorithm_with(preset=preset, **OVERRIDES.get(preset, {})), MAX_TOKENS)
    groups = golden_groups(Trait.TURNS in objective.config.traits("advantage"))
    dropped = {g.id: reason for g in groups if (reason := objective.drop_reason(g))}
    candidates = objective.candidates([g for g in groups if g.id not in dropped])
    annotated = [
        s.with_columns(
            logp_old=golden_logprobs(s, "old"),
            logp_ref=golden_logprobs(s, "ref"),
            logp_teacher=golden_logprobs(s, "teacher"),
            value=golden_values(s),
        )
        for c in candidates
        for s in c.samples
    ]
    samples = objective.weighted(objective.advantages(replace_samples(candidates, annotated)))
    row = lay_out(samples)
    theta = np.concatenate([golden_logprobs(s, "theta")[s.mask_T] for s in samples])
    logp_N = torch.from_numpy(theta).to(device).requires_grad_()
    # -logp stands in for the entropy, and the probability for a divergence: what counts is that the gradient has them.
    tokens = tokens_of(MicroBatch.of(row, torch.device(device)), logp_N, -logp_N, version=5)
    tokens = replace(tokens, divergence_N=logp_N.exp())
    loss = objective.loss(tokens, Meter())
    (gradient_N,) = torch.autograd.grad(loss, logp_N)
    gradient = {
        f"{s.group}/{s.index}": [round(float(x), 6) + 0.0 for x in part]
        for s, part in zip(samples, row.split(gradient_N.cpu().numpy()), strict=True)
    }
    return {
        "loss": round(loss.item(), 6),
        "norm": round(float(gradient_N.norm()), 6),
        "moved": round(float((gradient_N != 0).float().mean()), 6),
        "dropped": {str(group): reason for group, reason in dropped.items()},
        "gradient": gradient,
    }


def golden_table() -> dict[str, Any]:
    return {preset: golden_row(preset) for preset in PRESETS}


if __name__ == "__main__":
    text = json.dumps(golden_table(), indent=1)
    FILE.write_text(text + "\n")
    print(f"wrote {FILE}")
