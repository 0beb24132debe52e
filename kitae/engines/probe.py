"""Does the engine serve the weights that the trainer has? A short fixed sequence, scored on both sides, shows it.

The checksum of a weight update says that bytes arrived; the probe says that the model they make, in the engine's own
process and on its device, gives the trainer's log-probs under the version that is expected.
"""

import asyncio
import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from kitae.engines.base import Engine, WeightUpdate
from kitae.errors import EngineError
from kitae.models.policy import Policy

_LENGTH = 16  # tokens


@dataclass(frozen=True, slots=True)
class Probe:
    """`Probe(version=3, logprobs=(-5.1, -4.9, …))`: of the fixed sequence, at temperature 1."""

    version: int
    logprobs: tuple[float, ...]

    def gap(self, other: tuple[float, ...]) -> float:
        """The largest difference; infinite where either is not a number."""
        gap = max(abs(a - b) for a, b in zip(self.logprobs, other, strict=True))
        return gap if math.isfinite(gap) else math.inf


@runtime_checkable
class ProbedEngine(Engine, Protocol):
    async def probe(self) -> Probe: ...


def score_probe(policy: Policy) -> tuple[float, ...]:
    """Log-probs of the fixed sequence under a policy. Nobody may change its weights meanwhile."""
    tokens_T = (torch.arange(_LENGTH, device=policy.device) * 7 + 3) % policy.vocabulary
    return tuple(policy.score(tokens_T).tolist())


async def check_engine(engine: ProbedEngine, policy: Policy, *, version: int, tolerance: float | None = None) -> float:
    """The largest difference between the log-probs of engine and trainer, after making sure that it is no more than
    `tolerance` and that the engine serves `version`. The default is what rounding can explain.

    An engine that is behind or wrong is sent the policy's trainable parameters again, once; `EngineError` if that does
    not help. The policy must not be trained meanwhile.
    """
    if tolerance is None:
        tolerance = 1e-2 if policy.dtype == torch.float32 else 0.5
    ours = await asyncio.to_thread(score_probe, policy)
    found = await engine.probe()
    if found.version != version or found.gap(ours) > tolerance:
        tensors = {name: p.detach() for name, p in policy.model.named_parameters() if p.requires_grad}
        await engine.update_weights(WeightUpdate(version, tensors, recompute=True))
        found = await engine.probe()
    if found.version != version or found.gap(ours) > tolerance:
        raise EngineError(
            f"the engine must serve version {version} with log-probs within {tolerance:g} of the trainer's; "
            f"it serves version {found.version} with a difference of {found.gap(ours):.3g}, also after a new sync"
        )
    return found.gap(ours)
