"""The interfaces of the kernels: which functions callers may ask of a device, and which of them it may lack.

Each function is a protocol with one signature, and its docstring is the contract for every device. A record holds the
functions that a device has for one dtype; one that only some devices have is `… | None` in it. None means: use plain
torch. `kitae.kernels.devices` returns the records. This module imports no implementation.

Legend: T rows (tokens of a packed row), H width of the model, D head dimension, V vocabulary; of mixtures E experts, K
that one token gets, I inner width of one.
"""

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor
from torch.nn import Linear

Made = TypeVar("Made")

# Modules


class RmsNorm(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`weight * x / rms(x)` over the last dimension, differentiable."""


class Swiglu(Protocol):
    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """`silu(gate) * up`, differentiable."""


class Embedding(Protocol):
    def __call__(self, tokens: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        """Rows of the weight, differentiable; padding: a token whose row does not learn from it."""


class Rotary(Protocol):
    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the heads of `[T, heads, D]`; cos and sin `[T, D]`, whose halves are equal. Differentiable."""


class Linears(Protocol):
    def __call__(self, x: Tensor, *modules: Linear) -> tuple[Tensor, ...]:
        """The outputs of several linear layers with the same input x, differentiable."""


class SwigluLinear(Protocol):
    def __call__(self, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        """`(silu(gate) * up) @ weight.T`, differentiable; takes over gate and up, which must be fresh."""


class GateLimits(NamedTuple):
    """`GateLimits(gate_up_bias, down_bias, alpha=1.702, limit=7.0)`: biases and limits of the experts of gpt-oss.

    Both products have a bias, `[E, 2 I]` and `[E, H]`. Gate is at most `limit`, up within ±`limit`, and they make
    `(up + 1) * gate * sigmoid(alpha * gate)`. They lie in turn, and weights the other way round: `[E, H, 2 I]`,
    `[E, I, H]`.
    """

    gate_up_bias: Tensor
    down_bias: Tensor
    alpha: float
    limit: float


class Experts(Protocol):
    def __call__(
        self, x: Tensor, chosen: Tensor, gates: Tensor, gate_up: Tensor, down: Tensor, limits: GateLimits | None = None
    ) -> Tensor:
        """`Σ_k gates[t, k] · (silu(gate) * up) @ down[e].T`, e = `chosen[t, k]`, of rows x `[T, H]`; differentiable.

        chosen and gates `[T, K]`, the experts of a row all different; gate and up are the halves of `x @ gate_up[e].T`,
        for weights `[E, 2 I, H]` and `[E, H, I]`. No weight of an expert that nobody chose is read. limits: as gpt-oss.
        """


class HeadNorms(NamedTuple):
    """`HeadNorms(of_queries, of_keys, 1e-6)`: weights `[D]` of norms of each head, before it is rotated (Qwen3)."""

    queries: Tensor
    keys: Tensor
    eps: float


class NormedQkv(Protocol):
    def __call__(
        self,
        x: Tensor,
        norm: tuple[Tensor, float],
        cos: Tensor,
        sin: Tensor,
        dim: int,
        *modules: Linear,
        heads: HeadNorms | None = None,
    ) -> tuple[Tensor, ...]:
        """x, and q, k and v `[T, heads, D]` of the norm of x `[T, H]`, q and k rotated; differentiable.

        norm: weight and epsilon. Rows of q, k and v are strided. All three layers have a bias, or none has. heads: the
        norms of q and k before they are rotated.
        """


class NormedPair(Protocol):
    def __call__(self, x: Tensor, y: Tensor, norm: tuple[Tensor, float], *modules: Linear) -> tuple[Tensor, ...]:
        """x + y, and the outputs of two linear layers without bias for its norm; differentiable.

        norm: weight and epsilon.
        """


@dataclass(frozen=True, slots=True, eq=False)
class LayerKernels:
    """Whole decoder layers of the Llama family, and the linear layers within them: all of these, or none."""

    normed_qkv: NormedQkv
    normed_pair: NormedPair
    linears: Linears
    swiglu_linear: SwigluLinear


@dataclass(frozen=True, slots=True, eq=False)
class ModuleKernels:
    """The functions that replace modules of a model (`kitae.models.fuse`). Exact mode uses norms and gates alone."""

    rms_norm: RmsNorm
    swiglu: Swiglu
    embedding: Embedding | None = None
    experts: Experts | None = None
    rotary: Rotary | None = None
    layers: LayerKernels | None = None


# Log-probs, attention, gradients, updates


class RowStatistics(Protocol):
    def __call__(self, logits: Tensor, targets: Tensor, inverse_temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Log-prob of the target, log-normaliser and entropy of each row of `[N, V]`."""


class RowGradients(Protocol):
    def __call__(
        self,
        logits: Tensor,
        targets: Tensor,
        lse: Tensor,
        entropy: Tensor,
        grad_logp: Tensor,
        grad_entropy: Tensor | None,
        inverse_temperature: float,
    ) -> Tensor:
        """Overwrites the logits with their gradient and returns them."""


class Accumulate(Protocol):
    def __call__(self, total: Tensor | None, part: Tensor) -> Tensor:
        """`total + part` in fp32, in place; without a total, a new one."""


class AddProduct(Protocol):
    def __call__(self, total: Tensor, dy: Tensor, x: Tensor) -> None:
        """`total += dy.T @ x` for rows dy `[M, N]` and x `[M, K]`; total in fp32."""


class SumRows(Protocol):
    def __call__(self, parts: Tensor, order: Tensor, first: Tensor) -> Tensor:
        """`[S, …]` → `[T, …]`: row t is the fp32 sum of the parts `order[first[t]:first[t + 1]]`, in that order."""


class CausalSoftmax(Protocol):
    def __call__(self, scores: Tensor, fold: int, scale: float, window: int | None) -> Tensor:
        """Scores `[N, fold · L, S]` to probabilities, in place: position i of L sees keys up to i + S - L."""


class SoftmaxBackward(Protocol):
    def __call__(self, probs: Tensor, dprobs: Tensor, delta: Tensor, scale: float) -> Tensor:
        """`probs · (dprobs - delta) · scale`, written over `dprobs`; delta is one fp32 number per row."""


class SpanTable:
    """The spans of a packed row, and the tables that kernels make of them on a device, once for all layers.

    bounds `[n, 4]`, int64, on the host: start, length, start of the prefix, its length. A span sees its prefix, which
    lies before it, and, causally, itself; each row belongs to one span.
    """

    def __init__(self, bounds: Tensor) -> None:
        self.bounds = bounds
        self._made: dict[Hashable, Any] = {}

    @functools.cached_property
    def listed(self) -> list[tuple[int, int, int, int]]:
        return [(a, b, c, d) for a, b, c, d in self.bounds.tolist()]

    @functools.cached_property
    def longest(self) -> int:
        """Positions of a span and its prefix."""
        return max(length + prefix for _, length, _, prefix in self.listed)

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        if key not in self._made:
            self._made[key] = make()
        made: Made = self._made[key]
        return made


class AttendSpans(Protocol):
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spans: SpanTable,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """q `[T, Hq, D]`, k, v `[T, Hkv, D]` → `[T, Hq, D]`, and the log-normaliser of each row and head."""


class AttendSpansBackward(Protocol):
    def __call__(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        spans: SpanTable,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of q, k and v, side by side in one tensor `[T, Hq + 2 Hkv, D]`, and of sinks, where there are any.

        grad: the gradient of the output.
        """


@dataclass(frozen=True, slots=True)
class AdamWPace:
    """The numbers of one step, counted from 1: `AdamWPace(3, 1e-5, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)`."""

    step: int
    rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    @property
    def decay(self) -> float:
        """The factor of weight decay, which is applied to a weight before the step."""
        return 1 - self.rate * self.weight_decay

    @property
    def corrections(self) -> tuple[float, float]:
        """The divisors of the mean and of the root of the square, which correct that both begin at 0."""
        return 1 - self.betas[0] ** self.step, math.sqrt(1 - self.betas[1] ** self.step)


class AdamWPart(NamedTuple):
    """A weight with its gradient and moments.

    parameter: fp32, or bfloat16 with `rest`, int16, the difference to its fp32 master (`kitae.kernels.adamw`).
    """

    parameter: Tensor
    rest: Tensor | None
    grad: Tensor
    mean: Tensor
    square: Tensor


class AdamWStep(Protocol):
    def __call__(self, parts: Sequence[AdamWPart], scale: Tensor, pace: AdamWPace) -> None:
        """A step of AdamW on weights of one device, in fp32, with their gradients times `scale`, in one pass.

        A scale that is no number leaves everything as it is: the host need not know it yet. mean and square are fp32,
        or bfloat16, which is rounded by chance: `kitae.kernels.adamw` is the same in plain torch.
        """


@dataclass(frozen=True, slots=True, eq=False)
class SoftmaxKernels:
    """The softmax of attention that holds all its scores; a device with flash attention does not need it."""

    forward: CausalSoftmax
    backward: SoftmaxBackward


@dataclass(frozen=True, slots=True, eq=False)
class SpanKernels:
    """Attention of packed rows that reads keys where they lie and holds the scores of a few positions only.

    sizes: of heads. capped: whether it has softcaps and sinks too.
    """

    forward: AttendSpans
    backward: AttendSpansBackward
    sizes: range
    capped: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class TrainingKernels:
    """The functions of the training step on one device."""

    modules: ModuleKernels
    row_statistics: RowStatistics
    row_gradients: RowGradients
    accumulate: Accumulate
    add_product: AddProduct | None = None
    softmax: SoftmaxKernels | None = None
    spans: SpanKernels | None = None
    sum_rows: SumRows | None = None
    adamw: AdamWStep | None = None


# Decoding


class AttendPages(Protocol):
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        table: Tensor,
        lengths: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Store a new key and value per sequence and attend: q `[Hq, B, D]`, k, v `[Hkv, B, D]` → `[B, Hq, D]`."""


class Draw(Protocol):
    def __call__(self, logits: Tensor, inverse_temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and log-probs of one draw per row of `[B, V]`; inverse temperature 0 is greedy."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodingKernels:
    """The functions of a decoding step that runs the policy's own modules."""

    attend: AttendPages
    sample: Draw
