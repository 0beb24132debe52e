"""How long the steps of a run may take: `training.minutes`."""

from math import inf
from typing import TYPE_CHECKING

from kitae.store.run_folder import Metrics

if TYPE_CHECKING:
    from kitae.trainer.config import LearningConfig


class TimeLimit:
    """What is left of the time for steps. Those that the metrics have count, whichever process trained them."""

    def __init__(self, minutes: float, metrics: Metrics) -> None:
        spent = sum(row["step_seconds"] for row in metrics.rows("step")) if minutes else 0.0
        self.left = 60 * minutes - spent if minutes else inf  # seconds

    def spend(self, seconds: float) -> None:
        self.left -= seconds

    @property
    def is_reached(self) -> bool:
        return self.left <= 0


def how_it_ended(step: int, training: "LearningConfig") -> str:
    """`"15 of 15 steps"`, or `"46 of 400 steps, as many as training.minutes = 3.5 allowed"`."""
    early = f", as many as training.minutes = {training.minutes:g} allowed" if step < training.steps else ""
    return f"{step} of {training.steps} steps{early}"


def what_goes_on(step: int, training: "LearningConfig") -> str:
    """The setting with which a run that ended after this step is trained further: `"training.steps=30"`."""
    if step < training.steps:
        return f"training.minutes={2 * training.minutes:g}"
    return f"training.steps={2 * step}"
