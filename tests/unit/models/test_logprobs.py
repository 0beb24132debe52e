"""Log-probs of chosen tokens: what is refused, and what a model does to its logits."""

import pytest
import torch

from kitae.errors import DataError
from kitae.models.logprobs import Head, HeadTransform, token_logprobs


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("token", [-100, -1, 33, 40])
def test_a_token_that_the_head_has_no_row_for_is_refused(
    token: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel would write its gradient beside the logits."""
    if not compiled:
        monkeypatch.setattr("kitae.models.logprobs.training_kernels", lambda device, dtype: None)
    head = Head(torch.randn(33, 16), None, HeadTransform(), exact=False)
    with pytest.raises(DataError, match=rf"must be in 0…32, as the head has rows, got {token}$"):
        token_logprobs(head, torch.randn(2, 16), torch.tensor([4, token]), temperature=1.0, chunk=8)


def test_of_no_tokens_nothing_is_asked() -> None:
    head = Head(torch.randn(33, 16), None, HeadTransform(), exact=False)
    none = torch.empty(0, dtype=torch.int64)
    logp, entropy = token_logprobs(head, torch.randn(0, 16), none, temperature=1.0, chunk=8)
    assert logp.shape == entropy.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transform", [HeadTransform(), HeadTransform(0.3), HeadTransform(2.0, 5.0)])
def test_logits_that_are_written_over_have_the_same_bits(transform: HeadTransform, dtype: torch.dtype) -> None:
    logits = (torch.randn(3, 41) * 9).to(dtype)
    expected = transform(logits)
    got = transform.take(logits)
    assert torch.equal(got, expected) and got.data_ptr() == logits.data_ptr()
