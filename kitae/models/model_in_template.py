"""Models in forked processes (`kitae.workers.templates.template`): loaded once for all workers where possible."""

from collections.abc import Callable
from functools import cache
from typing import TypeVar

from kitae.models.load import pick_device

T = TypeVar("T")


def forked(device: str, load: Callable[[], T]) -> Callable[[], T]:
    """A function that returns the model in a worker. Call this in the template.

    On a CPU the model is loaded here, and workers share it. A GPU cannot be used across a fork, so each worker loads
    the model itself when it first needs it.
    """
    model = cache(load)
    if pick_device(device).type == "cpu":
        model()
    return model
