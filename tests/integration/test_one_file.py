"""The one-file example: the tiny model learns from reward alone, and its pieces keep the promises its text makes."""

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "one_file_grpo.py"


@pytest.fixture
def example() -> Iterator[ModuleType]:
    threads = torch.get_num_threads()
    spec = importlib.util.spec_from_file_location("one_file_grpo", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]
    torch.set_num_threads(threads)


@pytest.mark.sentinel
def test_reward_rises_in_a_few_steps(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    example.main(["--model", "tiny", "--steps", "15", "--prompts", "32", "--lr", "3e-3"])
    rewards = [float(found) for found in re.findall(r"reward ([\d.]+)", capsys.readouterr().out)]
    assert len(rewards) == 15
    early, late = sum(rewards[:5]) / 5, sum(rewards[10:]) / 5
    assert late > 1.6 * early, rewards  # 2.6 times where it was measured; without learning about 1


@pytest.mark.slow
def test_tiny_model_learns_from_reward_alone(example: ModuleType) -> None:
    before = example.main(["--model", "tiny", "--steps", "0"])
    after = example.main(["--model", "tiny", "--steps", "80"])
    assert before <= 0.1
    assert after >= 0.9


def test_sampled_logprobs_match_the_trained_ones_despite_padding(example: ModuleType) -> None:
    torch.manual_seed(0)
    model, task = example.load("tiny")
    prompts = [[1, 10], [1, 2, 3, 4, 5, 10], [7, 8, 9, 10]]
    rollouts = example.sample(model, task, prompts, group=3)
    mask = rollouts.mask_BR
    assert mask.min() == 0, "the case needs responses of different lengths"

    trained = example.response_logprobs(model, rollouts)
    torch.testing.assert_close(trained * mask, rollouts.logprobs_BR * mask, atol=1e-5, rtol=0)

    for row, response in enumerate(rollouts.response_BR):
        prompt, length = prompts[row // 3], int(mask[row].sum())
        tokens = torch.tensor([prompt + response[:length].tolist()])
        logits = model(tokens).logits[0, len(prompt) - 1 : -1]
        alone = logits.log_softmax(-1).gather(1, response[:length, None])[:, 0]
        torch.testing.assert_close(rollouts.logprobs_BR[row, :length], alone, atol=1e-5, rtol=0)


def test_gradient_does_not_depend_on_the_rows_per_pass(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "MAX_GRAD_NORM", float("inf"))
    steps = []
    for rows_per_pass in (12, 5, 1):
        torch.manual_seed(0)
        model, task = example.load("tiny")
        rollouts = example.sample(model, task, [[1, 2, 3, 10], [5, 10], [7, 8, 10]], group=4)
        start = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        example.update(model, optimizer, rollouts, torch.linspace(-1, 1, 12), rows_per_pass)
        steps.append(torch.cat([(a - b).flatten() for a, b in zip(model.parameters(), start, strict=True)]).detach())
    assert steps[0].abs().max() > 1e-3
    torch.testing.assert_close(steps[1], steps[0], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(steps[2], steps[0], atol=1e-6, rtol=1e-4)
