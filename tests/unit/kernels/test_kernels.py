"""Each compiled kernel against plain torch, in both dtypes, with gradients."""

import pytest
import torch

from kitae.kernels.cpu import ops
from kitae.kernels.cpu.compile_cpp import cpu_library
from kitae.models.logprobs import HeadTransform, _row_gradients, _row_statistics

pytestmark = pytest.mark.skipif(cpu_library() is None, reason="no C++ compiler")
DTYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])


@DTYPES
def test_rms_norm(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    x, w, g = torch.randn(2, 5, 33, dtype=dtype), torch.randn(33, dtype=dtype), torch.randn(2, 5, 33, dtype=dtype)
    x.requires_grad_(), w.requires_grad_()

    def plain() -> torch.Tensor:
        h = x.float()
        return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)

    fused = ops.rms_norm(x, w, 1e-6)
    torch.testing.assert_close(fused, plain(), atol=tolerance, rtol=tolerance)
    for got, expected in zip(
        torch.autograd.grad(fused, (x, w), g), torch.autograd.grad(plain(), (x, w), g), strict=True
    ):
        torch.testing.assert_close(got, expected, atol=4 * tolerance, rtol=4 * tolerance)


@DTYPES
def test_swiglu(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    gate, up, g = (torch.randn(7, 33).mul(4).to(dtype) for _ in range(3))
    gate.requires_grad_(), up.requires_grad_()
    fused, plain = ops.swiglu(gate, up), torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(fused, plain, atol=tolerance, rtol=tolerance)
    pairs = zip(torch.autograd.grad(fused, (gate, up), g), torch.autograd.grad(plain, (gate, up), g), strict=True)
    for got, expected in pairs:
        torch.testing.assert_close(got, expected, atol=4 * tolerance, rtol=4 * tolerance)


@DTYPES
def test_row_statistics_and_gradients(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 3001).mul(5).to(dtype)
    targets = torch.randint(0, 3001, (6,))
    grad_logp, grad_entropy = torch.randn(6), torch.randn(6)
    reference = logits.float().requires_grad_()
    logp_all = torch.log_softmax(reference / 0.7, -1)
    logp = logp_all.gather(1, targets[:, None])[:, 0]
    entropy = -(logp_all.exp() * logp_all).sum(-1)
    got_logp, lse, got_entropy = ops.row_statistics(logits, targets, 1 / 0.7)
    torch.testing.assert_close(got_logp, logp, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(lse, torch.logsumexp(reference / 0.7, -1), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(got_entropy, entropy, atol=1e-4, rtol=1e-4)
    (expected,) = torch.autograd.grad((logp * grad_logp + entropy * grad_entropy).sum(), reference)
    got = ops.row_gradients(logits.clone(), targets, lse, got_entropy, grad_logp, grad_entropy, 1 / 0.7)
    torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=tolerance)


def test_targets_of_another_dtype_are_refused() -> None:
    with pytest.raises(AssertionError):
        ops.row_statistics(torch.randn(2, 33), torch.tensor([4, 5], dtype=torch.int32), 1.0)


@DTYPES
@pytest.mark.parametrize("compiled", [True, False])
def test_an_impossible_token_adds_nothing_to_entropy_and_gradient(
    compiled: bool, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with a logit of -inf have the statistics of rows without that column; its gradient is 0."""
    if not compiled:
        monkeypatch.setattr("kitae.models.logprobs.training_kernels", lambda device, dtype: None)
    torch.manual_seed(0)
    kept = torch.randn(4, 50).mul(3).to(dtype)
    targets = torch.randint(0, 50, (4,))
    wide = torch.cat((kept, torch.full((4, 1), float("-inf"), dtype=dtype)), 1)
    grads = torch.randn(4), torch.randn(4)

    def everything(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = _row_statistics(logits, targets, HeadTransform(), 1.0)
        return *found, _row_gradients(logits.clone(), targets, *found[1:], *grads, HeadTransform(), 1.0)

    *expected, plain = everything(kept)
    *got, gradient = everything(wide)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient[:, :50], plain, atol=tolerance, rtol=tolerance)
    assert gradient[:, 50].abs().max() < 1e-30


@DTYPES
@pytest.mark.parametrize("window", [None, 4])
def test_causal_softmax_and_its_gradient(window: int | None, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    n, fold, length, span = 3, 2, 5, 12
    scores = torch.randn(n, fold * length, span).mul(3).to(dtype)
    distance = torch.arange(span - length, span)[:, None] - torch.arange(span)
    seen = (distance >= 0) & (distance < (window or span + 1))
    reference = scores.float().requires_grad_()
    probs = torch.softmax((reference * 0.5).masked_fill(~seen.repeat(fold, 1), float("-inf")), -1)
    got = ops.causal_softmax(scores.clone(), fold, 0.5, window)
    torch.testing.assert_close(got.float(), probs.detach(), atol=tolerance, rtol=tolerance)
    assert (got[:, ~seen.repeat(fold, 1)] == 0).all()
    grad = torch.randn_like(probs).to(dtype).float()
    (expected,) = torch.autograd.grad(probs, reference, grad)
    delta = (grad * probs.detach()).sum(-1, keepdim=True)
    dscores = ops.softmax_backward(got, grad.to(dtype), delta, 0.5)
    torch.testing.assert_close(dscores.float(), expected, atol=tolerance, rtol=tolerance)


@DTYPES
def test_a_missing_compiler_is_survived(
    dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    cpu_library.cache_clear()
    try:
        with caplog.at_level("WARNING"):
            assert not ops.available(torch.device("cpu"), dtype)
        assert "install g++" in caplog.text
    finally:
        cpu_library.cache_clear()
