"""A model that gives one number for a token instead of a distribution: a critic or a reward model.

It is a policy's decoder with another head. The head starts at zero, so the first numbers are 0. The number of a token
is read from the state that predicts it, before the token is known.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kitae.models.attention_seam import AttentionContext
from kitae.models.parts import decoder_of
from kitae.models.policy import Policy


class ScalarModel(torch.nn.Module):
    """policy: must not be shared, and its LM head is never used. The new head is fp32.

    bias: of the head. A reward model has none, like the class that other libraries load it with.
    """

    policy: Policy

    def __init__(self, policy: Policy, *, bias: bool = True) -> None:
        super().__init__()
        self.__dict__["policy"] = policy  # only its decoder is a submodule
        self.decoder: torch.nn.Module = decoder_of(policy.base)
        width = policy.head.weight.shape[1]
        self.head = torch.nn.Linear(width, 1, bias=bias, device=policy.device, dtype=torch.float32)
        for parameter in self.head.parameters():
            torch.nn.init.zeros_(parameter)

    def within(self, function: Callable[[], None]) -> None:
        """Call it where the parameters of a sharded model are whole, but for those of layers."""
        function()

    def forward(self, tokens_T: Tensor, positions_T: Tensor, context: AttentionContext, source_N: Tensor) -> Tensor:
        """The numbers `[N]` of the tokens that the states at `source_N` predict."""
        hidden_NH = self.policy.hidden(tokens_T, positions_T, context)[source_N]
        return self.head(hidden_NH.float()).sum(-1)  # type: ignore[no-any-return]  # of one; no view: shards hook it
