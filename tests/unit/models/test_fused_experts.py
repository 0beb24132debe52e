"""Experts of a loaded mixture through the kernels of a CPU: which are swapped, and that nothing else changes."""

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kitae.errors import ModelError
from kitae.kernels.base import ModuleKernels
from kitae.kernels.cpu import training as kernel
from kitae.kernels.cpu.compile_cpp import cpu_library
from kitae.kernels.devices import training_kernels
from kitae.models.attention_seam import SelfAttention
from kitae.models.fuse import fuse, fuse_with, unfuse
from kitae.models.policy import Policy
from kitae.models.routing import record_routing, replay_routing
from kitae.trainer.config import TrainingConfig
from kitae.trainer.forward import checkpoint_activations

pytestmark = pytest.mark.skipif(cpu_library() is None, reason="no C++ compiler")
TinyPolicy = Callable[..., Policy]
CPU = torch.device("cpu")
KINDS = {  # by family: how its classes begin
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3Moe",
    "qwen2_moe": "Qwen2Moe",
    "olmoe": "Olmoe",
    "flex_olmo": "FlexOlmo",
    "gpt_oss": "GptOss",
}
TOKENS = torch.arange(5, 45)


def make_experts(family: str, **settings: Any) -> Any:
    """Those of one layer, as a model of the family has them."""
    source = importlib.import_module(f"transformers.models.{family}")
    sizes = {"hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 24, "num_local_experts": 6}
    config = getattr(source, f"{KINDS[family]}Config")(**sizes, num_experts=6, **settings)
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    module = getattr(importlib.import_module(f"{source.__name__}.modeling_{family}"), f"{KINDS[family]}Experts")(config)
    for parameter in module.parameters():
        parameter.data.normal_(0, 0.2)
    return module


def run(module: Any) -> list[Tensor]:
    """Output, and gradients of rows, gates and weights."""
    torch.manual_seed(1)
    x = torch.randn(20, 32, requires_grad=True)
    gates, chosen = torch.randn(20, 5).softmax(-1).topk(2)  # the last expert gets nothing
    gates = gates.clone().requires_grad_()
    out = module(x, chosen, gates)
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), (x, gates, *module.parameters()))]


def fused_experts(model: Any) -> list[Any]:
    return [m for m in model.modules() if type(m).__name__.endswith("Experts") and "forward" in vars(m)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each pass through the kernel."""
    found: list[int] = []
    inner = kernel._Experts.forward

    def forward(ctx: Any, x: Tensor, *rest: Tensor) -> Tensor:
        found.append(len(x))
        return inner(ctx, x, *rest)

    monkeypatch.setattr(kernel._Experts, "forward", staticmethod(forward))
    return found


@pytest.mark.parametrize("family", KINDS)
def test_experts_of_a_family(family: str, calls: list[int]) -> None:
    module = make_experts(family)
    expected = run(module)
    assert fuse(module, CPU, torch.float32) == 1 and calls == [2, 2], "probes"
    for a, b in zip(run(module), expected, strict=True):
        assert (a - b).norm() <= 1e-6 * b.norm()
    assert calls == [2, 2, 20]


def test_other_experts_stay_as_they_are() -> None:
    for change in ({"hidden_act": "gelu"}, {"hidden_act": "relu"}):
        module = make_experts("qwen3_moe", **change)
        assert fuse(module, CPU, torch.float32) == 0 and "forward" not in vars(module)


def test_a_module_that_computes_something_else_is_not_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up the other way round: names and shapes are the same."""
    module = make_experts("qwen3_moe")
    kind = type(module)

    def turned(self: Any, both: Tensor) -> Tensor:
        up, gate = both.chunk(2, -1)
        return self.act_fn(gate) * up  # type: ignore[no-any-return]

    monkeypatch.setattr(kind, "_apply_gate", turned)
    assert fuse(module, CPU, torch.float32) == 0


def test_limits_of_gate_and_up_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of usual size do not reach them."""
    module = make_experts("qwen3_moe")

    def limited(self: Any, both: Tensor) -> Tensor:
        gate, up = both.clamp(-10, 10).chunk(2, -1)
        return self.act_fn(gate) * up  # type: ignore[no-any-return]

    monkeypatch.setattr(type(module), "_apply_gate", limited)
    assert fuse(module, CPU, torch.float32) == 0


@pytest.mark.parametrize("kinds", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)])
def test_other_numbers_than_at_the_start_run_as_the_class_says(
    kinds: tuple[torch.dtype, torch.dtype], calls: list[int]
) -> None:
    rows, weights = kinds
    module = make_experts("mixtral")
    assert fuse(module, CPU, torch.float32) == 1
    calls.clear()
    module.to(weights)
    gates, chosen = torch.randn(4, 5).softmax(-1).topk(2)
    values = torch.randn(4, 32, dtype=rows), chosen, gates.to(rows)
    try:
        expected = type(module).forward(module, *values)
    except RuntimeError as refused:
        with pytest.raises(RuntimeError, match=str(refused)[:20]):
            module(*values)
    else:
        assert torch.equal(module(*values), expected)
    assert not calls


def test_numbers_without_kernels_are_left_alone() -> None:
    assert fuse(make_experts("mixtral").half(), CPU, torch.float32) == 0


def test_an_expert_that_there_is_not() -> None:
    module = make_experts("mixtral")
    fuse(module, CPU, torch.float32)
    with pytest.raises(IndexError, match="experts are numbered from 0 to 5, got 6"):
        module(torch.randn(2, 32), torch.tensor([[0, 6], [1, 2]]), torch.ones(2, 2))


def test_second_derivatives_are_refused() -> None:
    """Also where nothing in the module learns."""
    module = make_experts("mixtral").requires_grad_(False)
    fuse(module, CPU, torch.float32)
    x = torch.randn(4, 32, requires_grad=True)
    out = module(x.sin(), torch.tensor([[0, 1]] * 4), torch.ones(4, 2)).sum()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(out, x, create_graph=True)


def test_experts_that_are_split_over_ranks_run_as_their_class_says(calls: list[int]) -> None:
    """They get a number that is no expert for what other ranks have."""
    module = make_experts("qwen3_moe")
    expected = run(module)
    fuse(module, CPU, torch.float32)
    calls.clear()
    module._is_expert_parallel = True
    assert all(torch.equal(a, b) for a, b in zip(run(module), expected, strict=True)) and not calls


def test_a_copy_has_its_own_weights_and_unfused_ones_their_class(calls: list[int]) -> None:
    module = make_experts("mixtral")
    fuse(module, CPU, torch.float32)
    before, other = run(module), copy.deepcopy(module)
    with torch.no_grad():
        other.down_proj.mul_(2)
    torch.testing.assert_close(run(other)[0], 2 * before[0])
    assert torch.equal(run(module)[0], before[0])
    unfuse(other)
    calls.clear()
    torch.testing.assert_close(run(other)[0], 2 * before[0])
    assert not calls and "forward" not in vars(other)


def gradients(policy: Policy, experts_TLK: Tensor) -> dict[str, Tensor]:
    """Of the states of some tokens, routed by a record."""
    positions = torch.arange(len(TOKENS))
    with replay_routing(policy.model, experts_TLK):
        hidden = policy.hidden(TOKENS, positions, SelfAttention(positions))
        (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    return {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_replayed_routing_and_activations_that_are_computed_again(
    architecture: str, again: bool, lora_rank: int, tiny_policy: TinyPolicy, calls: list[int]
) -> None:
    plain, fused = (tiny_policy(architecture, plain=not f, lora_rank=lora_rank) for f in (False, True))
    assert not fused_experts(plain.model) and len(fused_experts(fused.model)) == 2
    with torch.no_grad(), record_routing(plain.model) as record:
        plain.score(TOKENS)
    for policy in (plain, fused):
        checkpoint_activations(policy, TrainingConfig(checkpoint_activations=again))
        policy.model.train(again)
    expected = gradients(plain, record.experts_TLK.flip(0))
    calls.clear()
    got = gradients(fused, record.experts_TLK.flip(0))
    assert calls == [len(TOKENS)] * (4 if again else 2)
    assert got.keys() == expected.keys()
    for part in ("experts.down_proj", "gate.weight"):
        assert any(name.endswith(part) for name in got) == (not lora_rank)
    for name, value in expected.items():
        assert (got[name] - value).norm() <= 1e-5 * value.norm(), name


def test_exact_mode_has_none_of_it(tiny_policy: TinyPolicy) -> None:
    with pytest.raises(ModelError, match="exact does not cover"):
        tiny_policy("qwen3_moe", exact=True)
    module = make_experts("qwen3_moe")
    kernels = training_kernels(CPU, torch.float32)
    assert kernels is not None
    assert fuse_with(ModuleKernels(kernels.modules.rms_norm, kernels.modules.swiglu), module, torch.device("cpu")) == 0
