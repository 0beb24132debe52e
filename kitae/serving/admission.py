"""A limit on the answers that are under way. A request beyond it is refused at once, with a time to try again."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from kitae.serving.refusals import Refused

_LONGEST_WAIT = 60  # seconds
_WEIGHT = 0.1  # of the newest answer in the mean of how long they take


class AdmissionControl:
    """`with admission.take(4): …` holds four places; `taken` is the number of places in use now."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = 0
        self.refused = 0
        self._seconds = 1.0

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        if count > self.most:
            raise Refused(f"one request may have at most {self.most} answers, got {count}", param="n")
        if self.taken + count > self.most:
            self.refused += 1
            wait = max(1, min(_LONGEST_WAIT, round(self._seconds)))
            message = f"all {self.most} places are taken: {self.taken} answers are under way; try again in {wait} s"
            raise Refused(message, 429, code="queue_full", seconds=wait)
        began = time.monotonic()
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count
            self._seconds += _WEIGHT * (time.monotonic() - began - self._seconds)
