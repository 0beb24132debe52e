"""AdamW on fp32 masters, schedules, clipping, state."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from workers import make_worker

from kitae.data.packing import Row
from kitae.models.policy import Policy
from kitae.trainer.base import Conditions, Role
from kitae.trainer.config import TrainingConfig
from kitae.trainer.optim import Optimizer, learning_rate
from kitae.trainer.worker import Worker


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
    assert optimizer.step().norm == pytest.approx(200.0)
    before = parameter.detach().clone()
    parameter.grad = torch.full((4,), float("nan"))
    assert not optimizer.step().applied
    assert torch.equal(parameter, before)


def test_state_round_trip(tiny_policy: Callable[..., Policy], tmp_path: Path) -> None:
    """A loaded trainer continues exactly as the saved one would have."""

    def step(worker: Worker) -> None:
        worker.forward_backward([Row.empty()], Conditions(), [Role.POLICY])
        for p in worker.policy.model.parameters():
            p.grad = torch.ones_like(p)
        assert worker.optim_step().numbers()["skipped_updates"] == 0

    training = TrainingConfig(lr=1e-3, schedule="linear", steps=9)
    first = make_worker(tiny_policy(), training)
    step(first), step(first)
    first.save(tmp_path)
    second = make_worker(tiny_policy(), training)
    second.load(tmp_path)
    assert second.updates == 2
    step(first), step(second)
    for a, b in zip(first.policy.model.parameters(), second.policy.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("before", ["float32", "bfloat16"])
@pytest.mark.parametrize("after", ["float32", "bfloat16"])
def test_moments_are_kept_as_asked(before: str, after: str) -> None:
    """Saved, loaded by an optimizer that keeps them otherwise, or the same way: then it goes on as if nothing was."""

    def make(moments: str) -> tuple[torch.nn.Parameter, Optimizer]:
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 300).bfloat16())
        return parameter, Optimizer([("w", parameter)], TrainingConfig(lr=1e-2, moments=moments), 100)

    def learn(parameter: torch.nn.Parameter, optimizer: Optimizer, steps: int) -> None:
        for i in range(steps):
            (parameter.float() * torch.linspace(1, 2, 300) * (i + 1)).sum().backward()
            assert optimizer.step().applied

    parameter, optimizer = make(before)
    learn(parameter, optimizer, 5)
    state = optimizer.state()
    assert {state[f"{key}.w"].dtype for key in ("exp_avg", "exp_avg_sq")} == {getattr(torch, before)}
    other, second = make(after)
    blank = second.blank(state)
    assert blank.keys() == state.keys()
    for name, tensor in blank.items():
        tensor.copy_(state[name])
    second.load_state(blank, 5)
    assert second.state()["exp_avg.w"].dtype == getattr(torch, after)
    learn(parameter, optimizer, 5), learn(other, second, 5)
    if before == after:
        assert torch.equal(optimizer.masters[0], second.masters[0])
    torch.testing.assert_close(optimizer.masters[0], second.masters[0], rtol=1e-2, atol=1e-3)
