"""Rows of one pass with different adapters compute what each adapter alone would, whatever else is in the pass."""

import asyncio
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kitae.engines.base import Completion, Request, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.errors import ModelError, RequestError
from kitae.models.adapters import (
    ATTENTION,
    Adapter,
    AdapterStack,
    SlicedRows,
    StackedRows,
    adapt,
    adapted_layers,
    fresh_adapter,
    using,
)
from kitae.models.policy import Policy
from kitae.serving.text_scoring import TextScorer


def trained(policy: Policy, rank: int, seed: int) -> Adapter:
    """One that adds something."""
    made = fresh_adapter(policy, rank, 32.0, seed)
    draw = torch.Generator().manual_seed(seed)
    for factors in made.factors.values():
        factors.wide.data.normal_(0, 0.02, generator=draw)
    return made


def merged(policy: Policy, adapter: Adapter, tokens: Tensor) -> Tensor:
    """Log-probs with the adapter in the weights."""
    before = {}
    for name, layer in adapted_layers(policy).items():
        factors = adapter.factors[name]
        before[name] = layer.weight.detach().clone()
        layer.weight.data += adapter.scale * factors.wide.detach() @ factors.narrow.detach()
    found = policy.score(tokens)
    for name, layer in adapted_layers(policy).items():
        layer.weight.data.copy_(before[name])
    return found


@pytest.fixture
def policy(tiny_policy: Callable[..., Policy]) -> Policy:
    made = tiny_policy("llama")
    adapt(made)
    return made


def test_an_adapter_in_use_is_its_product_in_the_weights(policy: Policy) -> None:
    tokens, base = torch.arange(3, 23), policy.score(torch.arange(3, 23))
    adapter = trained(policy, 4, 1)
    with using(SlicedRows([(adapter, 0, len(tokens))])):
        got = policy.score(tokens)
    torch.testing.assert_close(got, merged(policy, adapter, tokens), rtol=0, atol=1e-5)
    assert (got - base).abs().max() > 1e-3
    torch.testing.assert_close(policy.score(tokens), base, rtol=0, atol=0)  # nothing is left behind


def test_rows_in_any_order_use_their_own_adapter_whatever_the_ranks(policy: Policy) -> None:
    adapters = [trained(policy, rank, seed) for seed, rank in enumerate((2, 8, 3))]
    wanted = [adapters[0], None, adapters[2], adapters[0], adapters[1], None]
    name = next(iter(adapted_layers(policy)))
    x = torch.randn(len(wanted), adapters[0].factors[name].narrow.shape[1])
    got = StackedRows(AdapterStack([*adapters, None]), wanted, x.device).delta(name, x)
    assert got is not None
    for row, adapter, delta in zip(x, wanted, got, strict=True):
        expected = torch.zeros_like(delta)
        if adapter is not None:
            factors = adapter.factors[name]
            expected = adapter.scale * factors.wide @ (factors.narrow @ row)
        torch.testing.assert_close(delta, expected, rtol=1e-5, atol=1e-6)


def test_gradients_reach_the_adapter_of_a_row_alone(policy: Policy) -> None:
    one, other = trained(policy, 4, 1), trained(policy, 2, 2)
    name = next(iter(adapted_layers(policy)))
    x = torch.randn(5, one.factors[name].narrow.shape[1])
    delta = SlicedRows([(one, 1, 3), (other, 3, 5)]).delta(name, x)
    assert delta is not None and not delta[0].any()
    own, others = torch.autograd.grad(delta[1:3].sum(), [one.factors[name].wide, other.factors[name].wide])
    assert own.any() and not others.any()


def test_an_adapter_that_is_broken_harms_no_other_row(policy: Policy) -> None:
    broken, whole = trained(policy, 4, 1), trained(policy, 4, 2)
    for factors in broken.factors.values():
        factors.wide.data.fill_(math.inf)
    name = next(iter(adapted_layers(policy)))
    x = torch.randn(2, whole.factors[name].narrow.shape[1])
    alone = StackedRows(AdapterStack([whole]), [whole], x.device).delta(name, x[1:])
    both = StackedRows(AdapterStack([broken, whole]), [broken, whole], x.device).delta(name, x)
    assert alone is not None and both is not None
    torch.testing.assert_close(both[1:], alone, rtol=1e-6, atol=1e-7)
    with pytest.raises(ModelError, match="must be finite"):
        broken.frozen(torch.float32)


def test_parts_that_are_left_out_have_no_factors(policy: Policy) -> None:
    found = fresh_adapter(policy, 2, 32.0, 0, (ATTENTION,))
    assert found.factors and all(".self_attn." in name for name in found.factors)


async def answers(engine: NativeEngine, wanted: list[tuple[str, Adapter | None]]) -> list[Completion]:
    return await asyncio.gather(
        *(
            engine.generate(
                Request(name, tuple(range(5, 25)), SamplingParams(max_tokens=12), seed=i, share="prompt"), adapter
            )
            for i, (name, adapter) in enumerate(wanted)
        )
    )


def test_the_engine_samples_for_all_adapters_at_once_what_it_samples_for_each_alone(policy: Policy) -> None:
    """One prompt for all, so a shared prefix of another adapter would show."""
    adapters = [None, *(trained(policy, rank, seed).frozen(policy.dtype) for seed, rank in enumerate((2, 8, 4)))]

    async def main() -> None:
        engine = NativeEngine(policy, EngineConfig(memory_gb=0.05))
        scorer = TextScorer(policy)
        try:
            wanted = [(str(i), adapter) for i, adapter in enumerate(adapters)]
            together = await answers(engine, wanted)
            for i, (done, (name, adapter)) in enumerate(zip(together, wanted, strict=True)):
                alone = await engine.generate(
                    Request(name, tuple(range(5, 25)), SamplingParams(max_tokens=12), seed=i), adapter
                )
                assert alone.tokens == done.tokens
                assert max(abs(a - b) for a, b in zip(alone.logprobs, done.logprobs, strict=True)) < 1e-5
            texts = [(*range(5, 25), *done.tokens) for done in together]
            scored = await asyncio.gather(
                *(scorer.score(text, adapter=adapter) for text, (_, adapter) in zip(texts, wanted, strict=True))
            )
            for done, text in zip(together, scored, strict=True):
                gaps = [abs(a - b) for a, b in zip(done.logprobs, text.logprobs[-len(done.tokens) :], strict=True)]
                assert max(gaps) < 1e-5
            with pytest.raises(RequestError, match="must have no session"):
                await engine.generate(
                    Request("s", (5, 6), SamplingParams(max_tokens=2), seed=0, session="s"), adapters[1]
                )
        finally:
            await scorer.close()
            await engine.close()

    asyncio.run(main())
