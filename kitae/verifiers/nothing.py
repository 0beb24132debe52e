"""No verdict: for runs that learn from something else than rewards."""

from typing import Any

from kitae.types import Score


def nothing(response: str, reference: Any, context: Any) -> Score:
    """0 for every response: nothing is judged."""
    return Score(0.0)
