"""Log-probs of chosen tokens: what is refused."""

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
