"""Did an engine compute these tokens with these weights? What it shows of its work, and what that is compared with.

    engine   every token: the last hidden state that it was drawn from ──► SKETCH numbers ──► beside the answer
    trainer  the same tokens in one forward pass: the same numbers, log-probs, and what the seed of the request draws

A sketch is the product of the state with fixed directions of random signs. The difference of two sketches has, on
average, the size of the difference of the states, whatever its direction, so a few numbers for each token show as much
of it as the whole states, averaged over a chunk of tokens. (TOPLOC sends the largest numbers of a chunk and where they
are; this is as short, needs no sorting, and is made in the engine's step.)

States show which model, weights, precision, prompt and tokens were computed. They cannot show how the tokens were
chosen: a cheat might let a small model choose, and compute the states of its text. But each draw is the token at which
a number known from the request's seed and the position falls in the distribution (`engines.native.sampler`), so the
trainer can tell how far the number is from the token's interval.

What cannot be told apart: what is smaller than the rounding of the dtype, such as the step before at a small learning
rate in bfloat16; the last tokens of an answer where rounding decides their draw.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from kitae.models.logprobs import Head, chunk_logits
from kitae.types import FloatArray

SKETCH = 4  # numbers of each token
CHUNK = 32  # tokens over which differences are averaged, so that few wrong ones count in a long answer
UNIFORM = "uniform"  # column: the number that drew each token; negative where that is not to be compared
_STATES = 256  # of which logits are made at a time
_KEY = 0x5EED


@lru_cache
def directions(width: int, device: torch.device) -> Tensor:
    """Random signs `[H, SKETCH]` in fp32, scaled so that a number of a sketch is about as large as one of the state."""
    with np.errstate(over="ignore"):
        z = (np.arange(width * SKETCH, dtype=np.uint64) + np.uint64(_KEY)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z ^= z >> np.uint64(27)
    signs = np.where(z >> np.uint64(63), 1.0, -1.0).astype(np.float32) / np.float32(width**0.5)
    with torch.inference_mode(False):
        return torch.from_numpy(signs.reshape(width, SKETCH)).to(device)


def sketch(hidden_NH: Tensor, directions_HS: Tensor) -> Tensor:
    """`[N, SKETCH]` in fp32."""
    return hidden_NH.float() @ directions_HS


def of_states(head: Head, hidden_NH: Tensor, target_N: Tensor, uniform_N: Tensor, inverse_temperature: float) -> Tensor:
    """`[1 + SKETCH, N]`: how far, in probability, the number that drew a token is from the token's interval; sketch."""
    apart_N = torch.zeros(len(hidden_NH), device=hidden_NH.device)
    for i in range(0, len(hidden_NH), _STATES):
        part = slice(i, i + _STATES)
        states, token, drawn = hidden_NH[part], target_N[part, None], uniform_N[part, None]
        buffer = states.new_empty(len(states), len(head.weight))
        logits = head.transform(chunk_logits(states, head.weight, head.bias, buffer, head.exact).float())
        probs = torch.softmax(logits * inverse_temperature, -1)
        above = probs.cumsum(-1).gather(1, token)
        below = above - probs.gather(1, token)
        apart = torch.maximum(below - drawn, drawn - above).clamp(min=0)
        apart_N[part] = torch.where(drawn < 0, 0.0, apart)[:, 0]
    return torch.cat((apart_N[None], sketch(hidden_NH, directions(hidden_NH.shape[1], hidden_NH.device)).t()))


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What rounding explains: `Tolerance(state=1e-3, draw=1e-3, logprob=1e-3)`.

    state: the mean difference of states over a chunk, as a share of their size. draw: the largest distance of a number
    from the interval of its token, in probability. logprob: the mean difference of log-probs, in nats.
    """

    state: float
    draw: float
    logprob: float


@dataclass(frozen=True, slots=True)
class Differences:
    """How far what an engine says of some tokens is from what the trainer computed, as `Tolerance` has it."""

    state: float
    draw: float
    logprob: float

    @classmethod
    def of(cls, proof_NS: FloatArray, logp_N: FloatArray, found_NC: FloatArray) -> "Differences":
        """found_NC: log-prob, distance of the draw and sketch of each token, from the trainer. At least one token."""
        ours_NS = found_NC[:, 2:].astype(np.float64)
        size = np.sqrt((ours_NS**2).sum(1).mean()) + 1e-9
        apart_N = np.sqrt(((proof_NS - ours_NS) ** 2).sum(1)) / size
        chunks = np.array_split(apart_N, max(1, len(apart_N) // CHUNK))
        state = max(float(chunk.mean()) for chunk in chunks)
        found = state, float(found_NC[:, 1].max()), float(np.abs(logp_N - found_NC[:, 0]).mean())
        return cls(*(value if np.isfinite(value) else np.inf for value in found))

    def fault(self, tolerance: Tolerance) -> str:
        """What rounding does not explain; "" if it explains everything."""
        if self.state > tolerance.state:
            return f"its states must be within {tolerance.state:g} of the trainer's, got {self.state:.3g}"
        if self.draw > tolerance.draw:
            return f"its tokens must be those that their seed draws, within {tolerance.draw:g}, got {self.draw:.3g}"
        if self.logprob > tolerance.logprob:
            return f"its log-probs must be within {tolerance.logprob:g} of the trainer's, got {self.logprob:.3g}"
        return ""
