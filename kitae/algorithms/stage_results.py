"""What a stage function returned: a user's own may return anything."""

from typing import Any

import numpy as np

from kitae.errors import ConfigError
from kitae.types import FloatArray


def numbers(stage: str, values: Any, count: int) -> FloatArray:
    """As an array of the right length."""
    try:
        with np.errstate(over="ignore"):  # what is not finite then is refused below
            found: FloatArray = np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with a gradient
        found = np.empty(0, dtype=np.float32)
    if found.shape != (count,) or not np.isfinite(found).all():
        raise ConfigError(f"the {stage} function must return {count} finite numbers, got {brief(values)}")
    return found


def brief(values: Any) -> str:
    """What a function returned: shape and type of arrays, numbers only if they are few."""
    shape = getattr(values, "shape", None)
    text = repr(values)
    if len(text) < 200 and not shape:
        return text
    bad = ""
    if isinstance(values, np.ndarray) and values.dtype.kind == "f":
        bad = f", {int((~np.isfinite(values)).sum())} of them not finite"
    return f"{type(values).__module__.partition('.')[0]} {type(values).__name__} of shape {tuple(shape or ())}{bad}"
