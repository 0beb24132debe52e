"""Training kernels on a GPU against autograd, and the bf16 path against fp32."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kitae.config import AlgorithmConfig, ModelConfig
from kitae.models.load import load_policy
from kitae.models.policy import Policy
from kitae.models.tiny import make_tiny

sys.path.append(str(Path(__file__).parents[1] / "unit/trainer"))

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
TinyPolicy = Callable[..., Policy]


@pytest.mark.parametrize("shape", [(5, 96), (3, 700, 1536), (1, 1, 48)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    from kitae.kernels import gpu_training

    x = torch.randn(shape, device="cuda", requires_grad=True)
    weight = torch.randn(shape[-1], device="cuda", requires_grad=True)
    grad = torch.randn(shape, device="cuda")
    expected = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
    wanted = torch.autograd.grad(expected, (x, weight), grad)
    got = gpu_training.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    for a, b in zip(torch.autograd.grad(got, (x, weight), grad), wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-4)


def test_gated_mlp() -> None:
    from kitae.kernels import gpu_training

    gate, up = (torch.randn(2, 70, 112, device="cuda", requires_grad=True) for _ in range(2))
    down = torch.randn(48, 112, device="cuda", requires_grad=True)
    grad = torch.randn(2, 70, 48, device="cuda")
    expected = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down)
    wanted = torch.autograd.grad(expected, (gate, up, down), grad)
    alone = torch.nn.functional.linear(gpu_training.swiglu(gate, up), down)
    joint = gpu_training.swiglu_linear(gate.clone(), up.clone(), down)
    for got in (alone, joint):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        for a, b in zip(torch.autograd.grad(got, (gate, up, down), grad), wanted, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("with_entropy", [True, False])
def test_row_statistics_and_gradients(with_entropy: bool) -> None:
    from kitae.kernels import gpu_training

    raw = (torch.randn(37, 9001, device="cuda") * 4).requires_grad_()
    targets = torch.randint(9001, (37,), device="cuda")
    logp = torch.log_softmax(raw * 1.25, -1)
    chosen, entropy = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    got = gpu_training.row_statistics(raw.detach().clone(), targets, 1.25)
    for a, b in zip(got, (chosen, torch.logsumexp(raw * 1.25, -1), entropy), strict=True):
        torch.testing.assert_close(a, b.detach(), atol=1e-4, rtol=1e-4)
    d_logp, d_entropy = torch.randn(37, device="cuda"), torch.randn(37, device="cuda") * with_entropy
    (wanted,) = torch.autograd.grad((chosen * d_logp + entropy * d_entropy).sum(), raw)
    found = gpu_training.row_gradients(
        raw.detach().clone(), targets, got[1], got[2], d_logp, d_entropy if with_entropy else None, 1.25
    )
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("architecture", ["qwen2", "mistral", "gemma3"])
def test_bf16_gradient_is_as_near_to_the_exact_one_as_plain_torch(
    architecture: str, share_prompts: bool, tmp_path: Path
) -> None:
    """Flash attention with shared prompts and windows, fused modules and head, against fp32 on the same weights."""
    from test_gradient import gradient, make_samples

    make_tiny(tmp_path, architecture, hidden=128, layers=3)
    shapes = [(g, 5 + 9 * g, 1 + (13 * g + 29 * i) % 90) for g in range(5) for i in range(6)]
    samples = make_samples(shapes, gaps=True)
    algorithm = AlgorithmConfig(preset="grpo", entropy_coef=0.01)

    def policy(dtype: str, fuse: bool) -> Policy:
        return load_policy(ModelConfig.model_validate({
            "path": str(tmp_path), "dtype": dtype, "device": "cuda", "fuse": fuse
        }))  # fmt: skip

    exact = policy("float32", False)
    for p in exact.model.parameters():
        p.data = p.data.bfloat16().float()
    expected = gradient(exact, samples, algorithm, share_prompts=share_prompts)

    def error(fuse: bool, flash: bool, monkeypatch: pytest.MonkeyPatch) -> float:
        from kitae.kernels import flash as flash_kernels
        from kitae.trainer import optim

        if not flash:
            monkeypatch.setattr(flash_kernels, "available", lambda like: False)
        monkeypatch.setattr(optim, "_add_into", lambda master: lambda parameter: None)  # gradients stay where they are
        got = gradient(policy("bfloat16", fuse), samples, algorithm, share_prompts=share_prompts)
        total = sum(float((got[n].float() - g).pow(2).sum()) for n, g in expected.items())
        return float((total / sum(float(g.pow(2).sum()) for g in expected.values())) ** 0.5)

    with pytest.MonkeyPatch.context() as patch:
        fast = error(True, True, patch)
    with pytest.MonkeyPatch.context() as patch:
        plain = error(False, False, patch)
    assert fast < 1.2 * plain + 1e-3, (fast, plain)
