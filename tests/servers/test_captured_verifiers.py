"""Environments of the package `verifiers`, as it is, through `env.name = "verifiers"`."""

import asyncio
from typing import Any

import pytest
from captured import CLEAN, HERE, Captured, episode, interpreter

from kitae.data.tasks import find_task
from kitae.envs.config import EnvConfig
from kitae.envs.environment_registry import open_world
from kitae.envs.prime_verifiers.prime_world import VerifiersWorld
from kitae.errors import ConfigError
from kitae.types import Message, Prompt

KINDS = {"guess_v1": "verifiers", "guess_legacy": "verifiers-legacy"}


def world(environment: str, /, **params: Any) -> VerifiersWorld:
    python = str(interpreter(KINDS[environment]))
    given = {"environment": environment, "python": python, "folder": str(HERE / "environments")}
    opened = open_world(EnvConfig(name="verifiers", params={**given, "variables": CLEAN, **params}))
    assert isinstance(opened, VerifiersWorld)
    return opened


def seeds(split: str) -> list[int]:
    return [n for n in range(100) if find_task("episodes").split_of(f"Episode {n}") == split]


def play(made: VerifiersWorld, seed: int, *answers: str) -> Captured:
    question = f"Episode {seed}"
    prompt = Prompt("episodes/train/0", (Message("user", question),), str(seed), {"question": question})
    return asyncio.run(episode(made, prompt, answers))


@pytest.mark.parametrize("environment", KINDS)
def test_three_turns_and_their_reward(environment: str) -> None:
    seed = seeds("train")[3]
    made = world(environment)
    captured = play(
        made, seed, " one\n", "two", "it is 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18"
    )
    captured.check(chains=1)
    captured.check_as_native()
    assert made.sizes == {"train": 18, "eval": 2}
    assert captured.rollout.score is not None and captured.rollout.score.value == 1.0
    assert [m.role for m in captured.rollout.transcript] == ["system", "user", *["assistant", "user"] * 2, "assistant"]


@pytest.mark.parametrize("environment", KINDS)
def test_held_out_seeds_lead_to_held_out_tasks(environment: str) -> None:
    asked = {}
    for split in ("train", "eval"):
        captured = play(world(environment, args={"count": 8}), seeds(split)[1], "no")
        asked[split] = captured.asks[0].messages[1].content
        assert captured.rollout.score is not None and captured.rollout.score.value < 1
    assert asked["eval"] == "Guess number 7." and asked["train"] != asked["eval"]


@pytest.mark.parametrize(
    ("environment", "params", "rule"),
    [
        ("guess_v1", {"args": {"counts": 3}}, "counts"),
        ("guess_v1", {"environment": "no_such_environment"}, "no_such_environment"),
        ("guess_legacy", {"args": {"counts": 3}}, "counts"),
        ("guess_legacy", {"settings": {"agent": {}}}, "settings are for verifiers.v1 alone, got agent"),
        ("guess_v1", {"python": "/usr/bin/python3"}, "there is no package verifiers"),
    ],
)
def test_what_cannot_be_loaded_is_told_before_a_model_is(environment: str, params: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        play(world(environment, **params), 1, "no")
