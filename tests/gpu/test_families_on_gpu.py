"""What docs/models.md says of decoders on a GPU: kernels run where it says so, and give what the modules give."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kitae.engines.base import Completion, Request, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.policy import Policy

sys.path.append(str(Path(__file__).parents[1] / "unit/models"))
from test_families import ROWS, RUN, made  # noqa: F401 (made is a fixture)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


async def sample(policy: Policy, kernels: bool) -> list[tuple[Request, Completion]]:
    """More sequences than the kernels of a few rows take, of different lengths; their last steps have few rows."""
    engine = NativeEngine(policy, EngineConfig(memory_gb=0.01))
    prompts = [tuple((7 * i + j * j) % 250 + 3 for j in range(5 + 7 * i)) for i in range(3)]
    requests = [
        Request(f"{i}/{j}", p, SamplingParams(max_tokens=4 + 2 * (j % 8)), 30 * i + j, share=f"{i}")
        for i, p in enumerate(prompts)
        for j in range(26)
    ]
    try:
        assert (engine.runner.decoder is not None) == kernels  # type: ignore[attr-defined]
        chosen = requests if kernels else []
        return list(zip(chosen, await asyncio.gather(*map(engine.generate, chosen)), strict=True))
    finally:
        await engine.close()


@pytest.mark.parametrize("family", RUN)
def test_the_decoder_is_the_one_of_the_page(family: str, made: Callable[[str], Path]) -> None:  # noqa: F811
    policy = load_policy(ModelConfig(path=str(made(family)), dtype="float32", device="cuda"))
    for request, done in asyncio.run(sample(policy, ROWS[family][2] == "kernels")):
        row = torch.tensor(request.prompt_tokens + done.tokens, device="cuda")
        with torch.no_grad():
            expected = policy.score(row)[len(request.prompt_tokens) - 1 :].cpu()
        torch.testing.assert_close(torch.tensor(done.logprobs), expected, atol=1e-4, rtol=0)
