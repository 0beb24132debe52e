"""AdamW on fp32 masters, schedules, clipping, state."""

import gc
import math
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from trainer_workers import make_worker, master_of

from kitae.data.packing import Row
from kitae.kernels.adamw import Rest, adamw
from kitae.kernels.allocation import gradient_of, gradient_over
from kitae.kernels.base import AdamWPace, AdamWPart
from kitae.models.policy import Policy
from kitae.trainer.base import Conditions, Role
from kitae.trainer.config import TrainingConfig
from kitae.trainer.optim import Optimizer, learning_rate
from kitae.trainer.training_worker import Worker


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
    assert torch.allclose(master_of(optimizer), torch.full((4,), 1 - 50e-4), atol=1e-5)
    assert (parameter == master_of(optimizer).bfloat16()).all() and (parameter < 1).all()


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
        assert torch.equal(master_of(optimizer), master_of(second))
    torch.testing.assert_close(master_of(optimizer), master_of(second), rtol=1e-2, atol=1e-3)


TARGET = torch.linspace(-2, 2, 500)


def learn(optimizer: Optimizer, steps: int) -> None:
    """Towards the target, by what the parameter is: so the way that it takes depends on how it is rounded."""
    (parameter,) = optimizer.parameters
    for _ in range(steps):
        (parameter.float() - TARGET).pow(2).sum().backward()
        assert optimizer.step().applied


def optimizer_of(dtype: torch.dtype, *, host: bool = False, moments: str = "float32") -> Optimizer:
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 500).to(dtype))
    config = TrainingConfig(lr=3e-4, weight_decay=0.1, clip_norm=3.0, moments=moments)
    return Optimizer([("w", parameter)], config, 100, host=host)


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_what_a_parameter_lacks_is_as_good_as_a_whole_master(moments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit, where parameters of whole ones are rounded to the nearest; of two as near, away from zero."""
    monkeypatch.setattr("kitae.trainer.optim.training_kernels", lambda *_: None)
    optimizer = optimizer_of(torch.bfloat16, moments=moments)
    (parameter,) = optimizer.parameters
    config, master = optimizer.config, parameter.detach().float()
    mean, square = torch.zeros(2, 500).to(getattr(torch, moments))
    for step in range(1, 60):
        held = parameter.detach().clone()
        grad = torch.autograd.grad((parameter.float() - TARGET).pow(2).sum(), parameter)[0].float()
        norm = torch.nn.utils.get_total_norm([grad])
        scale = torch.where(norm > 3.0, 3.0 / (norm + 1e-6), 1.0)
        pace = AdamWPace(step, config.lr, config.betas, 1e-8, config.weight_decay)
        adamw([AdamWPart(master, None, grad, mean, square)], scale, pace)
        learn(optimizer, 1)
        assert torch.equal(master_of(optimizer), master)
        even = (master.view(torch.int32) & 0xFFFF) == 0x8000
        assert torch.equal(parameter[~even], master.bfloat16()[~even])
        assert (parameter[even].abs() > master[even].abs()).all() and not torch.equal(parameter, held)


def test_bfloat16_needs_two_bytes_for_its_master() -> None:
    optimizer = optimizer_of(torch.bfloat16)
    (master,) = optimizer.masters
    assert isinstance(master, Rest) and master.bits.dtype == torch.int16
    state = optimizer.state()
    assert state.keys() == {"weight.w", "rest.w"}
    assert state["weight.w"].data_ptr() == optimizer.parameters[0].data_ptr()
    assert optimizer_of(torch.bfloat16, host=True).state().keys() == {"master.w"}


KINDS = [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]


@pytest.mark.parametrize("after", KINDS)
@pytest.mark.parametrize("before", KINDS)
def test_masters_are_read_in_any_form(before: tuple[torch.dtype, bool], after: tuple[torch.dtype, bool]) -> None:
    """To the last bit; with the same settings it goes on as if nothing was."""
    optimizer, second = (optimizer_of(dtype, host=host) for dtype, host in (before, after))
    learn(optimizer, 20)
    state = optimizer.state()
    blank = second.blank(state)
    assert {name: (t.dtype, t.shape) for name, t in blank.items()} == {
        name: (t.dtype, t.shape) for name, t in state.items()
    }
    for name, tensor in blank.items():
        tensor.copy_(state[name])
    second.load_state(blank, 20)
    assert torch.equal(master_of(second), master_of(optimizer))
    assert second.parameters[0].dtype == after[0]
    torch.testing.assert_close(second.parameters[0].float(), master_of(optimizer), rtol=2**-8, atol=0)
    learn(optimizer, 5), learn(second, 5)
    if before == after:
        assert torch.equal(master_of(second), master_of(optimizer))
        assert torch.equal(second.parameters[0], optimizer.parameters[0])


def test_a_parameter_may_move_between_steps() -> None:
    """As those do that are laid together for a kernel."""
    still, moved = optimizer_of(torch.bfloat16), optimizer_of(torch.bfloat16)
    learn(still, 2), learn(moved, 2)
    (parameter,) = moved.parameters
    parameter.data = torch.cat([parameter.detach(), torch.zeros(3, dtype=torch.bfloat16)])[:500]
    learn(still, 2), learn(moved, 2)
    assert torch.equal(master_of(still), master_of(moved))


def test_gradients_are_taken_together_of_what_learns_alone() -> None:
    weights = [torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16)) for _ in range(3)]
    optimizer = Optimizer([(str(i), w) for i, w in enumerate(weights)], TrainingConfig(), 10)
    weights[1].requires_grad_(False)
    assert gradient_over(weights) is None and all(m.grad is None for m in optimizer.masters)
    weights[1].requires_grad_(True)
    whole, begun = gradient_over(weights) or (torch.empty(0), True)
    assert whole.shape == (6, 3) and whole.dtype == torch.float32 and not begun
    whole.copy_(torch.arange(6)[:, None])
    assert [gradient_of(w)[0, 0].item() for w in weights] == [0, 2, 4]  # type: ignore[index]
    again, begun = gradient_over(weights) or (torch.empty(0), False)
    assert begun and again.data_ptr() == whole.data_ptr()


def test_a_parameter_that_does_not_lie_in_order_learns_as_others_do() -> None:
    start = torch.linspace(-1, 1, 24).bfloat16().view(4, 6)
    found = []
    for given in (start.clone(), start.t().contiguous().t()):
        parameter = torch.nn.Parameter(given)
        optimizer = Optimizer([("w", parameter)], TrainingConfig(lr=1e-3), 10)
        for _ in range(3):
            gradient_of(parameter)  # as a kernel has made it
            parameter.float().pow(2).sum().backward()
            optimizer.step()
        found.append(master_of(optimizer))
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_takes_gradients_from_the_one_before(dtype: torch.dtype) -> None:
    """A hook of the first would have them otherwise, and the second learn nothing."""
    first = optimizer_of(dtype)
    learn(first, 1)
    second = Optimizer([("w", first.parameters[0])], first.config, 100)
    learn(second, 1)
    assert second.state()["step.w"] == 1 and first.masters[0].grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_are_freed_with_their_optimizer(dtype: torch.dtype) -> None:
    optimizer = optimizer_of(dtype)
    learn(optimizer, 1)
    assert gradient_of(optimizer.parameters[0]) is not None
    held = [optimizer.parameters[0], optimizer.masters[0]]
    gone = [weakref.ref(t.bits if isinstance(t, Rest) else t) for t in held]
    gc.disable()
    try:
        del optimizer, held
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()
