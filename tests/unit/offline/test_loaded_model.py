"""A loaded model that is asked."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kitae.engines.base import SamplingParams
from kitae.engines.config import EngineConfig
from kitae.errors import ConfigError, EngineError, ModelError
from kitae.models.config import ModelConfig
from kitae.offline.loaded_model import LoadedModel

CHEAP = EngineConfig(memory_gb=0.05)


@pytest.fixture(scope="module")
def model(tiny_folder: Callable[[str], Path]) -> Iterator[LoadedModel]:
    with LoadedModel(ModelConfig(path=str(tiny_folder("llama")), dtype="float32", device="cpu"), CHEAP) as found:
        yield found


def test_the_same_seed_gives_the_same_answers(model: LoadedModel) -> None:
    answers = model.generate("Hello", 3, max_tokens=8)
    assert len(set(answers)) == 3
    assert model.generate("Hello", 3, max_tokens=8) == answers
    assert model.generate("Hello", 3, max_tokens=8, seed=1) != answers
    assert model.generate([{"role": "user", "content": "Hello"}], 3, max_tokens=8) == answers
    greedy = model.generate("Hello", 2, max_tokens=8, temperature=0)
    assert greedy[0] == greedy[1]


def test_many_prompts_are_asked_together_and_nobody_judges(model: LoadedModel) -> None:
    first, second = model.sample(["one", "two"], 2, SamplingParams(max_tokens=4))
    assert [len(g.rollouts) for g in (first, second)] == [2, 2]
    assert first.prompt.messages[0].content == "one"
    assert all(r.score is None and 0 < r.response_length <= 4 for r in second.rollouts)


def test_threads_and_running_event_loops_may_ask(model: LoadedModel) -> None:
    alone = model.generate("Hello", 2, max_tokens=6)

    async def inside() -> list[str]:
        return model.generate("Hello", 2, max_tokens=6)

    assert asyncio.run(inside()) == alone
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda _: model.generate("Hello", 2, max_tokens=6), range(3))) == [alone] * 3


def test_what_cannot_be_asked(model: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="n must be at least 1, got 0"):
        model.generate("Hello", 0)
    with pytest.raises(EngineError):
        model.generate("long " * 5000, 1)
    assert model.generate("Hello", 1, max_tokens=2)  # the others are unharmed
    with pytest.raises(ModelError, match="neither a folder"):
        LoadedModel(ModelConfig(path="smolm"), CHEAP)


def test_a_closed_model_answers_no_more(tiny_folder: Callable[[str], Path]) -> None:
    closed = LoadedModel(ModelConfig(path=str(tiny_folder("llama")), dtype="float32", device="cpu"), CHEAP)
    closed.close()
    closed.close()
    with pytest.raises(EngineError, match="closed"):
        closed.generate("Hello")
