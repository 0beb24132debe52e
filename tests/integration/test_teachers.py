"""A teacher with strong preferences teaches a tiny student: it comes closer, and stopping changes nothing."""

import asyncio
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_server import FakeServer, Reply, Request
from harness import RECIPE, VERIFIER, assert_same_metrics, kitae, rows, run_config, toy_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from kitae.config.root import RLConfig
from kitae.errors import ConfigError, ModelError, RemoteError
from kitae.models.tiny import make_tiny
from kitae.observe.observer import Bystander, Silent
from kitae.run.plan import make_plan
from kitae.run.recompute_step import replay
from kitae.run.train_run import go_on, train
from kitae.store.run_folder import RunStore
from kitae.workers.process_status import family_of, state_of

SHORT = ("eval.prompts=0", "training.steps=4", "checkpoint.every=2")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose next token is nearly certain: half of its probability is on five of 259 tokens."""
    folder = make_tiny(tmp_path_factory.mktemp("teacher") / "tiny", seed=11, hidden=32)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight.mul_(4)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def distil(tmp_path: Path, teacher: Path) -> Callable[..., RLConfig]:
    def config(*overrides: str, name: str = "run") -> RLConfig:
        return toy_config(
            tmp_path / name, "method.kind=distil", f"method.teacher={teacher}", "eval.prompts=0", *overrides
        )

    return config


Config = Callable[..., RLConfig]


@pytest.mark.sentinel
@pytest.mark.parametrize(
    ("settings", "number"),
    [
        (("training.lr=1e-2",), "teacher_kl"),
        pytest.param(("training.lr=1e-2", "pipeline.max_staleness=1"), "teacher_kl", marks=pytest.mark.slow),
        (("training.lr=1e-2", "method.loss=jsd"), "teacher_divergence"),
        pytest.param(
            ("training.lr=3e-2", "method.loss=jsd", "method.beta=1", "model.lora_rank=8"),
            "teacher_divergence",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["reverse-kl", "stale", "jsd", "adapters"],
)
def test_the_student_comes_closer(settings: tuple[str, ...], number: str, distil: Config) -> None:
    found = rows(run_config(distil(*settings, "training.steps=14")).folder)
    values = [row[number] for row in found]
    assert np.mean(values[-3:]) < 0.7 * np.mean(values[:2]), [round(x, 3) for x in values]
    assert all("reward" in row and row["skipped_updates"] == 0 for row in found), "what is not trained on is reported"
    if number == "teacher_kl":
        assert found[-1]["teacher_agreement"] > found[0]["teacher_agreement"]


@pytest.mark.parametrize(
    "choices",
    [
        ("pipeline.max_staleness=1", "training.minibatches=2"),
        ("method.loss=jsd", "model.lora_rank=4"),
        ("algorithm.advantage.reward_coef=0.5", "algorithm.shaping.norm=running", "algorithm.kl=k1",
         "algorithm.kl.into=reward",
         "algorithm.kl.coef=0.1", "algorithm.reference=ema", "algorithm.reference.every=1"),
    ],
    ids=["stale", "jsd-and-adapters", "rewards-and-a-reference"],
)  # fmt: skip
def test_resumed_equals_uninterrupted(choices: tuple[str, ...], distil: Config, tmp_path: Path) -> None:
    whole = run_config(distil(*SHORT, *choices)).folder
    copy = shutil.copytree(whole, tmp_path / "copy")
    store = RunStore.open(copy)
    go_on(store, Bystander(Silent()), "step-000002")
    assert_same_metrics(copy, whole)
    for a, b in zip(rows(copy), rows(whole), strict=True):
        for key in ("teacher_kl", "teacher_agreement", "teacher_divergence", "kl_k1"):
            assert a.get(key) == pytest.approx(b.get(key), abs=1e-5), (a["step"], key)
    assert replay(whole, 4, print).difference <= 1e-5


def test_rewards_count_only_where_they_are_asked_for(distil: Config) -> None:
    """The same rollouts in the first step: without a coefficient, the verifier changes nothing."""
    first = ("training.steps=1", "checkpoint.every=1")
    plain = rows(run_config(distil(*first, name="plain")).folder)[0]
    unjudged = rows(run_config(distil(*first, "verifier.name=none", name="unjudged")).folder)[0]
    rewarded = rows(run_config(distil(*first, "algorithm.advantage.reward_coef=5", name="rewarded")).folder)[0]
    assert plain["reward"] > 0 and unjudged["reward"] == 0
    assert plain["grad_norm"] == pytest.approx(unjudged["grad_norm"], rel=1e-6)
    assert plain["teacher_kl"] == pytest.approx(rewarded["teacher_kl"], rel=1e-6)
    assert abs(plain["grad_norm"] - rewarded["grad_norm"]) > 1e-2 * plain["grad_norm"]


# A teacher in a process of its own.

APART = "method.teacher.place=process"


@pytest.mark.slow
def test_a_teacher_in_its_own_process_teaches_the_same_also_after_its_end(distil: Config, tmp_path: Path) -> None:
    """Values are equal, whatever happens to the process; and the run can be resumed and replayed."""
    here = run_config(distil(*SHORT, name="here")).folder
    config = distil(*SHORT, APART, name="there")
    killed: list[int] = []
    others = family_of(os.getpid())  # of other tests, which may have imported what teachers run

    def teachers() -> list[int]:
        return [pid for pid in family_of(os.getpid()) if pid not in others and _is_teacher(pid)]

    class Killer(Silent):
        def step(self, report: Any) -> None:
            if report.step == 2:
                worker = teachers()[-1]  # the last is the youngest
                killed.append(worker)
                os.kill(worker, signal.SIGKILL)

    there = train(config, Bystander(Killer())).folder
    assert killed and [row["teacher_restarts"] for row in rows(there)] == [0, 0, 1, 0]
    for a, b in zip(rows(here), rows(there), strict=True):
        for key in ("teacher_kl", "teacher_agreement", "loss", "grad_norm", "reward"):
            assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-6), (a["step"], key)  # what is sampled is rounded
    copy = shutil.copytree(there, tmp_path / "copy")
    store = RunStore.open(copy)
    go_on(store, Bystander(Silent()), "step-000002")
    for a, b in zip(rows(copy), rows(there), strict=True):
        assert a["teacher_kl"] == pytest.approx(b["teacher_kl"], abs=1e-6)
    assert replay(there, 4, print).difference <= 1e-5
    assert not teachers(), "none is left"


def _is_teacher(pid: int) -> bool:
    try:
        return b"from kitae.trainer.teacher.teacher_main import" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.slow
def test_no_teacher_survives_a_run_that_is_killed(distil: Config, teacher: Path, tmp_path: Path) -> None:
    run = tmp_path / "orphans" / "toy-001"
    process = kitae(
        *("train", str(RECIPE), VERIFIER, f"run.dir={run.parent}", "method.kind=distil", f"method.teacher={teacher}"),
        *(APART, "eval.prompts=0", "training.steps=500"),
    )
    try:
        until = time.monotonic() + 100
        while not ((run / "metrics.jsonl").exists() and rows(run)):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        teachers = [pid for pid in family_of(process.pid)[1:] if _is_teacher(pid)]
        assert len(teachers) == 2, "a template and its worker"
    finally:
        process.kill()
        process.ended()
    until = time.monotonic() + 20
    while left := [pid for pid in teachers if state_of(pid) not in ("", "Z")]:
        assert time.monotonic() < until, f"orphans: {left}"
        time.sleep(0.05)


# A teacher behind a server.


@pytest.fixture
def served(teacher: Path) -> Iterator[tuple[str, list[int]]]:
    """The teacher as a server would run it, in a thread of its own; its address, and the lengths it was asked for."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(teacher), AutoTokenizer.from_pretrained(teacher)
    asked: list[int] = []

    def answer(request: Request) -> Reply:
        prompt = torch.tensor(request.body["prompt"])
        asked.append(len(prompt))
        with torch.no_grad():
            logp_TV = model(prompt[None]).logits[0].log_softmax(-1)
        logprobs = [None, *logp_TV[:-1].gather(1, prompt[1:, None])[:, 0].tolist(), -1.0]
        tokens = [tokenizer.decode([t]) for t in (*prompt, 0)]
        return Reply({"choices": [{"logprobs": {"tokens": tokens, "token_logprobs": logprobs}}]})

    loop, found, done = asyncio.new_event_loop(), [], threading.Event()
    ready = threading.Event()

    async def serve() -> None:
        async with FakeServer(answer) as server:
            found.append(server.url)
            ready.set()
            while not done.is_set():
                await asyncio.sleep(0.05)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait(10)
    yield found[0], asked
    done.set()
    thread.join()
    loop.close()


def remote(url: str, *settings: str) -> tuple[str, ...]:
    return ("method.teacher=", f"method.teacher.url={url}", "method.teacher.model=large", *settings)


def test_a_served_teacher_teaches_the_same(served: tuple[str, list[int]], distil: Config) -> None:
    url, asked = served
    settings = ("training.steps=3", "checkpoint.every=3")
    here = rows(run_config(distil(*settings, name="here")).folder)
    there = rows(run_config(distil(*settings, *remote(url), name="there")).folder)
    assert len(asked) == 1 + sum(row["samples_trained"] for row in there)
    for a, b in zip(here, there, strict=True):
        for key in ("teacher_kl", "teacher_agreement", "loss", "grad_norm"):
            assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-5), (a["step"], key)


# Refused before anything starts.


def refused(kind: type[Exception], config: RLConfig) -> str:
    with pytest.raises(kind) as caught:
        make_plan(config, print)
    return str(caught.value)


def test_a_server_that_is_down_is_found_out_at_once(distil: Config) -> None:
    message = refused(RemoteError, distil(*remote("http://127.0.0.1:9/v1")))
    assert message.startswith("method.teacher.url: http://127.0.0.1:9/v1/completions must answer within")


def test_a_teacher_that_is_not_there(distil: Config, tmp_path: Path) -> None:
    message = refused(ModelError, distil(f"method.teacher={tmp_path / 'nobody'}"))
    assert message.startswith("method.teacher: ") and "has no nobody" in message


def test_a_teacher_with_another_vocabulary(distil: Config, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    swapped: dict[str, Any] = {"a": tokenizer.get_vocab()["b"], "b": tokenizer.get_vocab()["a"]}
    file = folder / "tokenizer.json"
    text = file.read_text()
    for letter in "ab":
        number = tokenizer.get_vocab()[letter]
        text = text.replace(f'"{letter}": {number}', f'"{letter}": {swapped[letter]} ', 1)
    assert text != file.read_text()
    file.write_text(text)
    message = refused(ModelError, distil(f"method.teacher={folder}"))
    assert f"got 259 tokens of {folder} for 259 of tiny" in message
    assert "is number" in message and "of the student's" in message


def test_stages_of_ones_own_that_read_no_teacher(distil: Config, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("def plain(group):\n    return group.rewards_G\n")
    message = refused(ConfigError, distil(f"algorithm.advantage={own}:plain"))
    assert message == "method.loss = 'reverse-kl' must be what the stages read, got stages that read none of a teacher"
    own.write_text(
        "from kitae.algorithms.requirements import needs\n\n\n@needs('teacher', 'tokens')\n"
        "def taught(sequence):\n    return sequence.logp_teacher_T\n"
    )
    message = refused(ConfigError, toy_config(tmp_path / "rl", f"algorithm.advantage={own}:taught"))
    assert message == "a stage of the algorithm reads a teacher: it needs method.kind = 'distil', got 'rl'"
