"""Laws that hold for any batch.

 1  on-policy, every method is the plain policy gradient
 2  micro-batches, packing, order and ranks leave the gradient as it is
 3  group baselines: invariant to shift and scale, sum to zero
 4  order of samples and groups permutes results only
 5  GSPO and GSPO-token have one gradient
 6  clipped tokens have exactly no gradient, CISPO's always have one
 7  weights, anchors and advantages carry no gradient
 8  laws of the KL estimators
 9  groups without variance only change the denominator
10  GAE without values is the return
11  truncated importance sampling without a cap is decoupled PPO
12  replayed native routing is the identity: see tests/unit/models/test_routing.py
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import torch
from fixture_p import (
    PLAIN,
    as_group,
    as_tokens,
    bare_tokens,
    f32,
    loss_of,
    make_group,
    make_objective,
    make_rollout,
    some_sequences,
    trainable,
    with_numbers,
)
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from objective import Objective, as_candidates
from short_settings import algorithm_of
from torch import Tensor
from warm_starts import context

from kitae.algorithms.advantages import (
    GroupRewards,
    SequenceRewards,
    gae,
    group_centred,
    group_zscore,
    leave_one_out,
    returns,
)
from kitae.algorithms.config import AlgorithmConfig, needs_group
from kitae.algorithms.control import Coefficients
from kitae.algorithms.corrections import CORRECTIONS
from kitae.algorithms.gates import clip, geometric_clip, mask, weight_clip
from kitae.algorithms.group_stages import Candidate
from kitae.algorithms.loss import PolicyLoss
from kitae.algorithms.loss_tokens import TokenBatch
from kitae.algorithms.presets import PRESETS
from kitae.algorithms.ratios import ANCHORS
from kitae.algorithms.regularisers import REGULARISERS
from kitae.algorithms.stages import keyword_settings
from kitae.models.policy import Policy
from kitae.observe.meter import Meter
from kitae.trainer.base import Column, Conditions
from kitae.trainer.build_worker import reinforced
from kitae.trainer.collective_ops import Alone
from kitae.trainer.config import TrainingConfig
from kitae.trainer.forward import pack_rows
from kitae.trainer.local_trainer import LocalTrainer
from kitae.trainer.objectives import PolicyGradient
from kitae.trainer.trainable_model import TrainableModel
from kitae.types import Group, Sample

fast = settings(deadline=None, max_examples=40)
signed = st.floats(0.05, 4).flatmap(lambda a: st.sampled_from([a, -a]))
aggregations = st.sampled_from(
    [
        {"aggregation": "token-mean"},
        {"aggregation": "seq-mean-token-mean"},
        {"aggregation": "seq-mean-token-sum"},
        {"aggregation": "constant-length", "aggregation_length": 7},
        {"aggregation": "prompt-mean"},
        {"aggregation": "token-sum"},
    ]
)
# Scores on a grid of 1/8: equal or clearly different, never so near that a tolerance decides.
scores = st.lists(st.integers(-16, 16).map(lambda i: i / 8), min_size=2, max_size=10)


def group_of(rewards: Sequence[float]) -> GroupRewards:
    return GroupRewards(f32(rewards), f32(rewards), np.arange(1, len(rewards) + 1))


def zscore(rewards: Sequence[float]) -> Any:
    return group_zscore(group_of(rewards), ddof=1, epsilon=1e-6)


# 1


@pytest.mark.thorough(keep=8)
@settings(deadline=None, max_examples=8)
@given(rows=st.lists(st.tuples(signed, st.integers(1, 5)), min_size=1, max_size=5), aggregation=aggregations)
@pytest.mark.parametrize(
    "preset", [name for name in PRESETS if name != "gkd"]
)  # which has the gradient of a divergence
def test_01_on_policy_every_algorithm_is_the_plain_policy_gradient(
    preset: str, rows: list[tuple[float, int]], aggregation: dict[str, Any]
) -> None:
    """r = w = 1, π = π_ref: d loss / d logp is −A times the weight of the token, whatever the gate."""
    objective = make_objective(preset=preset, **aggregation)
    samples = objective.candidates([make_group([1.0] * len(rows), lengths=[n for _, n in rows])])
    given_ = with_numbers(samples, advantage=[[a] * n for a, n in rows])
    ones = [[1.0] * n for _, n in rows]
    d_ref = [0.0] * sum(n for _, n in rows) if objective.wants_reference else None
    tokens = as_tokens(objective.weighted(given_), ones, logp_old=-1.0, d_ref=d_ref)
    _, gradient, metrics = loss_of(objective, tokens)
    torch.testing.assert_close(gradient, -tokens.advantage_N * tokens.weight_N, rtol=1e-5, atol=1e-7)
    assert gradient.abs().min() > 0
    assert metrics["ratio_gated"] == pytest.approx(1, abs=1e-5)
    assert (metrics["clip_low"], metrics["clip_high"], metrics["clip_dual"]) == (0, 0, 0)


# 2

EVERYTHING: list[dict[str, Any]] = [
    {"preset": "grpo", "entropy_coef": 0.01},
    {"preset": "dapo", "dual_clip": 3.0, "aggregation": "prompt-mean"},
    {"preset": "gspo"},
    {"preset": "gspo-token"},
    {"preset": "gmpo"},
    {"preset": "cispo", "correction": "geometric+tis", "geometric_low": 0.5, "geometric_high": 2.0},
    {"preset": "sapo", "aggregation": "constant-length", "aggregation_length": 40},
    {"preset": "minirl"},
    {"preset": "stale-asymmetric"},
    {"preset": "opsm", "kl_coef": 0.1, "kl": "k3-ratio", "reference": "frozen"},
    {"preset": "sequence-mask", "kl_coef": 0.1, "kl": "k2", "reference": "frozen"},
    {"preset": "grpo", "anchor": "interpolated"},
    {"preset": "clip-cov", "cov_share": 0.3},
    {"preset": "kl-cov", "cov_share": 0.3},
    {"preset": "grpo", "correction": "geometric-tis+veto+k3-mask", "veto_low": 0.4, "veto_high": 2.5},
    {"preset": "grpo", "correction": "tis+high-entropy", "entropy_share": 0.3, "correction_floor": 0.8},
    {"preset": "grpo", "aggregation": "token-sum", "sft_coef": 0.1, "sft_correct_above": -1.0},
]
"""Between them: every level of ratio, gates, corrections of tokens and of sequences, KL, entropy, all aggregations."""


def make_samples(shapes: Sequence[tuple[int, int, int]], gaps: bool = False) -> list[Sample]:
    """(group, prompt length, response length) each; `gaps` puts an environment's tokens into the responses."""
    rng = np.random.default_rng(0)
    prompts: dict[tuple[int, int], Any] = {}
    samples = []
    for index, (group, prompt, response) in enumerate(shapes):
        start = prompts.setdefault((group, prompt), rng.integers(3, 250, prompt))
        tokens = np.concatenate([start, rng.integers(3, 250, response)])
        mask_T = np.arange(len(tokens)) >= prompt
        if gaps and response > 3:
            mask_T[prompt + 1 : prompt + 3] = False
        blank = np.zeros(len(tokens), dtype=np.float32)
        versions = np.where(mask_T, rng.integers(0, 3, len(tokens)), 0).astype(np.float32)
        advantage = np.where(mask_T, rng.normal(), 0).astype(np.float32)
        columns = {"version": versions, "advantage": advantage, "score": blank}
        samples.append(Sample(group, index, tokens, prompt, mask_T, blank, columns))
    return samples


def off_policy(policy: Policy, samples: Sequence[Sample], seed: int = 0) -> list[Sample]:
    """Log-probs of μ, π_old and π_ref that are near to those of the policy: some tokens are clipped, most are not."""
    rng = np.random.default_rng(seed)
    found = []
    worker = reinforced(policy, TrainingConfig(), AlgorithmConfig(), max_tokens=64, temperature=0.8)
    for s in asyncio.run(LocalTrainer(worker).annotate(samples, [Column.OLD])):
        logp_T = s.columns["logp_old"]
        near = {
            name: np.where(s.mask_T, logp_T + rng.normal(0, spread, s.length), 0).astype(np.float32)
            for name, spread in (("logp_mu", 0.3), ("logp_old", 0.15), ("logp_ref", 0.5))
        }
        found.append(s.with_columns(**near))
    return found


def assert_same(a: Tensor, b: Tensor, tolerance: float = 2e-6) -> None:
    """Equal up to the rounding of fp32, relative to the largest gradient of all."""
    assert b.abs().max() > 1e-4, "nothing to compare"
    assert ((a - b).abs().max() / b.abs().max()).item() < tolerance


@pytest.fixture(scope="module")
def policy(tiny_folder: Callable[[str], Path]) -> Policy:
    return ranks.load(str(tiny_folder("llama")))


@settings(deadline=None, max_examples=24, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_02_the_cut_into_micro_batches_and_ranks_changes_nothing(policy: Policy, data: st.DataObject) -> None:
    """On a model: budget of a micro-batch, order, prompt sharing, chunks of logits, number of ranks."""
    shapes = data.draw(
        st.lists(st.tuples(st.integers(0, 2), st.sampled_from([2, 9]), st.integers(1, 12)), min_size=2, max_size=8)
    )
    choices = data.draw(st.sampled_from(EVERYTHING))
    samples = off_policy(policy, make_samples(shapes, gaps=data.draw(st.booleans())))
    objective = Objective(algorithm_of(choices), 64)
    weighted = list(objective.weighted(as_candidates(samples)))
    whole, loss = ranks.gradient(policy, weighted, choices, token_budget=10_000)
    assume(whole.abs().max() > 1e-3)  # all advantages may be clipped away

    shuffled = data.draw(st.permutations(weighted))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(shuffled) - 1), max_size=3)))
    settings_ = {
        "token_budget": data.draw(st.integers(1, 60)),
        "share_prompts": data.draw(st.booleans()),
    }
    shards = [shuffled[a:b] for a, b in zip([0, *cuts], [*cuts, len(shuffled)], strict=True)]
    parts = [ranks.gradient(policy, shard, choices, **settings_) for shard in shards]
    # A weight that is the product of a whole answer's ratios adds up the rounding of its log-probs.
    assert_same(torch.stack([gradient for gradient, _ in parts]).sum(0), whole, tolerance=2e-5)
    assert sum(x for _, x in parts) == pytest.approx(loss, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    "choices_", [EVERYTHING[::6], pytest.param(EVERYTHING, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_02_two_processes_that_add_or_average_gradients(
    choices_: list[dict[str, Any]], policy: Policy, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Real ranks over gloo. Shards are uneven and cut through groups; weights come from the whole batch."""
    shapes = [(0, 5, 3), (0, 5, 9), (1, 12, 1), (1, 12, 7), (1, 12, 7), (2, 30, 20), (0, 5, 2)]
    samples = off_policy(policy, make_samples(shapes, gaps=True))
    cases, wholes = [], []
    for choices in choices_:
        objective = Objective(algorithm_of(choices), 64)
        weighted = list(objective.weighted(as_candidates(samples)))
        wholes.append(ranks.gradient(policy, weighted, choices))
        cases.append(ranks.Case(choices, [weighted[:2], weighted[2:]]))
    job = ranks.Job(str(tiny_folder("llama")), str(tmp_path / "rendezvous"), cases)
    other = context().Process(target=ranks.join, args=(1, job, tmp_path / "errors"))
    other.start()
    try:
        found = ranks.work(0, job)
    finally:
        other.join(300)
        other.kill()
    assert other.exitcode == 0, (tmp_path / "errors").read_text()
    for (added, averaged, loss), (whole, whole_loss) in zip(found, wholes, strict=True):
        assert_same(added, whole)
        assert_same(averaged, whole)
        assert loss == pytest.approx(whole_loss, rel=1e-5, abs=1e-6)


@fast
@given(st.data())
def test_02_metrics_do_not_depend_on_the_cut_either(data: st.DataObject) -> None:
    objective = make_objective(preset="opsm", dual_clip=3.0)
    tokens = draw_tokens(data, objective)
    order = data.draw(st.permutations(range(tokens.sequences)))
    cut = data.draw(st.integers(1, tokens.sequences))
    meter = Meter()
    for piece in (order[:cut], order[cut:]):
        if piece:
            objective.loss(some_sequences(tokens, piece), meter)
    whole = loss_of(objective, tokens)[2]
    assert meter.totals().numbers() == pytest.approx(whole, rel=1e-4, abs=1e-5)


# 3


@fast
@given(scores, st.integers(-8, 8), st.sampled_from([0.25, 0.5, 2.0, 8.0]))
def test_03_zscores_ignore_shift_and_scale_and_baselines_sum_to_zero(
    rewards: list[float], shift: int, scale: float
) -> None:
    moved = zscore([r * scale + shift for r in rewards])
    np.testing.assert_allclose(moved, zscore(rewards), atol=1e-4)  # ε is added to the deviation: not exactly
    size = len(rewards)
    centred, others = group_centred(group_of(rewards)), leave_one_out(group_of(rewards))
    np.testing.assert_allclose(others, centred * size / (size - 1), rtol=1e-5, atol=1e-6)
    for i, r in enumerate(rewards):
        rest = rewards[:i] + rewards[i + 1 :]
        if max(rewards) > min(rewards):
            assert others[i] == pytest.approx(r - sum(rest) / len(rest), abs=1e-5)
    for advantage in (moved, centred, others):
        assert abs(float(advantage.sum())) < 1e-4


# 4


def draw_groups(data: st.DataObject) -> list[Group]:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    groups = []
    for g, size in enumerate(sizes):
        found = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
        lengths = data.draw(st.lists(st.integers(1, 4), min_size=size, max_size=size))
        greedy = make_rollout(0.5, group=g, index=-1)
        groups.append(make_group([x / 2 for x in found], group=g, lengths=lengths, greedy=greedy))
    return groups


def numbers_of(s: Sample | Candidate, offset: int) -> list[float]:
    """Some numbers of a sample that do not depend on where it stands."""
    return np.random.default_rng((s.group, s.index, offset)).normal(-1.0, 0.3, s.loss_tokens).tolist()  # type: ignore[no-any-return]


def trained_on(
    objective: Objective, groups: Sequence[Group], order: Callable[[list[Candidate]], list[Candidate]]
) -> Any:
    """Advantages, weights and gradients by (group, index, token)."""
    samples = order(objective.candidates(groups))
    names = ("logp_old", "logp_ref", "value", "logp_teacher")
    samples = with_numbers(samples, **{n: [numbers_of(s, i) for s in samples] for i, n in enumerate(names)})
    weighted = objective.weighted(order(objective.advantages(samples)))
    if not weighted:
        return {}
    ratios = [[math.exp(x + 1) for x in numbers_of(s, 3)] for s in weighted]
    d_ref = [x for s in weighted for x in numbers_of(s, 4)] if objective.wants_reference else None
    tokens = as_tokens(weighted, ratios, logp_old=-1.1, d_ref=d_ref)
    _, gradient, _ = loss_of(objective, tokens)
    keys = [(s.group, s.index, t) for s in weighted for t in range(s.loss_tokens)]
    rows = zip(tokens.advantage_N.tolist(), tokens.weight_N.tolist(), gradient.tolist(), strict=True)
    return {key: pytest.approx(row, rel=1e-4, abs=1e-5) for key, row in zip(keys, rows, strict=True)}


@pytest.mark.thorough(keep=4)
@settings(deadline=None, max_examples=8)
@given(data=st.data())
@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset != "rae"])  # its mean moves in their order
def test_04_order_of_samples_and_groups_permutes_results_only(preset: str, data: st.DataObject) -> None:
    """Groups are known by their id: samples of different groups may stand in any order."""
    objective = make_objective(preset=preset, aggregation="prompt-mean")
    groups = draw_groups(data)
    straight = trained_on(objective, groups, list)
    mixed = [
        as_group(data.draw(st.permutations(g.rollouts)), g.id, g.greedy) for g in data.draw(st.permutations(groups))
    ]
    seed = data.draw(st.integers(0, 5))

    def shuffle(samples: list[Candidate]) -> list[Candidate]:
        return [samples[i] for i in np.random.default_rng(seed).permutation(len(samples))]

    again = trained_on(objective, mixed, shuffle)
    assert {key: row.expected for key, row in again.items()} == straight


# 5


def draw_tokens(data: st.DataObject, objective: Objective, d_ref: bool = False) -> TokenBatch:
    """A batch of a few responses at any ratios and mismatches."""
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    values = data.draw(st.lists(signed, min_size=len(lengths), max_size=len(lengths)))
    seed = data.draw(st.integers(0, 100))
    rng = np.random.default_rng(seed)
    rollouts = [
        make_rollout(1.0, rng.normal(-1.6, 0.4, n).tolist(), index=i, group=i // 2) for i, n in enumerate(lengths)
    ]
    groups = [as_group(rollouts[i : i + 2], i // 2) for i in range(0, len(rollouts), 2)]
    samples = with_numbers(
        objective.candidates(groups), advantage=[[a] * n for a, n in zip(values, lengths, strict=True)]
    )
    ratios = [np.exp(rng.normal(0, 0.3, n)).tolist() for n in lengths]
    ref = rng.normal(0, 0.5, sum(lengths)).tolist() if d_ref else None
    return as_tokens(objective.weighted(samples), ratios, d_ref=ref)


@fast
@given(st.data())
def test_05_gspo_and_gspo_token_have_the_same_gradient(data: st.DataObject) -> None:
    """With weights that are the same for all tokens of a response, too; GSPO would spread those of single tokens."""
    wide = {"clip_low": 0.05, "clip_high": 0.05}
    for choices in ({"correction": "none"}, {"correction": "none", **wide}, {"correction": "sequence-tis"}):
        whole, by_token = (make_objective(preset=name, **choices) for name in ("gspo", "gspo-token"))
        tokens = draw_tokens(data, whole)
        loss, gradient, _ = loss_of(whole, tokens)
        loss_by_token, gradient_by_token, _ = loss_of(by_token, tokens)
        assert loss == pytest.approx(loss_by_token, rel=1e-5, abs=1e-6)
        torch.testing.assert_close(gradient, gradient_by_token, rtol=1e-5, atol=1e-7)


def test_05_they_differ_where_advantages_differ_by_token() -> None:
    whole, by_token = make_objective(preset="gspo"), make_objective(preset="gspo-token")
    samples = with_numbers(whole.candidates([make_group([1.0], lengths=[2])]), advantage=[[1.0, -1.0]])
    tokens = as_tokens(whole.weighted(samples), [[1.0, 1.0]], logp_old=-1.0)
    assert loss_of(whole, tokens)[1].tolist() == pytest.approx([0, 0], abs=1e-7)
    assert loss_of(by_token, tokens)[1].tolist() == pytest.approx([-0.5, 0.5], abs=1e-6)


# 6


@fast
@given(
    st.lists(st.tuples(st.floats(0.01, 20), signed), min_size=1, max_size=12),
    st.floats(0.05, 0.6),
    st.floats(0.05, 0.9),
    st.sampled_from([0.0, 2.0, 3.0]),
)
def test_06_clipped_tokens_have_exactly_no_gradient_and_cispo_tokens_always_one(
    rows: list[tuple[float, float]], low: float, high: float, dual: float
) -> None:
    assume(all(abs(r - edge) > 1e-3 for r, _ in rows for edge in (1 - low, 1 + high, dual)))
    assume(all(abs(math.log(r) - edge) > 1e-3 for r, _ in rows for edge in (-low, high)))
    logp = torch.tensor([math.log(r) for r, _ in rows]).requires_grad_()
    advantage = [a for _, a in rows]
    tokens = bare_tokens(logp, advantage, logp_old_N=torch.zeros(len(rows)))
    alone = replace(tokens, sample_N=torch.arange(len(rows)), sequences=len(rows))
    sides = [(a > 0 and r > 1 + high, a < 0 and r < 1 - low, a < 0 and 0 < dual < r) for r, a in rows]

    def gradient(loss_N: Tensor) -> Tensor:
        return torch.autograd.grad(loss_N.sum(), logp, retain_graph=True)[0]

    ratio_N = logp.exp()
    clipped = gradient(clip(ratio_N, tokens, clip_low=low, clip_high=high, dual_clip=dual))
    assert [g == 0 for g in clipped.tolist()] == [any(side) for side in sides]
    kept = clipped != 0
    torch.testing.assert_close(clipped[kept], (-tokens.advantage_N * ratio_N.detach())[kept])
    masked = gradient(mask(ratio_N, tokens, clip_low=low, clip_high=high))
    assert [g == 0 for g in masked.tolist()] == [side[0] or side[1] for side in sides]
    geometric = gradient(geometric_clip(ratio_N, alone, clip_low=low, clip_high=high))
    in_logs = [(a > 0 and math.log(r) > high) or (a < 0 and math.log(r) < -low) for r, a in rows]
    assert [g == 0 for g in geometric.tolist()] == in_logs
    cispo = gradient(weight_clip(ratio_N, tokens, weight_floor=0.0, weight_cap=1 + high))
    assert (cispo != 0).all()
    torch.testing.assert_close(cispo, -tokens.advantage_N * ratio_N.detach().clamp(max=1 + high))


# 7


@pytest.mark.thorough
@fast
@given(st.data())
def test_07_weights_and_anchors_carry_no_gradient(data: st.DataObject) -> None:
    tokens = draw_tokens(data, make_objective(**PLAIN))
    assert tokens.logp_N.requires_grad
    settings_ = {"floor": 0.7, "bottom": 0.5, "cap": 2.0, "low": 0.5, "high": 2.0,
                 "geometric_low": 0.9, "geometric_high": 1.1, "veto_low": 0.5, "veto_high": 2.0, "drift_limit": 0.1,
                 "entropy_share": 0.5, "opsm_limit": 0.0, "age_limit": 1}  # fmt: skip
    tokens = replace(tokens, lag_N=torch.arange(len(tokens.logp_N)) % 3 + 1)
    for name, correction in CORRECTIONS.items():
        read = {key: settings_[key] for key in keyword_settings(correction)}
        assert not correction(tokens, **read).requires_grad, name
    for name, anchor in ANCHORS.items():
        assert not anchor(tokens).requires_grad, name
    # If w carried gradient, that of a token would not be w times the plain one.
    for name in CORRECTIONS:
        corrected = make_objective(**{**PLAIN, "gate": "likelihood", "correction": name})
        plain = make_objective(**{**PLAIN, "gate": "likelihood"})
        read = {key: getattr(corrected.config.correction, key) for key in keyword_settings(CORRECTIONS[name])}
        expected = loss_of(plain, tokens)[1] * CORRECTIONS[name](tokens, **read)
        torch.testing.assert_close(loss_of(corrected, tokens)[1], expected)


@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
def test_07_the_trainer_hands_out_gradients_of_the_policy_only(policy: Policy, entropy_coef: float) -> None:
    seen: list[TokenBatch] = []

    class Spy(PolicyLoss):
        def __call__(self, tokens: TokenBatch, coefficients: Coefficients, meter: Meter) -> Tensor:
            seen.append(tokens)
            return super().__call__(tokens, coefficients, meter)

    choices = {"preset": "grpo", "kl_coef": 0.1, "kl": "k2", "reference": "frozen", "entropy_coef": entropy_coef}
    algorithm, training = algorithm_of(choices), TrainingConfig()
    objective = Objective(algorithm, 64)
    samples = off_policy(policy, make_samples([(0, 5, 3), (0, 5, 9), (1, 2, 4)]))
    trained = TrainableModel(
        PolicyGradient(policy, training, 0.8, Spy(algorithm, 64)), training, Alone(), total_updates=1
    )
    without = [replace(s, columns={k: v for k, v in s.columns.items() if k != "logp_old"}) for s in samples]
    for batch in (samples, without):  # one update: π_old is π_θ, detached
        _, rows = pack_rows(objective.weighted(as_candidates(batch)), training, policy.device, policy.dtype)
        trained.forward_backward(rows, Conditions(coefficients=objective.control.coefficients))
    policy.model.zero_grad(set_to_none=True)
    assert len(seen) == 2
    for tokens in seen:
        names = ("logp_old_N", "logp_mu_N", "logp_ref_N", "advantage_N", "weight_N", "lag_N")
        assert [name for name in names if getattr(tokens, name).requires_grad] == []
        assert tokens.logp_N.requires_grad
        assert tokens.entropy_N.requires_grad == bool(entropy_coef)


# 8


@fast
@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=2, max_size=8))
def test_08_laws_of_the_kl_estimators(rows: list[tuple[float, float]]) -> None:
    logits = torch.tensor([a for a, _ in rows], dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(-1)
    ref = torch.tensor([b for _, b in rows], dtype=torch.float64).log_softmax(-1)
    tokens = bare_tokens(logp, [0.0] * len(rows), logp_ref_N=ref)
    d = (logp - ref).detach()
    assert (REGULARISERS["k3"](tokens) >= -1e-15).all(), "but for rounding"
    (gradient,) = torch.autograd.grad(REGULARISERS["k2"](tokens).sum(), logp, retain_graph=True)
    torch.testing.assert_close(gradient, d)

    def expectation(kind: str) -> Tensor:
        """Gradient of the expected penalty with respect to the logits."""
        loss = (REGULARISERS[kind](tokens) * logp.detach().exp()).sum()
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    (reverse,) = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits, retain_graph=True)
    (forward,) = torch.autograd.grad((ref.exp() * (ref - logp)).sum(), logits, retain_graph=True)
    torch.testing.assert_close(expectation("k1"), torch.zeros_like(logits), atol=1e-12, rtol=0)
    for kind in ("k2", "k1-ratio", "k2-ratio", "k3-ratio"):
        torch.testing.assert_close(expectation(kind), reverse, atol=1e-9, rtol=1e-7)
    torch.testing.assert_close(expectation("k3"), forward, atol=1e-9, rtol=1e-7)


# 9

GROUP_BASELINES = [name for name in PRESETS if needs_group(AlgorithmConfig(preset=name))]


@pytest.mark.thorough(keep=12)
@pytest.mark.parametrize("preset", GROUP_BASELINES)
@pytest.mark.parametrize("score", [0.0, 0.7, 1.0])
def test_09_groups_without_variance_only_change_the_denominator(preset: str, score: float) -> None:
    off = {"filter": "none", "whiten": "none", "kl_coef": 0.0, "aggregation": "token-mean"}
    objective = make_objective(preset=preset, **off)
    signal = make_group([1, 0, 0, 0, 0], lengths=[2, 4, 1, 1, 2])
    equal = make_group([score] * 6, group=1, lengths=[2] * 6)
    ratios = [[1.1, 0.7], [0.5, 1.1, 1.5, 4.0], [0.9], [1.0], [1.3, 1.0]]
    both = as_tokens(trainable(objective, signal, equal), [*ratios, *[[1.3, 0.6]] * 6])
    _, gradient, _ = loss_of(objective, both)
    _, without, _ = loss_of(objective, as_tokens(trainable(objective, signal), ratios))
    assert not gradient[10:].any(), "exactly none"
    assert without.any()
    torch.testing.assert_close(gradient[:10] * 22, without * 10)


# 10


@fast
@given(st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=8), st.floats(0.5, 1), st.floats(0, 1))
def test_10_gae_without_values_is_the_return(rewards: list[float], gamma: float, lam: float) -> None:
    found = gae(SequenceRewards(f32(rewards), np.zeros(len(rewards), np.float32)), gamma=1.0, gae_lambda=1.0)
    to_go = [sum(rewards[t:]) for t in range(len(rewards))]
    np.testing.assert_allclose(found, to_go, atol=1e-5)
    np.testing.assert_allclose(returns(SequenceRewards(f32(rewards)), gamma=1.0), to_go, atol=1e-5)
    # Where only the last token has a reward, every token gets it.
    terminal = f32([0.0] * (len(rewards) - 1) + [rewards[-1]])
    assert gae(SequenceRewards(terminal, terminal * 0), gamma=1.0, gae_lambda=1.0).tolist() == [terminal[-1]] * len(
        rewards
    )
    # And by the definition, with any discount: Σ (γλ)^l δ_{t+l}.
    values = f32(rewards)[::-1].copy()
    found = gae(SequenceRewards(f32(rewards), values), gamma=gamma, gae_lambda=lam)
    after = [*values[1:].tolist(), 0.0]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, after, values.tolist(), strict=True)]
    for t in range(len(rewards)):
        expected = sum((gamma * lam) ** i * x for i, x in enumerate(deltas[t:]))
        assert found[t] == pytest.approx(expected, abs=1e-4)


def test_10_through_the_pipeline_ppo_without_a_critic_is_reinforce_plus_plus() -> None:
    groups = [make_group([1, 0], lengths=[2, 3]), make_group([0.5], group=1, lengths=[4])]
    for whiten in ("none", "tokens"):
        ppo = make_objective(preset="ppo", kl_coef=0.0, whiten=whiten)
        blank = [np.zeros(n).tolist() for n in (2, 3, 4)]
        with_critic = ppo.advantages(with_numbers(ppo.candidates(groups), value=blank))
        plain = make_objective(preset="reinforce++", kl_coef=0.0, whiten=whiten)
        for a, b in zip(with_critic, plain.advantages(plain.candidates(groups)), strict=True):
            np.testing.assert_allclose(a.column("advantage"), b.column("advantage"), atol=1e-6)
        if whiten == "none":
            assert [s.column("advantage").tolist() for s in with_critic] == [[1, 1], [0, 0, 0], [0.5] * 4]


# 11


@fast
@given(st.data(), aggregations)
def test_11_without_cap_truncated_importance_sampling_is_decoupled_ppo(
    data: st.DataObject, aggregation: dict[str, Any]
) -> None:
    open_ = {**PLAIN, **aggregation, "correction": "tis", "correction_cap": 1e9}
    tokens = draw_tokens(data, make_objective(**open_))
    # Decoupled PPO by its definition: the behaviour weight times the clip against the proximal policy.
    r_N, w_N = (tokens.logp_N - tokens.logp_old_N).exp(), (tokens.logp_old_N - tokens.logp_mu_N).exp()
    a_N = tokens.advantage_N
    by_hand = (tokens.weight_N * w_N * torch.maximum(-a_N * r_N, -a_N * r_N.clamp(0.8, 1.2))).sum()
    loss, gradient, _ = loss_of(make_objective(**open_), tokens)
    assert loss == pytest.approx(by_hand.item(), rel=1e-4, abs=1e-5)
    torch.testing.assert_close(gradient, torch.autograd.grad(by_hand, tokens.logp_N)[0], rtol=1e-4, atol=1e-6)
    # Without cap and clip, before the first update: REINFORCE with importance weights.
    first = replace(tokens, logp_old_N=tokens.logp_N.detach())
    unclipped = make_objective(**{**open_, "clip_high": 1e9, "clip_low": 0.999})
    plain = make_objective(
        **{**PLAIN, **aggregation, "gate": "likelihood", "correction": "total", "correction_cap": 1e9}
    )
    torch.testing.assert_close(loss_of(unclipped, first)[1], loss_of(plain, first)[1], rtol=1e-4, atol=1e-6)
