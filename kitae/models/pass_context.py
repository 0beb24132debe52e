"""The context of a pass, for modules to which no keyword comes: older families, and most mixers.

It holds for the thread and the pass, and for whatever the backward pass of the pass computes again.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

_context: ContextVar[Any] = ContextVar("kitae_context", default=None)


@contextmanager
def by_thread(context: Any) -> Iterator[None]:
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def of_thread() -> Any:
    """The context of this thread; None outside of a pass."""
    return _context.get()


def carried_on() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For a checkpointed forward pass, and for its second computation, which another thread may do."""
    context = of_thread()
    return by_thread(context), by_thread(context)
