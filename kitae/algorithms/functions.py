"""The functions of one algorithm, ready to call: settings filled in, a user's own loaded, what they need known."""

from typing import Any

import numpy as np

from kitae.algorithms.config import AlgorithmConfig
from kitae.algorithms.requirements import Trait, traits_of
from kitae.algorithms.stages import STAGES, Function
from kitae.errors import ConfigError
from kitae.types import FloatArray


class Functions:
    """`Functions(config, max_tokens=64)`; executes a user's files and refuses what is wrong with them."""

    def __init__(self, config: AlgorithmConfig, max_tokens: int) -> None:
        tables = {key: config.choice(key) for key in STAGES}
        self._stages = {
            key: STAGES[key].resolve(table, max_tokens) for key, table in tables.items() if table.name is not None
        }
        self.traits = Trait(0)
        for function in (f for found in self._stages.values() for f in found.values()):
            self.traits |= traits_of(function)
        if config.has_own_functions:
            self._refuse_unread(config)

    def _refuse_unread(self, config: AlgorithmConfig) -> None:
        """What was kept in case that a user's own function needs it, and that none of them needs."""
        changed = config.choices()
        if Trait.VALUES not in self.traits and (critic := changed.get("critic")):
            key, value = next(iter(critic.items()))
            raise ConfigError(
                f"algorithm.critic.{key} is set to {value!r}, but nothing reads it: no function of this algorithm "
                "needs values"
            )

    def several(self, stage: str) -> dict[str, Function]:
        """The functions of a stage that may combine several, by name."""
        return self._stages[stage]

    def one(self, stage: str) -> Function:
        (function,) = self._stages[stage].values()
        return function

    def of(self, stage: str) -> Trait:
        """What the functions of a stage declare."""
        found = Trait(0)
        for function in self._stages.get(stage, {}).values():
            found |= traits_of(function)
        return found


def numbers(stage: str, values: Any, count: int) -> FloatArray:
    """What a stage function returned, as an array of the right length; a user's own may return anything."""
    try:
        with np.errstate(over="ignore"):  # what is not finite then is refused below
            found: FloatArray = np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with a gradient
        found = np.empty(0, dtype=np.float32)
    if found.shape != (count,) or not np.isfinite(found).all():
        raise ConfigError(f"the {stage} function must return {count} finite numbers, got {brief(values)}")
    return found


def brief(values: Any) -> str:
    """What a function returned, for an error message: shape and type of an array, numbers only if they are few."""
    shape = getattr(values, "shape", None)
    text = repr(values)
    if len(text) < 200 and not shape:
        return text
    bad = ""
    if isinstance(values, np.ndarray) and values.dtype.kind == "f":
        bad = f", {int((~np.isfinite(values)).sum())} of them not finite"
    return f"{type(values).__module__.partition('.')[0]} {type(values).__name__} of shape {tuple(shape or ())}{bad}"
