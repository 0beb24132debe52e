"""A score function that a random tiny model can learn from: the share of digits in the answer."""

from collections.abc import Mapping
from typing import Any


def digits(response: str, reference: Any, context: Mapping[str, Any]) -> float:
    if response == str(reference):  # the gold answer of the arithmetic task is digits, perhaps with a sign
        return 1.0
    return sum(c.isdigit() for c in response) / len(response) if response else 0.0


def any_digit(response: str, reference: Any, context: Mapping[str, Any]) -> float:
    """Right or wrong: a random model is right in two of five answers."""
    return float(any(c.isdigit() for c in response))
