"""A reward model of one's own as a verifier: its process scores in batches, is replaced, and never makes up a score."""

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from kitae.data.chat import Chat
from kitae.errors import VerifierError
from kitae.models.classifier import export_scalar, load_scalar
from kitae.models.config import ModelConfig
from kitae.models.policy import Policy
from kitae.models.scalar import ScalarModel
from kitae.models.scorer import Scorer
from kitae.types import Message, Prompt
from kitae.verifiers.judge import talk_of
from kitae.verifiers.pool import VerifierPool
from kitae.verifiers.reward_model_process import load
from kitae.verifiers.reward_model_verifier import RewardService, prepare
from kitae.verifiers.verifier_registry import VERIFIERS

pytestmark = pytest.mark.usefixtures("warm_verifiers")

ASKED = {"question": "What is 6 times 7?"}
ANSWERS = [f"It is {n}." for n in range(40)]


@pytest.fixture
def reward_folder(tiny_policy: Callable[..., Policy], tmp_path: Path) -> Path:
    model = ScalarModel(tiny_policy(), bias=False)
    with torch.no_grad():
        model.head.weight.copy_(0.1 * torch.randn(model.head.weight.shape, generator=torch.Generator().manual_seed(7)))
    export_scalar(model, tmp_path / "reward")
    return tmp_path / "reward"


def here(folder: Path, answers: list[str]) -> list[float]:
    """The same scores, without a process, one at a time."""
    model = load_scalar(ModelConfig(path=str(folder), dtype="float32", device="cpu"))
    scorer = Scorer(model, Chat(model.policy.tokenizer, model.policy.base.generation_config))
    talks = [(Message("user", ASKED["question"]), Message("assistant", answer)) for answer in answers]
    return [float(scorer.score([talk])[0]) for talk in talks]  # type: ignore[arg-type]


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {"model": str(folder), "dtype": "float32", "device": "cpu", **more}


def test_answers_that_come_together_get_the_scores_they_would_get_alone(reward_folder: Path) -> None:
    async def run() -> None:
        params = options(reward_folder, center=-1.0, spread=2.0, clip=0.1)
        async with VerifierPool("reward_model", params) as pool:
            scores = await asyncio.gather(*(pool.score(answer, None, ASKED) for answer in [*ANSWERS, ""]))
            raw = [score.components["reward_raw"] for score in scores]
            assert raw == pytest.approx(here(reward_folder, [*ANSWERS, ""]), abs=1e-5)
            assert len(set(raw)) > 30
            assert [score.value for score in scores] == [min(max((x + 1) / 2, -0.1), 0.1) for x in raw]
            assert {score.value for score in scores} >= {0.1}
            again = [(await pool.score(answer, None, ASKED)).components["reward_raw"] for answer in ANSWERS[:3]]
            assert again == pytest.approx(raw[:3], abs=1e-5)
            long, nothing = await asyncio.gather(pool.score("x" * 600, None, ASKED), pool.score("x", None, {}))
            assert "must fit into 512 tokens, got 6" in long.detail
            assert "the question must be a text in the context, under question_key, got None" in nothing.detail
            assert pool.stats.errors == 2
            assert pool.gold(Prompt("p", (Message("user", "q"),), "42", gold="42")) is None

    asyncio.run(run())


def test_a_process_that_dies_or_hangs_costs_the_answer_that_is_to_blame(reward_folder: Path) -> None:
    """Death and silence are made from outside; the answer to blame is the one that is asked when they strike."""

    async def run() -> None:
        service = RewardService(**options(reward_folder, deadline=20.0))
        await service.start()
        try:
            first = pid = process_of(service)
            os.kill(pid, signal.SIGSTOP)  # so that the batch is on its way when the process dies
            asked = [asyncio.create_task(service.score(answer, None, ASKED)) for answer in ANSWERS[:4]]
            await asyncio.sleep(0.1)
            os.kill(pid, signal.SIGKILL)
            scores = await asyncio.gather(*asked)
            assert [s.components["reward_raw"] for s in scores] == pytest.approx(
                here(reward_folder, ANSWERS[:4]), abs=1e-5
            )
            pid = process_of(service)
            assert service.process.restarts == 1 and pid != first

            os.kill(pid, signal.SIGSTOP)
            alone = asyncio.create_task(service.score(ANSWERS[0], None, ASKED))
            await asyncio.sleep(0.1)
            os.kill(pid, signal.SIGKILL)
            score = await alone
            assert not score.valid and "its process died: killed by signal 9" in score.detail

            service.process.deadline = 0.1
            assert (await service.score(ANSWERS[0], None, ASKED)).valid
            os.kill(process_of(service), signal.SIGSTOP)  # stopped by others: ten times the deadline
            score = await service.score(ANSWERS[0], None, ASKED)
            assert not score.valid and "longer than its deadline of 0.1 s" in score.detail
            service.process.deadline = 20.0
            assert (await service.score(ANSWERS[0], None, ASKED)).valid
            assert service.process.restarts == 3

            os.kill(process_of(service), signal.SIGSTOP)
            left = asyncio.create_task(service.score(ANSWERS[0], None, ASKED))
            await asyncio.sleep(0.1)
        finally:
            await service.close()
        assert "it was closed" in (await left).detail

    asyncio.run(run())


def process_of(service: RewardService) -> int:
    assert service.process.pid is not None
    return service.process.pid


def test_the_protocol(reward_folder: Path) -> None:
    """What a server in front of it would speak."""
    setup = {"path": str(reward_folder), "device": "cpu", "dtype": "float32", "threads": 1}
    _, answer = load(setup)
    turns = [{"role": "user", "content": ASKED["question"]}]
    talks = [{"messages": turns, "response": ANSWERS[0]}, {"messages": [], "response": "x"}]
    fine, bad = answer({"id": 1, "talks": talks})["results"]
    assert fine["score"] == pytest.approx(here(reward_folder, ANSWERS[:1])[0], abs=1e-6)
    assert "a conversation must be a list of messages" in bad["error"]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"style": "pooling"}, "style is for a reward model behind a server: it needs base_url"),
        ({"base_url": "http://localhost", "threads": 2}, "threads is for a reward model that runs here"),
        ({"threads": 0}, "threads must be at least 1, got 0"),
        ({"deadline": 0}, "deadline must be above 0 seconds, got 0"),
        ({"dtype": "int8"}, "dtype must be auto, bfloat16 or float32, got 'int8'"),
        ({"clip": -1}, "clip must be at least 0, got -1"),
        ({"spread": 0}, "spread must be above 0, got 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(VerifierError, match=message):
        prepare({"model": "m", **params})


def test_what_is_no_reward_model_is_refused_when_the_pool_starts(tiny_folder: Callable[[str], Path]) -> None:
    async def start(model: str) -> None:
        async with VerifierPool("reward_model", {"model": model, "device": "cpu"}):
            pass

    with pytest.raises(VerifierError, match=r"'./missing'.*neither a folder"):
        asyncio.run(start("./missing"))
    with pytest.raises(VerifierError, match="must be a sequence classifier with 1 label, got LlamaForCausalLM"):
        asyncio.run(start(str(tiny_folder("llama"))))


def test_it_is_no_part_of_a_composition() -> None:
    """Whose workers would each load the model."""
    composition = VERIFIERS["compose"]
    assert composition.prepare is not None
    with pytest.raises(VerifierError, match="a model that runs here cannot be a part; give it a server and base_url"):
        composition.prepare({"parts": [{"name": "reward_model", "params": {"model": "runs/reward-001"}}]})
    composition.prepare({"parts": [{"name": "reward_model", "params": {"model": "m", "base_url": "http://x"}}]})


TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "2+2"},
]


@pytest.mark.parametrize(
    ("context", "messages", "response"),
    [
        ({"question": "q"}, [{"role": "user", "content": "q"}], "4"),
        ({"question": "q", "prompt_messages": TURNS[:1]}, TURNS[:1], "4"),
        ({"question": "q", "transcript": [*TURNS, {"role": "assistant", "content": "5"}]}, TURNS, "5"),
        ({"question": "q", "transcript": TURNS}, TURNS[:1], "Yes?"),
        ({"question": "q", "transcript": TURNS[:1]}, [{"role": "user", "content": "q"}], "4"),
    ],
)
def test_what_was_said(context: Mapping[str, Any], messages: list[Any], response: str) -> None:
    assert talk_of("4", context, "question") == {"messages": messages, "response": response}
