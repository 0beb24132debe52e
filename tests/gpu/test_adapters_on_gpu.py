"""Adapters that differ from row to row, on a GPU: in company what each computes alone, in trainer and engine alike."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import kitae.primitives
from kitae.engines.config import EngineConfig
from kitae.primitives import AdamParams, Datum, Workbench

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

TEXT = list(range(5, 37))


def train(bench: Workbench, rank: int) -> list[float]:
    model = bench.create_lora(rank, seed=rank)
    text = TEXT[rank:]
    for _ in range(4):
        model.forward_backward([Datum(text[:-1], text[1:])])
        model.optim_step(AdamParams(1e-2))
    sampler = model.sampler()
    scored = sampler.logprobs(TEXT)
    assert scored == pytest.approx(model.forward([Datum(TEXT[:-1], TEXT[1:])]).logprobs[0].tolist(), abs=1e-4)
    (answer,) = sampler.sample(TEXT[:6], max_tokens=8, seed=1)
    again = sampler.logprobs([*TEXT[:6], *answer.tokens])[5:]
    assert list(answer.logprobs) == pytest.approx(again, abs=1e-4)
    return scored


def test_models_that_learn_at_once_become_what_each_becomes_alone() -> None:
    with kitae.primitives.open("tiny", engine=EngineConfig(memory_gb=0.1), dtype="float32", device="cuda") as bench:
        with ThreadPoolExecutor(3) as threads:
            together = list(threads.map(lambda rank: train(bench, rank), (2, 8, 3)))
        for rank, found in zip((2, 8, 3), together, strict=True):
            assert found == pytest.approx(train(bench, rank), abs=1e-4)
