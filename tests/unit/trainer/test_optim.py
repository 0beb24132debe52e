"""AdamW on fp32 masters, schedules, clipping, state."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kitae.models.policy import Policy
from kitae.trainer.config import TrainingConfig
from kitae.trainer.optim import Optimizer, learning_rate
from kitae.trainer.trainer import Trainer


def test_schedules() -> None:
    warm = TrainingConfig(lr=1.0, warmup_steps=4)
    assert [learning_rate(warm, i, 10) for i in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    linear = TrainingConfig(lr=1.0, schedule="linear")
    assert learning_rate(linear, 5, 10) == 0.5 and learning_rate(linear, 10, 10) == 0.0
    cosine = TrainingConfig(lr=1.0, schedule="cosine", warmup_steps=2)
    assert learning_rate(cosine, 2, 10) == 1.0 and math.isclose(learning_rate(cosine, 6, 10), 0.5)


def test_bf16_parameters_follow_fp32_masters() -> None:
    """Steps too small for bf16 must add up in the master and show in the parameter eventually."""
    parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = Optimizer([("w", parameter)], TrainingConfig(lr=1e-4), 100)
    for _ in range(50):
        parameter.float().sum().backward()
        optimizer.step()
        assert parameter.grad is None and optimizer.masters[0].grad is None
    assert torch.allclose(optimizer.masters[0], torch.full((4,), 1 - 50e-4), atol=1e-5)
    assert (parameter == optimizer.masters[0].bfloat16()).all() and (parameter < 1).all()


def test_gradients_of_micro_batches_add_up_in_fp32() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = Optimizer([("w", parameter)], TrainingConfig(), 1)
    for _ in range(300):  # in bf16 the sum would stick at 256
        parameter.sum().backward()
    assert optimizer.masters[0].grad is not None and optimizer.masters[0].grad.item() == 300


def test_clipping_and_non_finite_gradients() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = Optimizer([("w", parameter)], TrainingConfig(lr=1e-2, clip_norm=1.0), 10)
    parameter.grad = torch.full((4,), 100.0)
    assert optimizer.step()["grad_norm"] == pytest.approx(200.0)
    before = parameter.detach().clone()
    parameter.grad = torch.full((4,), float("nan"))
    assert optimizer.step()["skipped_updates"] == 1.0
    assert torch.equal(parameter, before)


def test_state_round_trip(tiny_policy: Callable[..., Policy], tmp_path: Path) -> None:
    """A loaded trainer continues exactly as the saved one would have."""

    def step(trainer: Trainer) -> None:
        for p in trainer.optimizer.parameters:
            p.grad = torch.ones_like(p)
        trainer.optim_step()

    first = Trainer(tiny_policy(), TrainingConfig(lr=1e-3, schedule="linear", steps=9), temperature=1.0)
    step(first), step(first)
    first.save_state(tmp_path)
    second = Trainer(tiny_policy(), TrainingConfig(lr=1e-3, schedule="linear", steps=9), temperature=1.0)
    second.load_state(tmp_path, updates=2)
    step(first), step(second)
    for a, b in zip(first.optimizer.parameters, second.optimizer.parameters, strict=True):
        assert torch.equal(a, b)
