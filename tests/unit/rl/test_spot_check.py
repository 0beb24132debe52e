"""Engines that lie in each way are found; rounding is not taken for a lie."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from short_settings import algorithm_of

from kitae.config.root import RLConfig
from kitae.engines.base import Completion, Engine, Request, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.errors import EngineError
from kitae.models.policy import Policy
from kitae.rl.spot_check import SpotCheck
from kitae.trainer.build_worker import reinforced
from kitae.trainer.config import TrainingConfig
from kitae.trainer.local_trainer import LocalTrainer
from kitae.types import Group, Prompt, Rollout, Score, Segment
from kitae.weights.probe import probe_tolerance

PROMPT = tuple(range(5, 17))
VERSION = 4
Lie = Callable[[Completion], Completion]


@dataclass
class Two:
    """Two servers behind one engine: `honest` answers even groups, the other one odd groups."""

    refused: list[tuple[str, str]]

    def sources(self, rollout: str) -> frozenset[str]:
        label, group, _ = rollout.split("/")
        assert label == "train"
        return frozenset({"liar" if int(group) % 2 else "honest"} if int(group) < 100 else ())

    async def refuse(self, source: str, why: str) -> None:
        self.refused.append((source, why))


def trainer_of(policy: Policy) -> LocalTrainer:
    algorithm = algorithm_of({"preset": "grpo"})
    return LocalTrainer(reinforced(policy, TrainingConfig(), algorithm, max_tokens=24, temperature=1.0))


async def sampled(policy: Policy, group: int, version: int = VERSION, lie: Lie = lambda done: done) -> Group:
    engine = NativeEngine(policy, EngineConfig(memory_gb=0.02), version)
    params = SamplingParams(max_tokens=24)
    asked = [Request(f"train/{group}/{i}/0", PROMPT, params, seed=10 * group + i) for i in range(3)]
    found = [lie(done) for done in await asyncio.gather(*map(engine.generate, asked))]
    await engine.close()
    return Group(group, Prompt(f"p/{group}", (), "1"), tuple(_rollout(group, i, done) for i, done in enumerate(found)))


def _rollout(group: int, index: int, done: Completion) -> Rollout:
    segment = Segment("model", done.tokens, done.logprobs, done.versions)
    return Rollout.of(group, index, PROMPT, (segment,), done.finish, "", Score(1.0))


@dataclass
class Findings:
    groups: tuple[Group, ...]
    numbers: dict[str, float]
    refused: list[str]


def examine(policy: Policy, groups: Sequence[Group], engine: Any, share: float = 1.0) -> Findings:
    refused: list[str] = []

    async def tell(sentence: str) -> None:
        refused.append(sentence)

    async def body() -> Findings:
        trainer, tolerance = trainer_of(policy), probe_tolerance(policy.dtype) / 2
        check = SpotCheck(trainer, engine, tell, share=share, tolerance=tolerance, seed=0)
        try:
            left, numbers = await check.examine(7, VERSION, groups)
            return Findings(tuple(left), numbers, refused)
        finally:
            await trainer.close()

    return asyncio.run(body())


def forged_tokens(done: Completion) -> Completion:
    return replace(done, tokens=tuple(np.random.default_rng(0).integers(3, 250, len(done.tokens)).tolist()))


def forged_logprobs(done: Completion) -> Completion:
    return replace(done, logprobs=(-0.1,) * len(done.tokens))


def one_forged_logprob(done: Completion) -> Completion:
    return replace(done, logprobs=(*done.logprobs[:-1], done.logprobs[-1] - 1.0))


def no_number(done: Completion) -> Completion:
    return replace(done, logprobs=(float("nan"), *done.logprobs[1:]))


def too_new(done: Completion) -> Completion:
    return replace(done, versions=(VERSION + 1,) * len(done.tokens))


LIES = [forged_tokens, forged_logprobs, one_forged_logprob, no_number, too_new]


@pytest.mark.parametrize("settings", [{"weights_dtype": "float8"}, {"cache_dtype": "int8"}])
def test_an_engine_that_rounds_may_differ_as_bfloat16_does(settings: dict[str, str]) -> None:
    config = RLConfig.model_validate(
        {"data": {"task": "sort"}, "engine": {"kind": "process", "spot_check": 1.0, **settings}}
    )
    learner: Any = SimpleNamespace(trainer=None)
    check = SpotCheck.of(config, learner, Two([]), probe_tolerance(torch.float32), None)  # type: ignore[arg-type]
    assert check is not None and check._tolerance == probe_tolerance(torch.bfloat16) / 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounding_is_no_lie(tiny_policy: Callable[..., Policy], dtype: str) -> None:
    policy = tiny_policy(dtype=dtype)
    groups = [asyncio.run(sampled(policy, group)) for group in range(4)]
    engine = Two([])
    found = examine(policy, groups, engine)
    assert found.groups == tuple(groups) and not found.refused and not engine.refused
    assert found.numbers["spot_checked"] == 12 and found.numbers["spot_refused"] == 0
    assert 0 <= found.numbers["spot_gap"] < probe_tolerance(policy.dtype) / 4


@pytest.mark.parametrize("lie", LIES)
def test_an_engine_that_lies_is_refused_by_name(tiny_policy: Callable[..., Policy], lie: Lie) -> None:
    policy = tiny_policy()
    groups = [asyncio.run(sampled(policy, group, lie=lie if group % 2 else (lambda done: done))) for group in range(4)]
    engine = Two([])
    found = examine(policy, groups, engine)
    assert [g.id for g in found.groups] == [0, 2], "what it sampled is not trained on"
    assert [source for source, _ in engine.refused] == ["liar"]
    assert found.numbers["spot_refused"] == 6
    assert all(sentence.startswith("engine liar is refused over rollout ") for sentence in found.refused)


def test_weights_that_are_older_than_it_says(tiny_policy: Callable[..., Policy]) -> None:
    policy = tiny_policy()
    stale = asyncio.run(sampled(policy, 1))
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(0)) * 0.02)
    fresh, engine = asyncio.run(sampled(policy, 2)), Two([])
    found = examine(policy, [stale, fresh], engine)
    assert [g.id for g in found.groups] == [2] and [name for name, _ in engine.refused] == ["liar"]


def test_an_older_version_that_is_called_so_may_differ_more(tiny_policy: Callable[..., Policy]) -> None:
    policy = tiny_policy()
    old = asyncio.run(sampled(policy, 1, VERSION - 2))
    forged = asyncio.run(sampled(policy, 3, VERSION - 2, forged_tokens))
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(0)) * 0.005)
    engine = Two([])
    found = examine(policy, [old], engine)
    assert found.groups == (old,) and not engine.refused
    found = examine(policy, [forged], engine)
    assert not found.groups and len(engine.refused) == 1


def test_a_share_is_enough_for_all_that_an_engine_has_answered(tiny_policy: Callable[..., Policy]) -> None:
    policy = tiny_policy()
    groups = [asyncio.run(sampled(policy, group, lie=forged_tokens)) for group in (1, 3)]
    engine = Two([])
    found = examine(policy, groups, engine, share=0.1)
    assert found.numbers["spot_checked"] == 1 and found.numbers["spot_refused"] == 6 and not found.groups


def test_a_rollout_of_nobody_is_refused_alone(tiny_policy: Callable[..., Policy]) -> None:
    policy, engine = tiny_policy(), Two([])
    groups = [asyncio.run(sampled(policy, 101, lie=forged_tokens))]
    found = examine(policy, groups, engine)
    assert not engine.refused and not found.groups
    assert found.refused[0].startswith("rollout 101/0 is refused, of an unknown engine: ")


def test_an_engine_alone_ends_the_run(tiny_policy: Callable[..., Policy]) -> None:
    policy = tiny_policy()
    engine: Engine = NativeEngine(policy, EngineConfig(memory_gb=0.02))
    groups = [asyncio.run(sampled(policy, 1, lie=forged_logprobs))]
    with pytest.raises(EngineError, match="the engine cannot have sampled rollout 1/0 with the weights it says"):
        examine(policy, groups, engine)
    asyncio.run(engine.close())
