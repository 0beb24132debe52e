"""A teacher behind a server: what is asked, what is read, and what is refused."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_server import FakeServer, Reply, Request, run_tidily
from test_frozen_teacher import PROMPT, SAMPLES, make_sample
from trainer_workers import make_worker

from kitae.clients.service import Service
from kitae.errors import ModelError, RemoteError
from kitae.models.policy import Policy
from kitae.trainer.base import Column
from kitae.trainer.local_trainer import LocalTrainer
from kitae.trainer.teacher.served_teacher import ServedTeacher


def service(url: str, **settings: Any) -> Service:
    return Service(base_url=url, model="large", backoff=0.01, **settings)


def invented(number: int, place: int) -> float:
    return -0.01 * number - 0.001 * place


def echo(request: Request, names: Callable[[int], str] = str) -> Reply:
    """As vLLM answers: the prompt with its log-probs, the first of them unknown, and a token more."""
    prompt = request.body["prompt"]
    logprobs = [None, *(invented(t, i) for i, t in enumerate(prompt) if i), -0.5]
    said = {"tokens": [*map(names, prompt), "x"], "token_logprobs": logprobs}
    return Reply({"choices": [{"text": "x", "logprobs": said}]})


def test_log_probs_of_the_loss_tokens_are_asked_for_by_number() -> None:
    async def body() -> None:
        async with FakeServer(echo) as server:
            found = await ServedTeacher(service(server.url, concurrency=2)).score(SAMPLES)
            assert server.peak <= 2
            for sample, logp_N in zip(SAMPLES, found, strict=True):
                places = np.flatnonzero(sample.mask_T)
                expected = [invented(int(sample.tokens_T[t]), int(t)) for t in places]
                assert logp_N.tolist() == pytest.approx(expected)
            first = next(r for r in server.requests if r.body["prompt"] == SAMPLES[0].tokens_T.tolist())
            assert first.path == "/v1/completions"
            wanted = {"model": "large", "max_tokens": 1, "temperature": 1.0, "echo": True, "logprobs": 1}
            assert {k: v for k, v in first.body.items() if k != "prompt"} == wanted

    run_tidily(body())


def test_a_server_that_stumbles_is_asked_again_and_what_it_said_is_kept(tmp_path: Path) -> None:
    broken = [True]

    def handler(request: Request) -> Reply:
        return Reply(status=503) if broken and broken.pop() else echo(request)

    async def body() -> None:
        async with FakeServer(handler) as server:
            teacher = ServedTeacher(service(server.url, cache=str(tmp_path)))
            (first,) = await teacher.score(SAMPLES[:1])
            (again,) = await teacher.score(SAMPLES[:1])
            assert len(server.requests) == 2, "one that failed, one that was answered, none for the second time"
            assert first.tolist() == again.tolist()

    run_tidily(body())


def answer(logprobs: Any) -> Reply:
    return Reply({"choices": [{"logprobs": {"token_logprobs": logprobs}}]})


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (answer([None, -1.0]), "must repeat the prompt with log-probs (echo), got 2 of them for 5 tokens"),
        (answer([None] * 6), "the teacher must give a log-prob of every token, got None"),
        (answer([-float("inf")] * 6), "the teacher must give a log-prob of every token, got -inf"),
        (Reply({"choices": []}), "must answer with choices[0].logprobs.token_logprobs, got {'choices': []}"),
        (Reply({"choices": [{"logprobs": None}]}), "must answer with choices[0].logprobs.token_logprobs"),
        (Reply({"error": "no echo"}, status=400), "HTTP 400"),
    ],
)
def test_answers_without_log_probs_are_refused(reply: Reply, message: str) -> None:
    async def body() -> None:
        async with FakeServer(lambda _: reply) as server:
            with pytest.raises(RemoteError) as caught:
                await ServedTeacher(service(server.url)).score([make_sample([7])])
            assert message in str(caught.value)

    asyncio.run(body())


def test_the_check_compares_what_the_numbers_mean(tiny_policy: Callable[..., Policy]) -> None:
    tokenizer = tiny_policy("llama").tokenizer

    async def body() -> None:
        async with FakeServer(lambda r: echo(r, lambda t: tokenizer.decode([t]))) as server:
            await ServedTeacher(service(server.url)).check(tokenizer)
            assert tokenizer.decode(server.requests[0].body["prompt"]).startswith("The quick brown fox")
        async with FakeServer(lambda r: echo(r, lambda t: f"token_id:{t}")) as server:
            await ServedTeacher(service(server.url)).check(tokenizer)
        async with FakeServer(lambda r: echo(r, lambda t: tokenizer.decode([t + 1]))) as server:
            with pytest.raises(ModelError, match=r"must have the student's vocabulary, got 'U' from .* 'T' of the"):
                await ServedTeacher(service(server.url)).check(tokenizer)

    asyncio.run(body())


def test_a_trainer_asks_it_beside_its_own_work(tiny_policy: Callable[..., Policy]) -> None:
    async def body() -> None:
        async with FakeServer(echo) as server:
            worker = make_worker(tiny_policy("llama"), reference=True)
            trainer = LocalTrainer(worker, ServedTeacher(service(server.url)))
            found = await trainer.annotate(SAMPLES, [Column.OLD, Column.TEACHER, Column.REFERENCE])
            for sample, given in zip(found, SAMPLES, strict=True):
                assert sample.key == given.key
                assert {"logp_old", "logp_ref", "logp_teacher"} <= sample.columns.keys()
                places = np.flatnonzero(sample.mask_T)
                expected = [invented(int(sample.tokens_T[t]), int(t)) for t in places]
                assert sample.loss("logp_teacher").tolist() == pytest.approx(expected)
                assert (sample.columns["logp_teacher"][: len(PROMPT)] == 0).all()
                assert not np.allclose(sample.loss("logp_old"), sample.loss("logp_teacher"), atol=0.1)
            only = await trainer.annotate(SAMPLES, [Column.OLD])
            assert all("logp_teacher" not in s.columns for s in only)
            await trainer.close()

    asyncio.run(body())
