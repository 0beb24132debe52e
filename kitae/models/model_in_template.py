"""Models of processes that are forked (`kitae.workers.templates.template`): loaded once for all workers, where that
can be.
"""

from collections.abc import Callable
from functools import cache
from typing import TypeVar

from kitae.models.load import pick_device

T = TypeVar("T")


def forked(device: str, load: Callable[[], T]) -> Callable[[], T]:
    """What gives the model that `load` loads, in a worker. Call this in the template.

    On a CPU it is loaded here and now, and workers share it. A GPU cannot be taken through a fork: there each worker
    loads the model itself, when it is first asked for.
    """
    model = cache(load)
    if pick_device(device).type == "cpu":
        model()
    return model
