"""Routing replay of the engine's experts: both compute the same function, though the trainer would route otherwise."""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from short_settings import algorithm_with
from test_gradient import assert_same
from torch import Tensor, nn
from trainer_workers import make_worker, weighted

from kitae.algorithms.config import AlgorithmConfig
from kitae.algorithms.control import Control
from kitae.algorithms.group_stages import GroupStages, experts_of
from kitae.data.packing import NO_RECORD, lay_out, pack
from kitae.engines.base import Request, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.errors import ModelError
from kitae.models.policy import Policy
from kitae.models.routing import is_router, replayed_gates
from kitae.models.tiny import MIXTURES
from kitae.trainer.base import Batch, Column, Conditions
from kitae.trainer.config import TrainingConfig
from kitae.trainer.local_trainer import LocalTrainer
from kitae.types import Chain, ExpertArray, Group, Message, Prompt, Rollout, Sample, Score, Segment

TinyPolicy = Callable[..., Policy]
ROUTED = algorithm_with(routing="engine")
TURNS = 3


@contextmanager
def astray(policy: Policy) -> Iterator[None]:
    """Its routers choose the experts after those that they would."""

    def shift(router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, gates, experts = output
        experts = (experts + 1) % int(router.num_experts)
        renormalise = bool(getattr(router, "norm_topk_prob", True))
        return logits, replayed_gates(logits, experts, renormalise).to(gates), experts

    routers: list[nn.Module] = [module for module in policy.model.modules() if is_router(module)]
    handles = [router.register_forward_hook(shift) for router in routers]
    yield
    for handle in handles:
        handle.remove()


def sampled(policy: Policy, turns: int = 1, seed: int = 0) -> list[Group]:
    """Two groups of three rollouts, of a turn or several."""

    async def episode(engine: NativeEngine, group: int, index: int) -> Rollout:
        rng = random.Random(f"{seed}/{group}/{index}")
        chain = Chain(tuple(range(5 + group, 30 + 7 * group)), ())
        for turn in range(turns):
            request = Request(
                f"{group}/{index}/{turn}",
                chain.tokens,
                SamplingParams(max_tokens=8 + index),
                rng.getrandbits(40),
                share="" if turn else f"{group}",
                session=f"{group}/{index}",
                experts_from=chain.unrouted,
            )
            done = await engine.generate(request)
            heard = [Segment.observed([rng.randrange(3, 250) for _ in range(5)])] if turn < turns - 1 else []
            said = Segment("model", done.tokens, done.logprobs, done.versions, experts=done.experts)
            chain = Chain(chain.prompt_tokens, (*chain.segments, said, *heard))
        return Rollout(group, index, (chain,), "length", "", Score(float(index)))

    async def run() -> list[Group]:
        engine = NativeEngine(policy, EngineConfig(memory_gb=0.01), records_experts=True, page_size=8)
        try:
            keys = [(group, index) for group in (0, 1) for index in range(3)]
            found = await asyncio.gather(*(episode(engine, *key) for key in keys))
        finally:
            await engine.close()
        prompt = Prompt("p", (Message("user", "?"),), "")
        return [Group(g, prompt, tuple(r for r in found if r.group == g)) for g in (0, 1)]

    return asyncio.run(asyncio.wait_for(run(), 100))


def samples_of(groups: Sequence[Group], algorithm: AlgorithmConfig) -> list[Sample]:
    stages = GroupStages(algorithm, 64)
    return [s for c in stages.advantages(stages.candidates(groups)) for s in c.samples]


def old(policy: Policy, samples: Sequence[Sample], *, share_prompts: bool = True, **training: Any) -> list[Sample]:
    policy.plain = not share_prompts
    trainer = LocalTrainer(make_worker(policy, TrainingConfig(**training), ROUTED))
    try:
        return asyncio.run(trainer.annotate(samples, [Column.OLD]))
    finally:
        asyncio.run(trainer.close())


def gap(samples: Sequence[Sample]) -> float:
    return max(float(np.abs(s.loss("logp_old") - s.loss("logp_mu")).max()) for s in samples)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("turns", [1, TURNS])
@pytest.mark.parametrize("architecture", MIXTURES)
def test_log_probs_are_those_of_the_engine(architecture: str, turns: int, tiny_policy: TinyPolicy) -> None:
    """Whose routers chose otherwise than the trainer's would."""
    served, trained = tiny_policy(architecture), tiny_policy(architecture)
    with astray(served):
        groups = sampled(served, turns)
    cuts: list[dict[str, Any]] = [{}, {"share_prompts": False}, {"token_budget": 40}]
    for cut in cuts:
        assert gap(old(trained, samples_of(groups, ROUTED), **cut)) < 2e-4, cut
    assert gap(old(trained, samples_of(groups, AlgorithmConfig()))) > 0.1, "it makes a difference"


@pytest.mark.thorough
def test_an_engine_in_half_precision(tiny_policy: TinyPolicy) -> None:
    """It rounds, so that some choices are others; the trainer repeats them, and comes closer to its log-probs."""
    served = tiny_policy("qwen3_moe", dtype="bfloat16")
    trained = tiny_policy("qwen3_moe")
    with torch.no_grad():
        for own, theirs in zip(trained.model.parameters(), served.model.parameters(), strict=True):
            own.copy_(theirs)
    routed, plain, flips = [], [], []  # how far log-probs of the two are apart; choices that are others
    for seed in range(6):  # one alone may see none
        groups = sampled(served, TURNS, seed)
        for algorithm, found in ((ROUTED, routed), (AlgorithmConfig(), plain)):
            samples = old(trained, samples_of(groups, algorithm))
            found += [np.abs(s.loss("logp_old") - s.loss("logp_mu")) for s in samples]
        flips.append(numbers(trained, samples_of(groups, ROUTED))["routing_flips"])
    assert 0 < max(flips) < 0.2
    means = [np.mean(np.concatenate(found)) for found in (routed, plain)]
    assert means[0] < 0.9 * means[1], means


def numbers(policy: Policy, samples: Sequence[Sample], **training: Any) -> dict[str, float]:
    trainer = LocalTrainer(make_worker(policy, TrainingConfig(**training), ROUTED))
    try:
        batch = Batch(weighted(list(samples), ROUTED), Conditions(0, Control(ROUTED).coefficients))
        return asyncio.run(trainer.forward_backward(batch)).numbers()
    finally:
        asyncio.run(trainer.close())


@pytest.mark.parametrize("training", [{}, {"checkpoint_activations": True}], ids=["plain", "checkpointed"])
def test_how_many_choices_are_others_is_measured(training: dict[str, Any], tiny_policy: TinyPolicy) -> None:
    served, trained = tiny_policy("qwen3_moe"), tiny_policy("qwen3_moe")
    assert numbers(trained, samples_of(sampled(served), ROUTED), **training)["routing_flips"] == 0
    with astray(served):
        groups = sampled(served)
    # In a ring of four no pair is the one after it.
    assert numbers(trained, samples_of(groups, ROUTED), **training)["routing_flips"] == 1
    assert "routing_flips" not in numbers(trained, samples_of(groups, AlgorithmConfig()))


def test_updates_use_them_however_rows_are_cut(tiny_policy: TinyPolicy) -> None:
    served, trained = tiny_policy("qwen3_moe"), tiny_policy("qwen3_moe")
    with astray(served):
        samples = samples_of(sampled(served, TURNS), ROUTED)

    def gradient(samples: Sequence[Sample], *, share_prompts: bool = True, **training: Any) -> dict[str, Tensor]:
        trained.plain = not share_prompts
        trained.model.zero_grad(set_to_none=True)
        numbers(trained, samples, **training)
        return {name: p.grad.clone() for name, p in trained.model.named_parameters() if p.grad is not None}

    whole = gradient(samples)
    for cut in ({"share_prompts": False}, {"token_budget": 40}, {"checkpoint_activations": True}):
        assert_same(gradient(samples, **cut), whole)
    native = gradient([replace(s, experts=None) for s in samples])
    assert any((native[name] - whole[name]).abs().max() > 1e-3 for name in native), "it makes a difference"


def test_a_reference_and_a_critic_choose_for_themselves(tiny_policy: TinyPolicy) -> None:
    from test_learner import critic_of

    served, trained = tiny_policy("qwen3_moe"), tiny_policy("qwen3_moe")
    with astray(served):
        samples = samples_of(sampled(served), ROUTED)
    trainer = LocalTrainer(make_worker(trained, TrainingConfig(), ROUTED, reference=True))
    plain = [replace(s, experts=None) for s in samples]
    try:
        with_them, without = (asyncio.run(trainer.annotate(s, [Column.REFERENCE])) for s in (samples, plain))
    finally:
        asyncio.run(trainer.close())
    for a, b in zip(with_them, without, strict=True):
        np.testing.assert_allclose(a.columns["logp_ref"], b.columns["logp_ref"], atol=1e-5)
    critic = LocalTrainer(critic_of(trained, tiny_policy()))  # which has no experts at all
    try:
        asyncio.run(critic.annotate(samples, [Column.VALUE]))
    finally:
        asyncio.run(critic.close())


def test_a_model_without_experts_is_refused_at_once(tiny_policy: TinyPolicy) -> None:
    with pytest.raises(ModelError, match="routing replay needs router modules, got"):
        make_worker(tiny_policy(), TrainingConfig(), ROUTED)


# Records.


def numbered(start: int, count: int) -> ExpertArray:
    """Of positions from `start` on, each with its own number."""
    return (start + np.arange(count, dtype=np.uint8))[:, None, None]


def turn(length: int, experts: ExpertArray | None = None) -> Segment:
    return Segment("model", (5,) * length, (0.0,) * length, (0,) * length, experts=experts)


def test_turns_lie_one_after_the_other() -> None:
    """A turn that has no record is told by the next; what was told twice counts as it was first."""
    heard = Segment.observed((8, 9))
    both = Chain((1, 2, 3), (turn(2, numbered(0, 4)), heard, turn(3, numbered(4, 5)), heard))
    whole = experts_of(both)
    assert whole is not None
    assert whole[:, 0, 0].tolist() == [*range(9), NO_RECORD, NO_RECORD] and both.unrouted == 9
    late = Chain((1, 2, 3), (turn(2), heard, turn(3, numbered(0, 9))))
    assert Chain((1, 2, 3), late.segments[:2]).unrouted == 0
    healed = experts_of(late)
    assert healed is not None and healed[:, 0, 0].tolist() == list(range(9))
    twice = experts_of(Chain((1, 2, 3), (turn(2, numbered(0, 4)), heard, turn(3, numbered(100, 9)))))
    assert twice is not None and twice[:, 0, 0].tolist() == [0, 1, 2, 3, 104, 105, 106, 107, 108]
    gap = Chain((1, 2, 3), (turn(2), heard, turn(3, numbered(4, 5))))
    with_gap = experts_of(gap)
    assert with_gap is not None and with_gap[:, 0, 0].tolist() == [NO_RECORD] * 4 + [4, 5, 6, 7, 8]
    assert gap.unrouted == 0
    assert experts_of(Chain((1, 2, 3), (turn(2),))) is None


def test_prompts_are_shared_by_samples_that_compute_them_alike() -> None:
    tokens = np.arange(1, 8)
    mask, blank = np.arange(7) >= 4, np.zeros(7, dtype=np.float32)
    plain = [Sample(0, i, tokens, 4, mask, blank) for i in range(4)]
    experts = [numbered(0, 6), numbered(0, 6).astype(np.int16), numbered(9, 6), None]
    samples = [replace(s, experts=e) for s, e in zip(plain, experts, strict=True)]
    (part,) = pack(samples, 1000)
    row = lay_out(part)
    assert len(row.tokens_T) == 3 * 4 + 4 * 2, "three prompts, for those alike one"
    assert row.experts_TLK is not None
    for span in row.spans:
        assert span.length in (4, 2)
    assert (row.experts_TLK == NO_RECORD).sum() == 6, "of the sample without any"
