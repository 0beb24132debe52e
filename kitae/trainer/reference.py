"""The reference policy of a KL term: the initial model, kept as it was or refreshed from time to time.

It has modules of its own: the engine may be sampling from the policy's while the reference is computed, so nothing
about those may change, not even for a moment. What is not trained is shared, the rest is copied in the dtype of the
computation: all weights, or with LoRA the adapters, which start as nothing. Without a KL term there is none.
"""

import copy
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from kitae.algorithms.config import AlgorithmConfig
from kitae.models.policy import Policy
from kitae.trainer.config import LearningConfig
from kitae.trainer.objectives import Scored

STATE_FILE = "reference.safetensors"


class Reference:
    """Make it before the policy is trained or a checkpoint is loaded: it starts as the policy is then.

    `scores` gives its log-probs.
    """

    def __init__(
        self, policy: Policy, algorithm: AlgorithmConfig, training: LearningConfig, temperature: float
    ) -> None:
        self.algorithm = algorithm
        self._policy = _frozen_copy(policy)
        self.scores = Scored(self._policy, training, temperature)
        self._pairs = [(n, p, q) for (n, p), q in zip(
            policy.model.named_parameters(), self._policy.model.parameters(), strict=True) if p is not q
        ]  # fmt: skip
        # A running average in bf16 would stand still: what a refresh adds is less than the rounding.
        self._averages = [q.float().clone() for _, _, q in self._pairs] if algorithm.reference == "ema" else []

    def finish_step(self, step: int) -> None:
        """Refresh the reference where that is due."""
        kind, every = self.algorithm.reference, self.algorithm.reference_every
        if kind not in ("ema", "reset") or every is None or step % every:
            return
        with torch.no_grad():
            for i, (_, live, mine) in enumerate(self._pairs):
                if kind == "ema":
                    assert self.algorithm.reference_mix is not None
                    mine.copy_(self._averages[i].lerp_(live.float(), self.algorithm.reference_mix))
                else:
                    mine.copy_(live)

    def save_state(self, folder: Path) -> None:
        """A frozen reference needs no file: it is the model that the run started from."""
        if self.algorithm.reference in ("ema", "reset"):
            values = self._averages or [q for _, _, q in self._pairs]
            tensors = {n: v.detach().cpu().contiguous() for (n, _, _), v in zip(self._pairs, values, strict=True)}
            save_file(tensors, folder / STATE_FILE)

    def load_state(self, folder: Path) -> None:
        if self.algorithm.reference in ("ema", "reset"):
            saved = load_file(folder / STATE_FILE)
            with torch.no_grad():
                for i, (name, _, mine) in enumerate(self._pairs):
                    mine.copy_(saved[name])
                    if self._averages:
                        self._averages[i].copy_(saved[name])


def _frozen_copy(policy: Policy) -> Policy:
    """The same function from modules of its own; parameters that are not trained are the policy's."""
    kept = {id(p): p for p in policy.model.parameters() if not p.requires_grad}
    model = copy.deepcopy(policy.model, kept).requires_grad_(False).eval()
    return Policy(model, policy.tokenizer, policy.source, exact=policy.exact)
