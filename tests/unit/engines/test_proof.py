"""What sketches keep of states, and how differences are measured."""

import math

import numpy as np
import pytest
import torch

from kitae.engines.config import EngineConfig
from kitae.engines.native import sampler
from kitae.engines.native.engine import NativeEngine
from kitae.engines.proof import SKETCH, Differences, Tolerance, directions, of_states, sketch
from kitae.models.logprobs import Head, HeadTransform


def test_a_sketch_keeps_the_size_of_differences() -> None:
    torch.manual_seed(0)
    fixed = directions(96, torch.device("cpu"))
    assert fixed.shape == (96, SKETCH) and float(fixed.abs().min()) == float(fixed.abs().max())
    assert abs((fixed.T @ fixed - torch.eye(SKETCH)).abs().max()) < 0.4, "nearly perpendicular"
    states = torch.randn(4000, 96)
    for size in (1.0, 1e-3):
        moved = states + size * torch.randn(4000, 96)
        apart = (sketch(moved, fixed) - sketch(states, fixed)).pow(2).sum(1).mean()
        assert float(apart) == pytest.approx(SKETCH * size**2, rel=0.1)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_the_interval_of_what_the_sampler_draws(temperature: float) -> None:
    torch.manual_seed(1)
    head = Head(torch.randn(50, 16), torch.randn(50), HeadTransform(0.5, 30.0), exact=False)
    hidden = torch.randn(600, 16)
    uniform = sampler.uniforms([7] * 600, list(range(600)))
    logits = head.transform(hidden @ head.weight.T + head.bias) / temperature
    drawn, *_ = sampler.sample(logits, [sampler.RowDraw(sampler.SamplingParams())] * 600, uniform, kernels=None)
    found = of_states(head, hidden, drawn, uniform.float(), 1 / temperature)
    assert found.shape == (1 + SKETCH, 600) and float(found[0].max()) < 1e-6
    torch.testing.assert_close(found[1:].T, sketch(hidden, directions(16, hidden.device)))
    others = (drawn + 1) % 50
    wrong = of_states(head, hidden, others, uniform.float(), 1 / temperature)[0]
    probs = torch.softmax(logits, -1)
    above = probs.cumsum(-1).gather(1, others[:, None])[:, 0]
    below = above - probs.gather(1, others[:, None])[:, 0]
    expected = torch.where(uniform < below, below - uniform, uniform - above).float()
    torch.testing.assert_close(wrong, expected, atol=1e-6, rtol=0)
    assert float(of_states(head, hidden, others, torch.full((600,), -1.0), 1.0)[0].max()) == 0, "not to be compared"


def test_a_few_wrong_tokens_count_in_a_long_answer() -> None:
    found = np.concatenate((np.zeros((640, 2)), np.ones((640, SKETCH))), 1).astype(np.float32)
    proof = found[:, 2:].copy()
    zeros = np.zeros(640, np.float32)
    assert Differences.of(proof, zeros, found) == Differences(0, 0, 0)
    proof[100:104] = 2
    differences = Differences.of(proof, zeros, found)
    assert differences.state == pytest.approx(4 / 32) and not differences.draw
    assert "states must be within 0.1" in differences.fault(Tolerance(0.1, 1, 1))
    assert differences.fault(Tolerance(0.2, 1, 1)) == ""
    proof[0, 0] = math.nan
    assert Differences.of(proof, zeros, found).state == math.inf


def test_no_proof_is_made_where_none_is_wanted(tiny_policy) -> None:  # type: ignore[no-untyped-def]
    engine = NativeEngine(tiny_policy("llama"), EngineConfig(memory_gb=0.02), 0)
    assert engine.runner.directions is None
    import asyncio

    from kitae.engines.base import Request, SamplingParams

    async def body() -> None:
        done = await engine.generate(Request("a/0", (5, 6, 7), SamplingParams(max_tokens=4), seed=1))
        assert done.proof is None and len(done.tokens) == 4
        await engine.close()

    asyncio.run(body())
