"""S7, aggregation: one weight per loss token, computed once on everything an optimizer step trains on.

A micro-batch's loss is then a plain weighted sum, so neither the cut into micro-batches, nor packing, nor the number
of ranks can change the gradient: a rank gets samples that carry their weights, and gradients are added. Where a library
averages gradients over ranks, multiply by their number.

n_i: loss tokens of sequence i; N: of all; B: sequences; P: prompts. Sequences without loss tokens do not count in B.
A function returns the weight that each loss token of each sequence carries.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, Field

from kitae.algorithms.requirements import Trait, has
from kitae.types import IntArray

Weights = npt.NDArray[np.float64]


def _length(value: Any) -> Any:
    number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not (number or value == "max_tokens"):
        raise ValueError(f"algorithm.aggregation.length must be a number of tokens, or 'max_tokens', got {value!r}")
    return value


Length = Annotated[
    int | Literal["max_tokens"],
    BeforeValidator(_length),
    Field(description="The L of constant-length: a number of tokens, or 'max_tokens', which is that of sampling."),
]


@has(Trait.COUNTS_TOKENS)
def token_sum(lengths_B: IntArray, groups_B: IntArray) -> Weights:
    """1: the learning rate must follow the size of the step."""
    return np.ones(len(lengths_B))


@has(Trait.COUNTS_TOKENS)
def token_mean(lengths_B: IntArray, groups_B: IntArray) -> Weights:
    """1 / N."""
    return np.full(len(lengths_B), 1 / max(1, lengths_B.sum()))


def seq_mean_token_mean(lengths_B: IntArray, groups_B: IntArray) -> Weights:
    """1 / (B n_i)."""
    return 1 / (_sequences(lengths_B) * np.maximum(lengths_B, 1))


@has(Trait.COUNTS_TOKENS)
def seq_mean_token_sum(lengths_B: IntArray, groups_B: IntArray) -> Weights:
    """1 / B."""
    return np.full(len(lengths_B), 1 / _sequences(lengths_B))


@has(Trait.COUNTS_TOKENS)
def constant_length(lengths_B: IntArray, groups_B: IntArray, *, length: Length) -> Weights:
    """1 / (B L) with L = length; there is no default, since the learning rate depends on it."""
    assert length != "max_tokens", "the settings give the number"
    return np.full(len(lengths_B), 1 / (_sequences(lengths_B) * length))


@has(Trait.COUNTS_TOKENS)
def prompt_mean(lengths_B: IntArray, groups_B: IntArray) -> Weights:
    """1 / (P × loss tokens of all samples of the prompt)."""
    _, prompt_B = np.unique(groups_B, return_inverse=True)
    tokens_P = np.bincount(prompt_B, weights=lengths_B)
    return 1 / (max(1, int((tokens_P > 0).sum())) * np.maximum(tokens_P, 1)[prompt_B])


AGGREGATIONS: Mapping[str, Callable[..., Weights]] = {
    "token-mean": token_mean,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "constant-length": constant_length,
    "prompt-mean": prompt_mean,
    "token-sum": token_sum,
}


def _sequences(lengths_B: IntArray) -> int:
    return max(1, int((lengths_B > 0).sum()))
