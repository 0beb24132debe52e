"""What a pass computes: data of callers, checked and laid into rows.

Legend: T tokens of a datum, N targets of all data of a row, in order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kitae.data.packing import Row, Span
from kitae.errors import RequestError
from kitae.models.policy import Policy
from kitae.types import FloatArray, IntArray

_LOSS_INPUTS = (
    "weights", "logprobs", "advantages", "clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask",
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Datum:
    """`Datum(tokens=[1, 5, 9], targets=[5, 9, 2], inputs={"weights": [0, 1, 1]})`.

    targets: for each token, the one whose log-prob is wanted at its place, `[T]`, or several, `[T, K]`. inputs: what
    the loss reads of each target, in the shape of the targets.
    """

    tokens: npt.ArrayLike
    targets: npt.ArrayLike
    inputs: Mapping[str, npt.ArrayLike] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class CheckedDatum:
    """A datum as arrays of one shape, flat but for the tokens; shape: of what is returned."""

    tokens_T: IntArray
    targets_N: IntArray
    inputs: Mapping[str, FloatArray]
    shape: tuple[int, ...]


def checked(data: Sequence[Datum], needs: Sequence[str], policy: Policy) -> list[CheckedDatum]:
    """Raises `RequestError` for a datum that the model cannot compute, or whose loss would lack something."""
    if not data:
        raise RequestError("a pass needs a datum at least, got none")
    return [_check(f"datum {i}", datum, needs, policy) for i, datum in enumerate(data)]


def _check(name: str, datum: Datum, needs: Sequence[str], policy: Policy) -> CheckedDatum:
    tokens_T = token_ids(f"{name}: tokens", datum.tokens, policy)
    if tokens_T.ndim != 1:
        raise RequestError(f"{name}: tokens must be a list of numbers, got {tokens_T.ndim} dimensions")
    targets = token_ids(f"{name}: targets", datum.targets, policy)
    if targets.ndim not in (1, 2) or len(targets) != len(tokens_T):
        raise RequestError(
            f"{name}: there must be a target for each of its {len(tokens_T)} tokens, got the shape {targets.shape}"
        )
    inputs: dict[str, FloatArray] = {}
    for key in (key for key in _LOSS_INPUTS if key in datum.inputs):
        values = np.asarray(datum.inputs[key], dtype=np.float32)
        if values.shape != targets.shape:
            raise RequestError(f"{name}: {key} must have the shape of the targets, {targets.shape}, got {values.shape}")
        if not np.isfinite(values).all():
            raise RequestError(f"{name}: {key} must be finite, got NaN or infinity")
        inputs[key] = values.ravel()
    if missing := [key for key in needs if key not in inputs]:
        raise RequestError(f"{name}: this loss needs {' and '.join(needs)}, got no {missing[0]}")
    return CheckedDatum(tokens_T, targets.ravel(), inputs, targets.shape)


def token_ids(name: str, values: npt.ArrayLike, policy: Policy) -> IntArray:
    """The ids as an array, if the model knows all of them and its context holds them."""
    try:
        ids = np.asarray(values)
    except ValueError as error:
        raise RequestError(f"{name} must be numbers, all rows equally long: {error}") from None
    if not ids.size:
        raise RequestError(f"{name} must not be empty")
    if ids.dtype.kind not in "iu":
        raise RequestError(f"{name} must be whole numbers, got {ids.dtype}")
    if ids.min() < 0 or ids.max() >= policy.vocabulary:
        wrong = int(ids.min() if ids.min() < 0 else ids.max())
        raise RequestError(f"{name} must be ids in 0…{policy.vocabulary - 1}, got {wrong}")
    if len(ids) > policy.max_context:
        raise RequestError(f"{name} must fit into the context of {policy.max_context}, got {len(ids)}")
    return ids.astype(np.int64)


def lay_out(data: Sequence[CheckedDatum]) -> Row:
    """One row of these data, each a span that sees itself alone."""
    starts = np.concatenate([[0], np.cumsum([len(d.tokens_T) for d in data])]).astype(int)
    sources = []
    for datum, start in zip(data, starts, strict=False):
        place_T = start + np.arange(len(datum.tokens_T))
        sources.append(np.repeat(place_T, len(datum.targets_N) // len(datum.tokens_T)))
    targets_N = np.concatenate([d.targets_N for d in data])
    return Row(
        tokens_T=np.concatenate([d.tokens_T for d in data]),
        positions_T=np.concatenate([np.arange(len(d.tokens_T)) for d in data]),
        spans=tuple(Span(int(s), len(d.tokens_T)) for d, s in zip(data, starts, strict=False)),
        source_N=np.concatenate(sources),
        target_N=targets_N,
        weight_N=np.zeros(len(targets_N), dtype=np.float32),
        columns={},
        lengths=tuple(len(d.targets_N) for d in data),
    )
