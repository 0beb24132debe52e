"""A step through compiled kernels against the same step in plain torch: attention of spans, and, in fp32, all of it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from short_settings import algorithm_of
from test_gradient import make_samples
from torch import Tensor
from trainer_workers import column_of, forward_backward, make_worker, weighted

from kitae.algorithms.config import AlgorithmConfig
from kitae.data.packing import Span
from kitae.kernels.cpu import amx, ops
from kitae.kernels.cpu.compile_cpp import cpu_library
from kitae.models.policy import Policy
from kitae.models.scalar import ScalarModel
from kitae.trainer.base import Column, Role
from kitae.trainer.config import TrainingConfig
from kitae.trainer.packed_attention import PackedAttention, _Spans

pytestmark = pytest.mark.skipif(cpu_library() is None, reason="no C++ compiler")
TinyPolicy = Callable[..., Policy]
SHAPES = [(0, 5, 3), (0, 5, 9), (1, 12, 1), (1, 12, 7), (1, 12, 7), (2, 30, 20), (0, 5, 2), (3, 1, 4)]


def spans(*families: tuple[int, tuple[int, ...]]) -> tuple[list[Span], int]:
    """(prompt, lengths of its responses) each; a prompt of 0: spans without one. And how many rows they have."""
    found, end = [], 0
    for prompt, responses in families:
        start = end
        if prompt:
            found.append(Span(start, prompt))
            end += prompt
        for length in responses:
            found.append(Span(end, length, start if prompt else 0, prompt))
            end += length
    return found, end


ROWS = {
    "shared prompts": spans((49, (63,) * 3), (5, (1, 17, 40))),
    "no prompts": spans((0, (33, 1, 16, 70))),
    "a long span": spans((130, (200,))),
    "one row": spans((0, (1,))),
}


def attended(
    row: list[Span], heads: tuple[int, int], x: Tensor, *, window: int | None, head_major: bool = False, **choice: bool
) -> tuple[Tensor, Tensor]:
    """What comes out, and the gradient of what went in."""
    x = x.clone().requires_grad_()
    q, k, v = (t.transpose(0, 1) for t in torch.split(x, [heads[0], heads[1], heads[1]], 1))
    if head_major:
        q, k, v = (t.contiguous() for t in (q, k, v))
    context = PackedAttention(row, torch.device("cpu"), heads[0], **choice)
    out = context.attend(0, q, k, v, scale=x.shape[2] ** -0.5, window=window, softcap=None, sinks=None)
    (out.float() * torch.linspace(-1, 1, out.numel()).sin().view_as(out)).sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad


@pytest.mark.thorough(keep=24)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(("heads", "dim"), [((9, 3), 64), ((4, 4), 16), ((8, 1), 80), ((2, 1), 256)])
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("head_major", [False, True])
def test_attention_is_that_of_plain_torch(
    name: str, heads: tuple[int, int], dim: int, window: int | None, head_major: bool
) -> None:
    row, tokens = ROWS[name]
    x = torch.randn(tokens, heads[0] + 2 * heads[1], dim, generator=torch.Generator().manual_seed(0))
    got = attended(row, heads, x, window=window, head_major=head_major)
    expected = attended(row, heads, x, window=window, fused=False)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not amx.available(), reason="no AMX")
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(("heads", "dim"), [((9, 3), 64), ((4, 4), 32), ((8, 1), 96), ((2, 1), 256), ((12, 2), 128)])
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("head_major", [False, True])
def test_attention_on_tiles_is_as_near_to_fp32_as_that_of_plain_torch(
    name: str, heads: tuple[int, int], dim: int, window: int | None, head_major: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, tokens = ROWS[name]
    x = torch.randn(tokens, heads[0] + 2 * heads[1], dim, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = attended(row, heads, x.float(), window=window, fused=False)
    got = attended(row, heads, x, window=window, head_major=head_major)
    monkeypatch.setattr(ops, "available", lambda *_: False)
    plain = attended(row, heads, x, window=window)
    for a, b, c in zip(got, plain, exact, strict=True):
        assert (a.float() - c).norm() <= 1.05 * (b.float() - c).norm()


def test_keys_that_a_row_does_not_see_need_be_no_numbers() -> None:
    """Also the last of sixteen that are computed together."""
    row, tokens = ROWS["no prompts"]
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(tokens, 15, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
        expected = attended(row, (9, 3), x, window=None)
        x[20, 9:12] = torch.nan  # keys in the middle of the first span
        found = attended(row, (9, 3), x, window=None)[0]
        assert torch.equal(found[:20], expected[0][:20]) and torch.equal(found[33:], expected[0][33:])
        assert found[20:33].isnan().all()


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@DTYPES
def test_large_scores_stay_numbers(dtype: torch.dtype) -> None:
    row, tokens = ROWS["shared prompts"]
    x = (300 * torch.randn(tokens, 15, 64, generator=torch.Generator().manual_seed(0))).to(dtype)
    out, grad = attended(row, (9, 3), x, window=None)
    assert grad.isfinite().all() and out.abs().max() <= x[:, 12:].abs().max() * (1 + 1e-5)


@DTYPES
def test_gradients_of_what_is_no_number_are_none(dtype: torch.dtype) -> None:
    row, tokens = ROWS["shared prompts"]
    x = torch.randn(tokens, 15, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[60, 4, 7] = torch.nan  # a query of the second of three key heads
    for grad in attended(row, (9, 3), x, window=None)[1].split([9, 3, 3], 1):
        assert grad.isnan().any()


@DTYPES
def test_bits_do_not_depend_on_threads(dtype: torch.dtype) -> None:
    row, tokens = ROWS["shared prompts"]
    x = torch.randn(tokens, 15, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(attended(row, (9, 3), x, window=None))
    torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


SMALL = (".bias", ".gate.weight", ".router.weight", "norm.weight", ".sinks")
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "several rows": {"training": {"token_budget": 40}},
    "prompts apart": {"apart": True, "training": {"token_budget": 60}},
    "activations again": {"training": {"token_budget": 40, "checkpoint_activations": True}},
    "adapters": {"model": {"lora_rank": 4}, "training": {"token_budget": 40}},
    "adapters, activations again": {
        "model": {"lora_rank": 4},
        "training": {"token_budget": 40, "checkpoint_activations": True},
    },
    "reference": {"algorithm": {"reference": "frozen", "kl_coef": 0.1}, "training": {"token_budget": 40}},
    "critic": {"algorithm": {"preset": "ppo", "kl_coef": 0.0}, "training": {"token_budget": 40}},
    "moments in 16 bits": {"training": {"moments": "bfloat16", "token_budget": 40}},
}


def step(case: dict[str, Any], tiny_policy: TinyPolicy, architecture: str) -> dict[str, Tensor]:
    """Log-probs, gradients, and weights after two updates, of all that learns."""
    algorithm = algorithm_of({"preset": "grpo", **case.get("algorithm", {})})
    training = TrainingConfig(lr=1e-3, **case.get("training", {}))
    policy = tiny_policy(architecture, **case.get("model", {}))
    policy.plain = case.get("apart", False)
    critic = ScalarModel(tiny_policy(architecture)) if algorithm.advantage.name == "gae" else None
    reference = bool(algorithm.kl.coef)
    worker = make_worker(policy, training, algorithm, critic=critic, reference=reference)
    samples = make_samples(SHAPES, gaps=True)
    found = {f"logp {i}": torch.from_numpy(logp) for i, logp in enumerate(column_of(worker, samples))}
    if reference:
        columns = column_of(worker, samples, Column.REFERENCE)
        samples = [
            s.with_columns(logp_ref=c - s.spread(np.float32(0.1))) for s, c in zip(samples, columns, strict=True)
        ]
    if critic is not None:
        zero, one, each = (np.float32(x) for x in (0, 1, 1 / sum(s.loss_tokens for s in samples)))
        values = {"value": zero, "return": one, "value_weight": each}
        samples = [s.with_columns(**{name: s.spread(x) for name, x in values.items()}) for s in samples]
    for update in range(2):
        forward_backward(worker, weighted(samples, algorithm), roles=tuple(worker.trained))
        for role, trained in worker.trained.items():
            for name, p in zip(trained.optimizer.names, trained.optimizer.masters, strict=True):
                if p.grad is not None:
                    found[f"{update} gradient {role.value} {name}"] = p.grad.clone()
        worker.optim_step()
    return found


# What is around the layers is the same for all of them: all cases on one without experts and on one that has all that a
# layer can have, and on the others those that go through each kernel, with and without adapters.
CROSSED = [(name, architecture) for name in CASES for architecture in ("llama", "gpt_oss")] + [
    (name, architecture)
    for name in ("several rows", "adapters, activations again")
    for architecture in ("qwen2", "qwen3", "qwen3_moe", "mixtral")
]
LEFT = [
    (name, architecture)
    for name in CASES
    for architecture in ("qwen2", "qwen3", "qwen3_moe", "mixtral")
    if (name, architecture) not in CROSSED
]


@pytest.mark.thorough(keep=6)
@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        *CROSSED,
        *(pytest.param(name, architecture, marks=pytest.mark.slow) for name, architecture in LEFT),
    ],
)
def test_a_step_is_that_of_plain_torch(
    name: str, architecture: str, tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = step(CASES[name], tiny_policy, architecture)
    monkeypatch.setattr(ops, "available", lambda *_: False)
    expected = step(CASES[name], tiny_policy, architecture)
    assert got.keys() == expected.keys()
    assert sum("gradient" in key for key in got) > 10
    for key, value in expected.items():
        # A first step of AdamW is by the sign: where a gradient is nothing but rounding, the second one may differ.
        tolerance = 1e-5 if not key.startswith("1 ") else 2e-3
        assert (got[key] - value).norm() <= tolerance * max(value.norm().item(), 1e-3), key


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_gradients_of_weights_are_added_where_they_stay(architecture: str, tiny_policy: TinyPolicy) -> None:
    """The same tensor from row to row, with the head's and the embedding's of a tied weight in it."""
    policy = tiny_policy(architecture)
    worker = make_worker(policy, TrainingConfig(token_budget=40), AlgorithmConfig(preset="grpo"))
    samples = weighted(make_samples(SHAPES), AlgorithmConfig(preset="grpo"))
    forward_backward(worker, samples)
    first = {name: p.grad for name, p in policy.model.named_parameters()}
    once = {name: None if g is None else g.clone() for name, g in first.items()}
    forward_backward(worker, samples)
    for name, p in policy.model.named_parameters():
        assert p.grad is first[name], name
        torch.testing.assert_close(p.grad, 2 * once[name], atol=1e-6, rtol=1e-5)
    worker.optim_step()
    assert all(p.grad is None for p in policy.model.parameters())
    assert Role.POLICY in worker.trained


def handed_over(policy: Policy, *, again: bool) -> set[str]:
    """The parameters whose gradients are made and handed to torch, which adds them."""
    worker = make_worker(policy, TrainingConfig(checkpoint_activations=again), AlgorithmConfig(preset="grpo"))
    found = set[str]()
    for name, p in policy.model.named_parameters():
        p.register_hook(lambda made, name=name: None if made is None else found.add(name))  # type: ignore[misc]
    forward_backward(worker, weighted(make_samples(SHAPES), AlgorithmConfig(preset="grpo")))
    return found


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3", "qwen3_moe", "mixtral", "gpt_oss"])
def test_no_gradient_is_made_to_be_added(architecture: str, tiny_policy: TinyPolicy) -> None:
    """Also where activations are computed again, to need less memory. Biases, routers and norms are small."""
    for again in (False, True):
        assert not {n for n in handed_over(tiny_policy(architecture), again=again) if not n.endswith(SMALL)}, again


def kept_by_layers(tiny_policy: TinyPolicy, architecture: str, *, again: bool, lora_rank: int) -> int:
    """Tensors that the layers' functions have saved when the backward pass begins, as autograd has them."""
    policy = tiny_policy(architecture, lora_rank=lora_rank)
    worker = make_worker(policy, TrainingConfig(checkpoint_activations=again), AlgorithmConfig(preset="grpo"))
    found: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor.numel() if tensor.data_ptr() not in lasting else 0)
        return tensor

    lasting = {p.data_ptr() for p in policy.model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward_backward(worker, weighted(make_samples(SHAPES), AlgorithmConfig(preset="grpo")))
    return sum(found)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_activations_that_are_computed_again_are_not_kept(
    architecture: str, lora_rank: int, tiny_policy: TinyPolicy
) -> None:
    """Hooks around a checkpointed layer see what enters it, and nothing else of it."""
    plain, again = (kept_by_layers(tiny_policy, architecture, again=a, lora_rank=lora_rank) for a in (False, True))
    assert again < plain / 2, f"{again} numbers are kept, {plain} without recomputation"


def test_exact_mode_takes_no_kernel_of_spans(tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("spans")

    monkeypatch.setattr(_Spans, "forward", refuse)
    worker = make_worker(tiny_policy(exact=True), algorithm=AlgorithmConfig(preset="grpo"))
    forward_backward(worker, weighted(make_samples(SHAPES), AlgorithmConfig(preset="grpo")))
