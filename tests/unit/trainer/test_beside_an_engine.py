"""The trainer's arithmetic is its own: loss and gradient are the same to the last bit with an engine and without."""

import asyncio
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from short_settings import algorithm_with
from test_gradient import make_samples
from trainer_workers import column_of, forward_backward, make_worker, weighted

from kitae.algorithms.config import AlgorithmConfig
from kitae.engines.base import Request, SamplingParams, WeightUpdate
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.policy import Policy
from kitae.models.tiny import make_tiny
from kitae.trainer.base import Column
from kitae.trainer.config import TrainingConfig

SHAPES = [(g, 5 + 9 * g, 10 + (13 * g + 29 * i) % 40) for g in range(4) for i in range(4)]  # 480 tokens
WHEN = ("before the trainer", "after the trainer", "having generated")


def numbers(policy: Policy, when: str | None) -> list[dict[str, float]]:
    """What two updates report, with an engine beside them from some moment on, or with none."""

    algorithm = AlgorithmConfig(preset="grpo")

    async def run() -> list[dict[str, float]]:
        engine = NativeEngine(policy, EngineConfig(memory_gb=0.01)) if when and when != WHEN[1] else None
        worker = make_worker(policy, TrainingConfig(lr=1e-3), algorithm)
        if when == WHEN[1]:
            engine = NativeEngine(policy, EngineConfig(memory_gb=0.01))
        samples = weighted(make_samples(SHAPES, gaps=True), algorithm)
        found = []
        for version in (1, 2):
            if engine is not None and when == WHEN[2]:
                asked = [Request(f"{i}", (5, 6, 7, 8 + i), SamplingParams(1.0, 8), i) for i in range(3)]
                await asyncio.gather(*(engine.generate(r) for r in asked))
            metrics = (forward_backward(worker, samples, version) + worker.optim_step()).numbers()
            found.append({key: metrics[key] for key in ("loss", "grad_norm", "entropy", "ratio", "logp_gap")})
            if engine is not None:
                await engine.update_weights(WeightUpdate(version))
        if engine is not None:
            await engine.close()
        return found

    return asyncio.run(run())


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Policy]:
    """`loaded("qwen2", lora_rank=4)`: in bf16, wide enough for products of libraries to be cut in different ways."""

    def load(architecture: str, **settings: Any) -> Policy:
        folder: Path = tmp_path_factory.getbasetemp() / f"wide-{architecture}"
        if not folder.exists():
            make_tiny(folder, architecture, hidden=512)
        values = {"path": str(folder), "dtype": "bfloat16", "device": "cpu", **settings}
        return load_policy(ModelConfig.model_validate(values))

    return load


@pytest.fixture(scope="module")
def alone(loaded: Callable[..., Policy]) -> Callable[..., list[dict[str, float]]]:
    """`alone("qwen2", lora_rank=4)`: what is reported without an engine."""
    return cache(lambda architecture, **settings: numbers(loaded(architecture, **settings), None))


CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("llama", {"plain": True}),
    ("llama", {"lora_rank": 4}),
    ("llama", {"exact": True}),
]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [pytest.param(*case, marks=pytest.mark.slow) if case == ("qwen3", {}) else case for case in CASES],
    ids=str,
)
def test_an_engine_changes_no_bit(
    architecture: str, settings: dict[str, Any], loaded: Callable[..., Policy], alone: Callable[..., Any]
) -> None:
    expected = alone(architecture, **settings)
    assert expected[0]["grad_norm"] > 0 and expected[0] != expected[1]
    assert numbers(loaded(architecture, **settings), WHEN[2]) == expected


@pytest.mark.thorough
@pytest.mark.parametrize("when", WHEN[:2])
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])],
    ids=str,
)
def test_nor_does_one_that_rests(
    when: str,
    architecture: str,
    settings: dict[str, Any],
    loaded: Callable[..., Policy],
    alone: Callable[..., Any],
) -> None:
    assert numbers(loaded(architecture, **settings), when) == alone(architecture, **settings)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_copy_computes_what_the_policy_does(architecture: str, loaded: Callable[..., Policy]) -> None:
    """The reference starts as the policy: no KL, to the last bit."""
    policy = loaded(architecture)
    worker = make_worker(policy, algorithm=algorithm_with(kl_coef=0.1, reference="frozen"), reference=True)
    samples = make_samples(SHAPES)
    engine = NativeEngine(policy, EngineConfig(memory_gb=0.01))
    asyncio.run(engine.close())
    mine, theirs = (column_of(worker, samples, column) for column in (Column.OLD, Column.REFERENCE))
    assert all((torch.from_numpy(a) == torch.from_numpy(b)).all() for a, b in zip(mine, theirs, strict=True))
