"""A run whose trainer was lost goes on from its last checkpoint, as after a crash, but in the same process."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from kitae.errors import TrainerLost
from kitae.observe.observer import Observer
from kitae.store.run_folder import RunStore

T = TypeVar("T")

_MOST_FRUITLESS = 3  # times that a trainer may be lost before it has trained a step


async def until_done(
    attempt: Callable[[str | None, bool], Awaitable[T]],
    store: RunStore,
    observer: Observer,
    checkpoint: str | None,
    forget: bool = False,
) -> T:
    """attempt: trains from a checkpoint, or the last, and may give up what came after it. Steps that were lost count as
    progress only once they are behind the last one that the metrics have."""
    fruitless = 0
    while True:
        before = _trained(store)
        try:
            return await attempt(checkpoint, forget)
        except TrainerLost as lost:
            fruitless = 0 if _trained(store) > before else fruitless + 1
            if fruitless == _MOST_FRUITLESS:
                raise
            observer.note(f"{lost}. The run goes on from its last checkpoint")
            await store.journal.add_event("trainer lost", str(lost))
        checkpoint, forget = None, False
        store.changes.clear()  # they are recorded


def _trained(store: RunStore) -> int:
    return max((row["step"] for row in store.metrics.rows("step")), default=0)
