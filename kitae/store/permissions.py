"""Who may read what a run writes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

_PRIVATE = 0o077


@contextmanager
def private(shared: bool) -> Iterator[None]:
    """Files and folders that this process, and those that it starts, make in here are for their user alone, unless
    shared.

    It holds for all threads. Where it is nested, the outermost ends it.
    """
    before = os.umask(_PRIVATE)
    if shared:
        os.umask(before)
    try:
        yield
    finally:
        os.umask(before)
