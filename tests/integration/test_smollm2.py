"""The real demo model: engine, trainer and plain transformers agree, and a step runs in the dtype of the machine."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import rows, run_config
from transformers import AutoModelForCausalLM

from kitae.algorithms.config import AlgorithmConfig
from kitae.config.locate import find_recipe
from kitae.config.recipe import load_config
from kitae.data.chat import Chat
from kitae.data.prompt_stream import open_stream
from kitae.engines.base import Completion, Request, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.errors import ModelError
from kitae.models.config import ModelConfig
from kitae.models.load import SMOLLM2, find_model, load_policy
from kitae.models.policy import Policy
from kitae.run.recompute_step import replay
from kitae.trainer.base import Column
from kitae.trainer.build_worker import reinforced
from kitae.trainer.config import TrainingConfig
from kitae.trainer.local_trainer import LocalTrainer
from kitae.types import Sample


def _present() -> bool:
    try:
        return find_model(SMOLLM2, download=False) is not None
    except ModelError:
        return False


pytestmark = pytest.mark.skipif(not _present(), reason="the demo model is not installed")


@pytest.mark.sentinel
def test_engine_trainer_and_generate_agree_in_fp32() -> None:
    policy = load_policy(ModelConfig(path=SMOLLM2, dtype="float32"))
    chat = Chat(policy.tokenizer, policy.base.generation_config)
    stream = open_stream(load_config(find_recipe("quickstart")).data, 0)
    prompts = [chat.encode_prompt(stream.at(i).messages) for i in range(2)]
    greedy = [Request(f"g{i}", p, SamplingParams(0.0, 5), 0) for i, p in enumerate(prompts)]
    sampled = [
        Request(f"{i}/{j}", p, SamplingParams(1.0, 5, stop_tokens=chat.stop_tokens), 10 * i + j, share=f"{i}")
        for i, p in enumerate(prompts)
        for j in range(2)
    ]

    async def run() -> list[Completion]:
        engine = NativeEngine(policy, EngineConfig(memory_gb=0.3))
        try:
            return await asyncio.gather(*(engine.generate(r) for r in greedy + sampled))
        finally:
            await engine.close()

    done = asyncio.run(run())
    model = AutoModelForCausalLM.from_pretrained(find_model(SMOLLM2), dtype=torch.float32)
    for prompt, completion in zip(prompts, done, strict=False):
        row = torch.tensor([prompt])
        whole = torch.ones_like(row)  # its padding token also closes turns: without a mask those would be ignored
        expected = model.generate(row, attention_mask=whole, do_sample=False, max_new_tokens=5, eos_token_id=None)
        assert list(completion.tokens) == expected[0, len(prompt) :].tolist()
    answers = zip(sampled, done[len(greedy) :], strict=True)
    samples = [_sample(i, r.prompt_tokens, c) for i, (r, c) in enumerate(answers)]
    gap = max(float(np.abs(s.loss("logp_old") - s.loss("logp_mu")).max()) for s in _annotated(policy, samples))
    assert gap < 1e-4, gap


@pytest.mark.slow
def test_exact_mode_leaves_no_gap() -> None:
    """As tests/unit/models/test_exact.py has it of tiny models."""
    policy = load_policy(ModelConfig(path=SMOLLM2, dtype="bfloat16", exact=True))
    chat = Chat(policy.tokenizer, policy.base.generation_config)
    stream = open_stream(load_config(find_recipe("quickstart")).data, 0)
    asked = [
        Request(f"{i}/{j}", chat.encode_prompt(stream.at(i).messages), SamplingParams(1.0, 4), 10 * i + j, share=f"{i}")
        for i in range(2)
        for j in range(2)
    ]

    async def run(requests: list[Request]) -> list[Completion]:
        engine = NativeEngine(policy, EngineConfig(memory_gb=0.3))
        try:
            return await asyncio.gather(*(engine.generate(r) for r in requests))
        finally:
            await engine.close()

    done = asyncio.run(run(asked))
    assert asyncio.run(run(asked[3:])) == done[3:]
    samples = [_sample(i, r.prompt_tokens, c) for i, (r, c) in enumerate(zip(asked, done, strict=True))]
    assert all((s.loss("logp_old") == s.loss("logp_mu")).all() for s in _annotated(policy, samples))


def _annotated(policy: Policy, samples: list[Sample]) -> list[Sample]:
    """With the trainer's log-probs."""
    worker = reinforced(policy, TrainingConfig(), AlgorithmConfig(), max_tokens=12, temperature=1.0)
    return asyncio.run(LocalTrainer(worker).annotate(samples, [Column.OLD]))


def _sample(index: int, prompt: tuple[int, ...], done: Completion) -> Sample:
    tokens = np.array(prompt + done.tokens)
    mask = np.arange(len(tokens)) >= len(prompt)
    mu = np.zeros(len(tokens), dtype=np.float32)
    mu[mask] = done.logprobs
    return Sample(index // 2, index, tokens, len(prompt), mask, np.zeros_like(mu), {"logp_mu": mu})


def test_the_quickstart_recipe_takes_a_step(tmp_path: Path) -> None:
    small = ["training.steps=1", "training.prompts_per_step=4", "training.group_size=4", "eval.prompts=1"]
    result = run_config(load_config(find_recipe("quickstart"), [f"run.dir={tmp_path}", *small]))
    (step,) = [r for r in rows(result.folder) if r["kind"] == "step"]
    assert step["errors"] == 0 and step["truncated"] < 0.5 and step["logp_gap"] < 0.1
    assert (result.folder / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_quickstart_learns(tmp_path: Path) -> None:
    result = run_config(load_config(find_recipe("quickstart"), [f"run.dir={tmp_path}"]))
    assert result.before and result.after
    assert result.after["avg"] - result.before["avg"] >= 0.4, (result.before["avg"], result.after["avg"])


@pytest.mark.slow
def test_a_step_can_be_computed_again_to_the_last_bit(tmp_path: Path) -> None:
    """In the dtype of the machine, by a process with no engine and another number of threads."""
    small = [
        "training.steps=2", "training.prompts_per_step=2", "training.group_size=4", "eval.prompts=0",
        "sampling.max_tokens=24", "checkpoint.every=1", "checkpoint.keep=2", "training.lr=1e-5",
    ]  # fmt: skip
    torch.set_num_threads(2)
    result = run_config(load_config(find_recipe("quickstart"), [f"run.dir={tmp_path}", *small]))
    torch.set_num_threads(1)
    found = replay(result.folder, 2, lambda text: None)
    assert found.numbers.keys() >= {"loss", "grad_norm"} and found.difference == 0, found
    assert torch.get_num_threads() == 1
