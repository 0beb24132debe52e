"""The reference policy of a KL term: the initial model, kept as it was or refreshed from time to time.

What is not trained is shared with the policy; the rest is a copy in the dtype of the computation: all weights, or with
LoRA the adapters, which start as zero. Without a KL term there is no reference.

In one process the reference has modules of its own: an engine may sample from the policy's modules at the same time, so
they must never change for it. Sharded modules serve no engine; there the reference is a copy of this rank's shards,
which are exchanged with the policy's while the reference is computed.
"""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from kitae.algorithms.config import AlgorithmConfig
from kitae.data.packing import Row
from kitae.models.policy import Policy
from kitae.trainer.collective_ops import local
from kitae.trainer.config import LearningConfig
from kitae.trainer.objectives import PolicyScorer
from kitae.trainer.trainable_model import outputs
from kitae.types import FloatArray


class Reference:
    """Make it before the policy is trained or a checkpoint is loaded: it copies the policy as it is at that time."""

    def __init__(
        self, policy: Policy, algorithm: AlgorithmConfig, training: LearningConfig, temperature: float
    ) -> None:
        self._refresh = algorithm.reference
        named = dict(policy.model.named_parameters())
        self._in_turn = any(isinstance(p, DTensor) for p in named.values())
        self._policy = policy if self._in_turn else _frozen_copy(policy)
        self._scores = PolicyScorer(self._policy, training, temperature)
        if self._in_turn:
            self._pairs = [(n, p, p.detach().clone()) for n, p in named.items() if p.requires_grad]
        else:
            own = self._policy.model.parameters()
            self._pairs = [(n, p, q) for (n, p), q in zip(named.items(), own, strict=True) if p is not q]
        # A running average is kept in fp32: in bf16 each addition would be smaller than the rounding, and be lost.
        self._averages = [q.float().clone() for _, _, q in self._pairs] if algorithm.reference.name == "ema" else []

    def outputs(self, rows: Sequence[Row]) -> list[FloatArray]:
        """The reference's log-probs of the loss tokens of each row."""
        with self._turn():
            return outputs(self._scores, rows)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if self._in_turn:
            self._change_places()
        try:
            yield
        finally:
            if self._in_turn:
                self._change_places()

    @torch.no_grad()
    def _change_places(self) -> None:
        """Exchange one tensor at a time, so that no second copy of all weights is needed."""
        for _, live, mine in self._pairs:
            kept = local(live).clone()
            local(live).copy_(local(mine))
            local(mine).copy_(kept)

    def finish_step(self, step: int) -> None:
        """Refresh the reference if that is due after this step."""
        kind, every = self._refresh.name, self._refresh.every
        if kind not in ("ema", "reset") or every is None or step % every:
            return
        if self._policy.vision is not None and any(p.requires_grad for _, p, _ in self._pairs):
            self._policy.vision.forget()
        with torch.no_grad():
            for i, (_, live, mine) in enumerate(self._pairs):
                if kind == "ema":
                    assert self._refresh.mix is not None
                    mine.copy_(self._averages[i].lerp_(live.float(), self._refresh.mix))
                else:
                    mine.copy_(live)

    def state(self) -> dict[str, Tensor]:
        """Tensors by name. A frozen reference has none: it is the model that the run started from."""
        if self._refresh.name not in ("ema", "reset"):
            return {}
        values = self._averages or [q for _, _, q in self._pairs]
        return {n: v.detach() for (n, _, _), v in zip(self._pairs, values, strict=True)}

    def blank(self, names: Collection[str]) -> dict[str, Tensor]:
        """Empty tensors for a state, to be filled and given to `load_state`."""
        return {name: torch.empty_like(tensor) for name, tensor in self.state().items() if name in names}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for i, (name, _, mine) in enumerate(self._pairs if state else []):
            local(mine).copy_(local(state[name]))
            if self._averages:
                local(self._averages[i]).copy_(local(state[name]))


def _frozen_copy(policy: Policy) -> Policy:
    """The same function in modules of its own; parameters that are not trained are shared with the policy."""
    kept = {id(p): p for p in policy.model.parameters() if not p.requires_grad}
    model = copy.deepcopy(policy.model, kept).requires_grad_(False).eval()
    found = Policy(model, policy.tokenizer, policy.source, exact=policy.exact)
    if policy.vision is not None and found.vision is not None and not policy.vision.trained:
        found.vision.share(policy.vision)
    return found
