"""Exact mode on a GPU: the tests of the CPU there, a training run, and a model with heads of 128."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kitae.models.config import ModelConfig
from kitae.models.load import load_policy

sys.path += [str(Path(__file__).parents[1] / part) for part in ("unit/models", "unit/kernels", "integration")]
from test_exact import (  # noqa: F401
    gap,
    generate,
    requests,
    test_a_copy_of_an_exact_policy_uses_its_own_weights,
    test_a_plain_engine_refuses_an_exact_policy,
    test_a_rollout_does_not_depend_on_the_others,
    test_gradients_are_those_of_the_plain_model,
    test_the_probe_finds_a_module_that_looks_at_its_neighbours,
    test_the_trainer_finds_what_the_engine_reported,
    test_without_exact_mode_there_is_a_gap,
    to_samples,
)
from test_exact_kernels import *  # noqa: F403

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture
def device() -> str:
    return "cuda"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_with_heads_of_128_in_large_batches(dtype: str, tmp_path: Path) -> None:
    from kitae.models.tiny import make_tiny

    make_tiny(tmp_path, "qwen2", hidden=512, layers=4)
    policy = load_policy(
        ModelConfig.model_validate({"path": str(tmp_path), "device": "cuda", "dtype": dtype, "exact": True})
    )
    asked = requests(40, 8)
    done, _ = generate(policy, asked, memory_gb=0.5)
    assert gap(policy, to_samples(asked, done)) == 0.0
    assert gap(policy, to_samples(asked, done), token_budget=300) == 0.0
    few: dict[str, Any] = {c.id: c for c in generate(policy, asked, memory_gb=0.5, max_batch=5)[0]}
    assert all(few[c.id].logprobs == c.logprobs and few[c.id].tokens == c.tokens for c in done)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_of_training_has_no_gap(dtype: str, tmp_path: Path) -> None:
    from test_exact_training import assert_no_gap

    assert_no_gap(tmp_path, f"model.dtype={dtype}", "model.device=cuda")
