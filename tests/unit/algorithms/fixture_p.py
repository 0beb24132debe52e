"""Worked examples, and the way from scores to a loss that the trainer goes too: Group → Sample → Row → tokens.

Fixture P: two responses to one prompt, with advantages +1 and -1, every token at π_old = 0.2. The scores 1 and -1 give
those advantages under group-centred.
"""

import json
import math
from collections.abc import Callable, ItemsView, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from objective import Objective
from short_settings import algorithm_of
from torch import Tensor

from kitae.algorithms.group_stages import Candidate
from kitae.algorithms.loss_tokens import TokenBatch
from kitae.data.packing import lay_out
from kitae.observe.meter import Meter
from kitae.trainer.forward import MicroBatch
from kitae.trainer.objectives import tokens_of
from kitae.types import FinishReason, FloatArray, Group, Message, Prompt, Rollout, Sample, Score, Segment

Test = TypeVar("Test", bound=Callable[..., None])


# The worked examples, and which test asserts which of them.


class Entry(dict[str, Any]):
    """A worked example that remembers which of its numbers were read."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__({key: Entry(v) if isinstance(v, dict) else v for key, v in values.items()})
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        self.read.update(self)
        return super().items()

    def forget(self) -> None:
        self.read.clear()
        for value in self.values():
            if isinstance(value, Entry):
                value.forget()

    def unread(self) -> list[str]:
        found = [key for key in self if key not in self.read]
        for key in self.read:
            if isinstance(value := self.get(key), Entry):
                found += [f"{key}.{name}" for name in value.unread()]
        return found


EXAMPLES = Entry(json.loads((Path(__file__).parents[2] / "data" / "algorithm_examples.json").read_text()))
COVERED: dict[str, str] = {}
"""Which test asserts a worked example."""


def covers(*names: str) -> Callable[[Test], Test]:
    """The test asserts these worked examples: of each that it looks at, it must read every number."""

    def mark(test: Test) -> Test:
        COVERED.update(dict.fromkeys(names, test.__name__))

        @wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            EXAMPLES.forget()
            test(*args, **kwargs)
            used = [name for name in names if name in EXAMPLES.read]
            assert used, f"{test.__name__} looks at none of {names}"
            skipped = [x for x in EXAMPLES.unread() if x.split(".")[0] in used or x in used]
            assert not skipped, f"{test.__name__} does not assert {skipped}"

        return run  # type: ignore[return-value]

    return mark


# From scores to samples.

P: dict[str, Any] = EXAMPLES["fixtureP"]
RATIOS_P: list[list[float]] = P["ratio"]
MISMATCH_P: list[list[float]] = P["pi_old_over_mu"]
LOGP_OLD = math.log(P["p_old"])
SIGNS_P = [1.0, 1.0, -1.0, -1.0, -1.0, -1.0]

PLAIN: dict[str, Any] = {"advantage": "group-centred", "correction": "none", "aggregation": "token-mean"}
"""PPO's clip at .2 without a correction; what a test is about goes on top."""
TIS: dict[str, Any] = {"correction": "tis", "correction_cap": 2.0}
AGGREGATIONS: dict[str, dict[str, Any]] = {
    "token_mean": {"aggregation": "token-mean"},
    "seq_mean_token_mean": {"aggregation": "seq-mean-token-mean"},
    "seq_mean_token_sum": {"aggregation": "seq-mean-token-sum"},
    "const_L8": {"aggregation": "constant-length", "aggregation_length": 8},
}
"""The keys of the worked examples, and how to get there."""


def make_objective(max_tokens: Any = 8, **choices: Any) -> Objective:
    return Objective(algorithm_of(choices), max_tokens)


def make_rollout(
    score: float | None,
    logp_mu: Sequence[float] = (-1.0,),
    *,
    group: int = 0,
    index: int = 0,
    prompt: Sequence[int] = (1, 2, 3),
    finish: FinishReason = "stop",
) -> Rollout:
    """One response of as many tokens as there are log-probs; score None is a verifier that failed."""
    n = len(logp_mu)
    segment = Segment("model", tuple(range(10, 10 + n)), tuple(logp_mu), (0,) * n)
    verdict = Score.error("no verdict") if score is None else Score(score)
    return Rollout.of(group, index, tuple(prompt), (segment,), finish, "", verdict)


def make_group(
    scores: Sequence[float | None],
    *,
    group: int = 0,
    lengths: Sequence[int] | None = None,
    truncated: Sequence[int] = (),
    greedy: Rollout | None = None,
) -> Group:
    """Responses with these scores; `truncated` are the indices of those that were cut off."""
    sizes = lengths or [1] * len(scores)
    rollouts = [
        make_rollout(s, [-1.0] * n, group=group, index=i, finish="length" if i in truncated else "stop")
        for i, (s, n) in enumerate(zip(scores, sizes, strict=True))
    ]
    return as_group(rollouts, group, greedy)


def as_group(rollouts: Sequence[Rollout], group: int = 0, greedy: Rollout | None = None) -> Group:
    return Group(group, Prompt(f"p/{group}", (Message("user", "?"),), "x"), tuple(rollouts), greedy)


def group_p(scores: Sequence[float] = (1.0, -1.0)) -> Group:
    rollouts = [
        make_rollout(score, [LOGP_OLD - math.log(w) for w in row], index=i)
        for i, (score, row) in enumerate(zip(scores, MISMATCH_P, strict=True))
    ]
    return as_group(rollouts)


def with_numbers(candidates: Sequence[Candidate], **rows: Sequence[Sequence[float]]) -> list[Candidate]:
    """Candidates that carry these numbers at their loss tokens: `logp_old=[[…], […]]`, `value=…`."""
    made = list(candidates)
    for name, values in rows.items():
        made = [c.with_column(name, f32(values[i])) for i, c in enumerate(made)]
    return made


def with_kl(candidates: Sequence[Candidate], d: Sequence[Sequence[float]]) -> list[Candidate]:
    """Candidates whose log π_old − log π_ref is d."""
    return with_numbers(
        candidates, logp_old=[[-1.0] * len(row) for row in d], logp_ref=[[-1 - x for x in r] for r in d]
    )


def advantages(objective: Objective, *groups: Group) -> list[list[float]]:
    """The advantages of the loss tokens of every sample that is trained on."""
    return loss_values(objective.advantages(objective.candidates(groups)))


def loss_values(candidates: Sequence[Candidate], name: str = "advantage") -> list[list[float]]:
    for s in (s for c in candidates for s in c.samples):
        assert (s.columns[name][~s.mask_T] == 0).all(), f"{name} is not 0 outside of the loss"
    return [c.column(name).tolist() for c in candidates]


def of_samples(rows: Sequence[Sequence[float]]) -> list[float]:
    """One number per sample, where it is the same at all tokens."""
    assert all(len(set(row)) == 1 for row in rows), "one advantage for all tokens of a response"
    return [row[0] for row in rows]


def trainable(objective: Objective, *groups: Group) -> tuple[Sample, ...]:
    """S1 to S3 and S7, as for one optimizer step on these groups."""
    return objective.weighted(objective.advantages(objective.candidates(groups)))


# From samples to a loss.


def as_tokens(
    samples: Sequence[Sample],
    ratios: Sequence[Sequence[float]],
    logp_old: float = LOGP_OLD,
    d_ref: Sequence[float] | None = None,
) -> TokenBatch:
    """The loss tokens of a batch, laid out by the packer, with log-probs that give these ratios to π_old.

    d_ref: log π_θ − log π_ref of each token.
    """
    with_old = [s.with_columns(logp_old=s.spread(np.float32(logp_old))) for s in samples]
    micro = MicroBatch.of(lay_out(with_old), torch.device("cpu"))
    logp_N = torch.tensor([logp_old + math.log(r) for row in ratios for r in row]).requires_grad_()
    return replace(
        tokens_of(micro, logp_N, torch.zeros_like(logp_N), version=1),
        logp_ref_N=None if d_ref is None else logp_N.detach() - torch.tensor(d_ref),
        lag_N=torch.ones(len(logp_N), dtype=torch.int64),
        divergence_N=logp_N.sigmoid(),  # it stands in for one: it is finite, and has a gradient
    )


def bare_tokens(logp: Tensor, advantage: Sequence[float], **more: Any) -> TokenBatch:
    """Tokens of one sequence, on-policy in everything that is not given."""
    still = logp.detach()
    values = {
        "logp_N": logp,
        "entropy_N": torch.zeros_like(still),
        "logp_old_N": still,
        "logp_mu_N": still,
        "advantage_N": torch.tensor(advantage, dtype=still.dtype),
        "weight_N": torch.ones_like(still),
        "sample_N": torch.zeros(len(still), dtype=torch.int64),
        "sequences": 1,
        "lag_N": torch.ones(len(still), dtype=torch.int64),
        "score_N": torch.zeros_like(still),
        "cov_rank_N": torch.ones_like(still),
        "logp_teacher_N": still,
        "divergence_N": logp.sigmoid(),
    }
    return TokenBatch(**{**values, **more})


def tokens_p(objective: Objective, scores: Sequence[float] = (1.0, -1.0)) -> TokenBatch:
    return as_tokens(trainable(objective, group_p(scores)), RATIOS_P)


def some_sequences(tokens: TokenBatch, chosen: Sequence[int]) -> TokenBatch:
    """Some of the sequences as a micro-batch of their own, in this order; gradients still reach the whole."""
    rows = torch.cat([torch.nonzero(tokens.sample_N == i)[:, 0] for i in chosen])
    ids = torch.cat([torch.full((int((tokens.sample_N == i).sum()),), at) for at, i in enumerate(chosen)])
    picked = {
        name: None if (values := getattr(tokens, name)) is None else values[rows]
        for name in (
            "logp_N", "entropy_N", "logp_old_N", "logp_mu_N", "advantage_N", "weight_N", "logp_ref_N", "lag_N",
            "score_N", "cov_rank_N", "logp_teacher_N", "divergence_N",
        )
    }  # fmt: skip
    return TokenBatch(**picked, sample_N=ids, sequences=len(chosen))  # type: ignore[arg-type]


def loss_of(objective: Objective, tokens: TokenBatch) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, d loss / d logp and metrics."""
    meter = Meter()
    loss = objective.loss(tokens, meter)
    (gradient_N,) = torch.autograd.grad(loss, tokens.logp_N, retain_graph=True)
    return loss.item(), gradient_N, meter.totals().numbers()


def token_losses(objective: Objective, tokens: TokenBatch) -> list[float]:
    """The loss of each token before aggregation: all the weight on it alone."""
    each = torch.eye(len(tokens.logp_N))
    return [objective.loss(replace(tokens, weight_N=one_N), Meter()).item() for one_N in each]


def unreduced_gradient(objective: Objective, tokens: TokenBatch) -> list[float]:
    """d Σ ℓ_t / d logp: the gradient before aggregation."""
    loss = objective.loss(replace(tokens, weight_N=torch.ones_like(tokens.weight_N)), Meter())
    (gradient_N,) = torch.autograd.grad(loss, tokens.logp_N, retain_graph=True)
    return gradient_N.tolist()


def flat(nested: Sequence[Sequence[float]]) -> list[float]:
    return [x for row in nested for x in row]


def f32(values: object) -> FloatArray:
    return np.array(values, dtype=np.float32)
