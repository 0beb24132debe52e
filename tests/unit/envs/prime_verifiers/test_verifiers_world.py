"""Which task of an environment an episode plays, and what is refused. The real package: `make test-servers`."""

import asyncio
import sys

import pytest

from kitae.data.tasks import Split, find_task
from kitae.envs.config import EnvConfig
from kitae.envs.environment_registry import open_world
from kitae.envs.prime_verifiers.prime_adapter import HELD_OUT, Tasks
from kitae.envs.prime_verifiers.prime_world import task_of
from kitae.errors import ConfigError
from kitae.types import Message, Prompt


@pytest.mark.parametrize("count", [8, 9, 20, 64, 1000])
def test_splits_share_no_task_and_leave_none_out(count: int) -> None:
    tasks = Tasks(list(range(count)))
    sizes = tasks.sizes()
    found = {split: {tasks.pick(number, split) for number in range(3 * count)} for split in ("train", "eval")}
    assert {split: len(numbers) for split, numbers in found.items()} == sizes
    assert sizes["eval"] == count // HELD_OUT
    assert found["train"] | found["eval"] == set(range(count)) and not found["train"] & found["eval"]


def test_tasks_that_are_held_out_by_the_environment() -> None:
    tasks = Tasks([1, 2, 3], [10, 20])
    assert tasks.sizes() == {"train": 3, "eval": 2}
    assert [tasks.pick(n, "eval") for n in range(3)] == [10, 20, 10] and tasks.pick(4, "train") == 2


def test_what_is_not_there() -> None:
    with pytest.raises(SystemExit, match="no task for the split 'eval': it has 3 in all"):
        Tasks([1, 2, 3]).pick(0, "eval")
    with pytest.raises(SystemExit, match="there are 3 tasks, got number 3"):
        Tasks([1, 2, 3]).pick(3, "")


def test_a_seed_of_the_data_is_a_task() -> None:
    splits: tuple[Split, ...] = ("train", "eval")
    for split in splits:
        messages, reference = find_task("episodes").problem(0, split, {}, 5)
        prompt = Prompt("p", messages, reference, {"question": messages[-1].content})
        assert task_of(prompt) == {"number": int(reference), "split": split}
    own = Prompt("p", (Message("user", "Play."),), "", {"question": "Play.", "seed": 3})
    assert task_of(own) == {"number": 3, "split": ""}


@pytest.mark.parametrize(
    ("params", "rule"),
    [
        ({"python": sys.executable}, "environment: the environment 'verifiers' needs it"),
        ({"environment": "x", "python": "/nowhere/python"}, "must be an interpreter, got '/nowhere/python'"),
        ({"environment": "x", "python": sys.executable, "arg": {}}, "no such parameter"),
        ({"environment": "x", "python": "/bin/false"}, "cannot be loaded: it printed nothing"),
    ],
)
def test_bad_params(params: dict[str, str], rule: str) -> None:
    async def body() -> None:
        async with open_world(EnvConfig(name="verifiers", params=params)):
            pass

    with pytest.raises(ConfigError, match=rule):
        asyncio.run(body())
