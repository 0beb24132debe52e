"""How long the steps of a run may take: `training.minutes`."""

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kitae.trainer.config import LearningConfig


class TimeLimit:
    """What is left of the time for steps. seconds: what those before have taken, whichever process trained them."""

    def __init__(self, minutes: float, seconds: float = 0.0) -> None:
        self.left = 60 * minutes - seconds if minutes else inf

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
