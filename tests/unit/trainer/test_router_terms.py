"""The terms for routers: equal to plain autograd, however rows are cut; and what they do to a router."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from short_settings import algorithm_with
from test_gradient import SHAPES, assert_same, gradient, make_samples
from test_routed_updates import annotated
from trainer_workers import forward_backward, make_worker, weighted

from kitae.algorithms.config import AlgorithmConfig
from kitae.data.packing import NO_RECORD, lay_out
from kitae.errors import ModelError
from kitae.models.attention_seam import SelfAttention
from kitae.models.policy import Policy
from kitae.models.router_terms import RouterCoefficients, RouterTerms, chosen_shares
from kitae.models.routing import RouterShape, hanging, record_routing, routers_of
from kitae.trainer.config import TrainingConfig
from kitae.types import Sample

TinyPolicy = Callable[..., Policy]
CUTS: list[dict[str, Any]] = [{}, {"share_prompts": False}, {"token_budget": 24}, {"checkpoint_activations": True}]


def algorithm(**choices: Any) -> AlgorithmConfig:
    return algorithm_with(preset="grpo", routing="old", **choices)


def read(policy: Policy, tokens_T: torch.Tensor) -> None:
    """A plain pass over one sequence, with gradients."""
    positions_T = torch.arange(len(tokens_T))
    policy.hidden(tokens_T, positions_T, SelfAttention(positions_T))


def by_hand(policy: Policy, samples: tuple[Sample, ...], z: float, balance: float) -> dict[str, torch.Tensor]:
    """The gradient of the two terms alone, one sample after the other, without packing or shared prompts."""
    policy.model.zero_grad(set_to_none=True)
    shape = RouterShape.of(policy.model)
    f_LE, p_LE, squares = torch.zeros(shape.layers, shape.experts), torch.zeros(shape.layers, shape.experts), 0.0
    for s in samples:
        logits: dict[int, torch.Tensor] = {}
        with hanging(
            lambda layer, _, __, output, kept=logits: kept.update({layer: output[0]}), routers_of(policy.model)
        ):
            read(policy, torch.tensor(np.asarray(s.tokens_T)))
        before = torch.tensor(np.flatnonzero(s.mask_T) - 1)
        w_N = torch.tensor(s.weight_T[s.mask_T])
        assert s.experts is not None
        for layer, logits_TE in logits.items():
            own_NE = logits_TE[before]
            squares = squares + (w_N * own_NE.logsumexp(-1) ** 2).sum() / shape.layers
            p_LE[layer] = p_LE[layer] + (w_N[:, None] * own_NE.softmax(-1)).sum(0)
            for n, token in enumerate(before.tolist()):
                for expert in s.experts[token, layer].tolist():
                    f_LE[layer, expert] += w_N[n] / shape.top_k
    f_LE = f_LE / f_LE.sum(-1, keepdim=True)
    loss = z * squares + balance * shape.experts * (f_LE * p_LE).sum() / shape.layers
    loss.backward()  # type: ignore[union-attr]
    return {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize(("z", "balance"), [(0.3, 0.0), (0.0, 2.0), (0.1, 1.0)])
def test_terms_equal_plain_autograd_however_rows_are_cut(
    z: float, balance: float, architecture: str, tiny_policy: TinyPolicy
) -> None:
    policy = tiny_policy(architecture)
    samples = annotated(policy, make_samples(SHAPES, gaps=True))
    plain, with_terms = algorithm(), algorithm(experts_z_coef=z, experts_balance_coef=balance)
    without = gradient(policy, samples, plain)
    expected = by_hand(policy, weighted(samples, with_terms), z, balance)
    assert max(value.abs().max() for value in expected.values()) > 1e-3, "they say something"
    for cut in CUTS:
        found = gradient(policy, samples, with_terms, **cut)
        assert_same({n: found[n] - without[n] for n in expected}, expected, tolerance=2e-5)


def test_the_numbers_are_those_of_the_whole_batch(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy("qwen3_moe")
    samples = annotated(policy, make_samples(SHAPES))
    chosen = algorithm(experts_z_coef=0.1, experts_balance_coef=0.1)
    found = []
    for cut in CUTS[:3]:
        policy.plain = not cut.get("share_prompts", True)
        training = {name: value for name, value in cut.items() if name != "share_prompts"}
        worker = make_worker(policy, TrainingConfig(**training), chosen)
        numbers = forward_backward(worker, weighted(samples, chosen)).numbers()
        found.append((numbers["router_z"], numbers["router_balance"]))
        policy.model.zero_grad(set_to_none=True)
    assert found[1] == pytest.approx(found[0], rel=1e-5) and found[2] == pytest.approx(found[0], rel=1e-5)
    assert found[0][1] >= 0.9, "1 is the value of an even load"


def test_balance_spreads_the_load_of_a_router_that_loves_one_expert(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy("qwen3_moe")
    routers: list[Any] = routers_of(policy.model)
    with torch.no_grad():
        for router in routers:
            router.weight[0] += 0.1 * router.weight.norm() * torch.sign(router.weight[0])
    tokens = torch.tensor(np.random.default_rng(0).integers(3, 250, 120))
    shape = RouterShape.of(policy.model)
    optimizer = torch.optim.SGD([router.weight for router in routers], lr=5.0)
    loads = []
    for _ in range(40):
        with torch.no_grad(), record_routing(policy.model) as record:
            policy.score(tokens)
        f_LE = torch.stack(
            [torch.bincount(e.flatten().long(), minlength=shape.experts) for e in record.layers.values()]
        )
        loads.append((f_LE.amax(-1) / f_LE.double().mean(-1)).mean().item())
        terms = RouterTerms(policy.model, RouterCoefficients(balance=1.0), f_LE / f_LE.sum(-1, keepdim=True))
        with terms.watch():
            read(policy, tokens)
            loss, _ = terms.of(torch.arange(120), torch.full((120,), 1 / 120))
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    assert loads[-1] < loads[0] - 0.3, loads


def test_shares_are_weighted_and_leave_out_what_has_no_record() -> None:
    first, second, third = make_samples([(0, 2, 2), (1, 2, 1), (2, 2, 1)])
    one = np.array([[[0, 1]], [[2, 3]], [[0, 1]]])  # positions 1 and 2 predict its loss tokens
    first = replace(first, experts=one, weight_T=np.array([0, 0, 0.5, 0.25], dtype=np.float32))
    second = replace(second, experts=np.full((2, 1, 2), NO_RECORD), weight_T=np.array([0, 0, 9.0], dtype=np.float32))
    shares = chosen_shares([lay_out([first, second]), lay_out([third])], RouterShape(1, 2, 4))
    assert shares.tolist() == [pytest.approx([1 / 6, 1 / 6, 1 / 3, 1 / 3])]


def test_a_model_without_routers_is_refused(tiny_policy: TinyPolicy) -> None:
    with pytest.raises(ModelError, match="needs router modules"):
        make_worker(tiny_policy(), algorithm=algorithm_with(preset="grpo", experts_z_coef=0.1))


def test_transformers_has_the_same_balance_up_to_its_factor(tiny_policy: TinyPolicy) -> None:
    """Its loss adds up the choices of the K experts, so that an even load gives K; ours gives 1."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    policy = tiny_policy("mixtral")
    tokens = torch.arange(5, 45)
    shape = RouterShape.of(policy.model)
    with torch.no_grad(), record_routing(policy.model) as record:
        terms = RouterTerms(policy.model, RouterCoefficients(balance=1.0))
        with terms.watch():
            policy.score(tokens)
            kept = {layer: logits.clone() for layer, logits in terms._logits.items()}
            f_LE = torch.stack(
                [torch.bincount(e.flatten().long(), minlength=shape.experts) for e in record.layers.values()]
            )
            terms.f_LE = f_LE / f_LE.sum(-1, keepdim=True)
            ours, _ = terms.of(torch.arange(40), torch.full((40,), 1 / 40))
    theirs = [load_balancing_loss_func((kept[layer],), shape.experts, shape.top_k) for layer in kept]
    assert ours * shape.top_k == pytest.approx(torch.stack(theirs).mean().item(), rel=1e-5)
