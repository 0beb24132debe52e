"""How long the steps of a run may take: `training.minutes`."""

from math import inf


class TimeLimit:
    """What is left of the time for steps. seconds: what those before have taken, whichever process trained them."""

    def __init__(self, minutes: float, seconds: float = 0.0) -> None:
        self.left = 60 * minutes - seconds if minutes else inf

    def spend(self, seconds: float) -> None:
        self.left -= seconds

    @property
    def is_reached(self) -> bool:
        return self.left <= 0
