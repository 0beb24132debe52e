"""The experts that an engine records on a GPU, where its decoding steps are CUDA graphs, and runs that repeat them."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kitae.engines.base import Completion
from kitae.engines.native.engine import NativeEngine
from kitae.models.policy import Policy
from kitae.models.tiny import MIXTURES

sys.path += [str(Path(__file__).parents[1] / part) for part in ("integration", "unit/engines")]

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
TinyPolicy = Callable[..., Policy]


@pytest.fixture(autouse=True)
def _exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("plain", [False, True], ids=["kernels", "plain"])
@pytest.mark.parametrize("architecture", MIXTURES)
def test_they_are_those_of_a_plain_pass(architecture: str, plain: bool, tiny_policy: TinyPolicy) -> None:
    from test_recorded_experts import all_of, asked, assert_all_recorded

    requests = asked(6)
    assert_all_recorded(tiny_policy(architecture), requests, lambda e: all_of(e, requests), plain=plain)


def test_graphs_write_at_the_places_of_each_step(tiny_policy: TinyPolicy) -> None:
    """In half precision, where the products of experts can be captured; rounding changes a choice now and then."""
    from test_recorded_experts import all_of, asked, recorded, with_engine

    policy, requests = tiny_policy("qwen3_moe", dtype="bfloat16"), asked(6)

    async def captured(engine: NativeEngine) -> list[Completion]:
        found = await all_of(engine, requests)
        steps = engine.runner._steps.values()  # type: ignore[attr-defined]
        assert steps and all(step._graph is not None for step in steps), "it is captured"
        return found

    same = []
    for request, done in zip(requests, with_engine(policy, captured), strict=True):
        expected = recorded(policy, (*request.prompt_tokens, *done.tokens))
        assert done.experts is not None and done.experts.shape == expected.shape
        same.append((np.sort(done.experts) == np.sort(expected)).all(-1)[len(request.prompt_tokens) :].ravel())
    assert np.concatenate(same).mean() > 0.9


def test_after_preemption(tiny_policy: TinyPolicy) -> None:
    from test_recorded_experts import assert_recorded_in_a_crowd

    assert_recorded_in_a_crowd(tiny_policy("qwen3_moe"))


@pytest.mark.parametrize("settings", [(), ("pipeline.max_staleness=1",)], ids=["on-policy", "ahead"])
def test_a_run_repeats_what_its_engine_chose(
    settings: tuple[str, ...], tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """In half precision, where engine and trainer may choose apart; a model as small as this one hardly does."""
    from harness import HERE, rows, run_toy

    common = (
        f"model.path={tiny_folder('qwen3_moe')}", "model.device=cuda", "model.dtype=bfloat16", "training.steps=4",
        "eval.prompts=0", f"verifier.name={HERE / 'toy.py'}:any_digit", *settings,
    )  # fmt: skip

    def steps(routing: str) -> list[dict[str, Any]]:
        return rows(run_toy(tmp_path / routing, *common, f"algorithm.experts.routing={routing}").folder)

    engine, own = steps("engine"), steps("own")
    assert engine[0]["routing_flips"] < 0.2
    assert engine[0]["logp_gap"] <= own[0]["logp_gap"], "the first step samples the same tokens"
