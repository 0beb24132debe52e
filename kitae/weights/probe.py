"""Does the engine serve the weights that the trainer has? A short fixed sequence, scored on both sides, shows it.

The checksums of a weight update say that bytes arrived; the probe says that the model they make, in the engine's own
process and on its device, gives the trainer's log-probs under the version that is expected.
"""

import math
from dataclasses import dataclass, field

import torch

from kitae.models.policy import Policy

_LENGTH = 16  # tokens


@dataclass(frozen=True, slots=True)
class Probe:
    """`Probe(version=3, logprobs=(-5.1, -4.9, …))`: of the fixed sequence, at temperature 1.

    rounding: the gap that the rounding of this side alone explains, where it says so.
    """

    version: int
    logprobs: tuple[float, ...]
    rounding: float = field(default=0.0, compare=False)

    def gap(self, other: tuple[float, ...]) -> float:
        """The largest difference; infinite where either is not a number."""
        gaps = [abs(a - b) for a, b in zip(self.logprobs, other, strict=True)]
        return max(gaps) if all(map(math.isfinite, gaps)) else math.inf

    def problem(self, who: str, version: int, logprobs: tuple[float, ...], tolerance: float, whose: str) -> str:
        """What is wrong with `who` scored this, if it must serve a version with these log-probs of `whose`; "" if
        nothing is."""
        gap, tolerance = self.gap(logprobs), max(tolerance, self.rounding)
        if self.version == version and gap <= tolerance:
            return ""
        return (
            f"{who} must serve version {version} with log-probs within {tolerance:g} of {whose}; it serves version "
            f"{self.version} with a difference of {gap:.3g}"
        )


def probe_tokens(vocabulary: int) -> tuple[int, ...]:
    """The fixed sequence."""
    return tuple((number * 7 + 3) % vocabulary for number in range(_LENGTH))


def score_probe(policy: Policy) -> tuple[float, ...]:
    """Log-probs of the fixed sequence under a policy. Nobody may change its weights meanwhile."""
    tokens_T = torch.tensor(probe_tokens(policy.vocabulary), device=policy.device)
    return tuple(policy.score(tokens_T).tolist())


def probe_tolerance(dtype: torch.dtype) -> float:
    """The largest gap that rounding can explain, of models that compute in it."""
    return 1e-2 if dtype == torch.float32 else 0.5
