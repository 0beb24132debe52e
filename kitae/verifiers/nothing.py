"""No verdict, for runs that do not learn from rewards."""

from typing import Any

from kitae.types import Score


def nothing(response: str, reference: Any, context: Any) -> Score:
    """0 for every response."""
    return Score(0.0)
