"""A served reward model gives the scores of the process behind it, and a verifier can use its address."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from served import client_of, post, refusal
from starlette.applications import Starlette

from kitae.clients.addresses import address_of, listen
from kitae.clients.http_client import close_clients
from kitae.data.chat import Chat
from kitae.data.messages import read_messages
from kitae.models.classifier import export_scalar, load_scalar
from kitae.models.config import ModelConfig
from kitae.models.policy import Policy
from kitae.models.scalar import ScalarModel
from kitae.models.scorer import Scorer
from kitae.serving.server_settings import ServerSettings
from kitae.serving.start_server import is_reward_model, open_rewards
from kitae.types import Message
from kitae.verifiers.verifier_registry import VERIFIERS

QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 6 times 7?"}]


@pytest.fixture
def folder(tiny_policy: Callable[..., Policy], tmp_path: Path) -> Path:
    model = ScalarModel(tiny_policy(), bias=False)
    with torch.no_grad():
        model.head.weight.copy_(0.1 * torch.randn(model.head.weight.shape, generator=torch.Generator().manual_seed(7)))
    export_scalar(model, tmp_path / "reward")
    return tmp_path / "reward"


def config(folder: Path) -> ModelConfig:
    return ModelConfig(path=str(folder), dtype="float32", device="cpu")


def expected(folder: Path, answers: list[str]) -> list[float]:
    """The same scores, without a process, one at a time."""
    model = load_scalar(config(folder))
    scorer = Scorer(model, Chat(model.policy.tokenizer, model.policy.base.generation_config))
    prompt = read_messages(QUESTION)
    return [float(scorer.score([(*prompt, Message("assistant", answer))])[0]) for answer in answers]  # type: ignore[arg-type]


@pytest.mark.thorough
def test_scores_of_one_and_of_several_and_by_a_verifier(folder: Path, tiny_folder: Callable[[str], Path]) -> None:
    assert is_reward_model(folder) and not is_reward_model(tiny_folder("llama"))

    async def use(client: httpx.AsyncClient) -> None:
        answers = [f"It is {n}." for n in range(6)]
        items = [{"messages": QUESTION, "response": answer} for answer in answers]
        several = await post(client, "/v1/score", model="reward", items=items)
        scores = [row["score"] for row in several["data"]]
        assert scores == pytest.approx(expected(folder, answers), abs=1e-5) and len(set(scores)) == 6
        (one,) = (await post(client, "/v1/score", **items[2]))["data"]
        said = [*QUESTION, {"role": "assistant", "content": answers[2]}]
        (same,) = (await post(client, "/v1/score", messages=said))["data"]
        assert one["score"] == pytest.approx(scores[2], abs=1e-5) == same["score"]
        (pair,) = (await post(client, "/v1/score", text_1="Hi", text_2="Ho"))["data"]
        assert isinstance(pair["score"], float)

    async def refused(client: httpx.AsyncClient) -> None:
        for body, message in (
            ({}, "must have messages"),
            ({"messages": QUESTION}, "must have a response, or end with a message of the assistant"),
            ({"items": []}, "a list of 1 to 1024 objects"),
            ({"items": [{"messages": QUESTION, "answer": "x"}]}, r"unknown field 'answer'"),
            ({"messages": QUESTION, "response": 5}, "the response must be a text"),
            ({"messages": QUESTION, "response": "x" * 600}, "must fit into 512 tokens"),
            ({"messages": [{"role": "who", "content": "x"}], "response": "x"}, "role of a message must be one of"),
        ):
            assert message in (await refusal(client, "/v1/score", 400, **body))["message"]
        mixed = await post(
            client, "/v1/score", items=[{"messages": QUESTION, "response": text} for text in ("a", "x" * 600)]
        )
        assert "score" in mixed["data"][0] and "must fit" in mixed["data"][1]["error"]
        assert "/v1/score alone" in (await refusal(client, "/v1/chat/completions", 404))["message"]

    async def verified(app: Starlette) -> None:
        taken = listen("127.0.0.1", 0)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", ws="none"))
        serving = asyncio.create_task(server.serve(sockets=[taken]))
        params: dict[str, Any] = {
            "base_url": address_of(taken, "127.0.0.1") + "/v1",
            "model": "reward",
            "style": "kitae",
        }
        verifier = VERIFIERS["reward_model"]
        assert verifier.prepare is not None
        score = verifier.prepare(params).score
        found = await score("It is 42.", None, {"prompt_messages": QUESTION}, **params)  # type: ignore[misc]
        assert found.value == pytest.approx(expected(folder, ["It is 42."])[0], abs=1e-5)
        long = await score("x" * 600, None, {"prompt_messages": QUESTION}, retries=0, **params)  # type: ignore[misc]
        assert not long.valid and "must fit into 512 tokens" in long.detail
        wrong = await score("x", None, {"question": "q"}, template="{response}", **params)  # type: ignore[misc]
        assert "template must be empty with style kitae" in wrong.detail
        await close_clients()
        server.should_exit = True
        await serving

    async def run() -> None:
        async with open_rewards(config(folder), ServerSettings("reward")) as app, client_of(app) as client:
            await use(client)
            await refused(client)
            await verified(app)

    asyncio.run(asyncio.wait_for(run(), 120))
