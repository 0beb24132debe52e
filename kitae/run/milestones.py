"""What a run of any kind leaves in its folder when it begins, is stopped, and is finished."""

import json
from typing import Any, Protocol

from kitae.observe.observer import Observer
from kitae.store.checkpoints import Frontier
from kitae.store.disk import flush
from kitae.store.provenance import record_data
from kitae.store.run_folder import RunStore
from kitae.trainer.base import Trainer


class Stoppable(Protocol):
    """A loop: how far it is, and how that is saved."""

    @property
    def frontier(self) -> Frontier: ...
    async def save(self) -> None: ...


async def begin(store: RunStore, observer: Observer, data: str, step: int, *, forget: bool = False) -> None:
    """Of the run nothing may have been touched before. data: the fingerprint of what it trains on."""
    for change in store.changes.values():
        observer.note(f"changed for this run from here on: {change}")
    await store.begin(step, forget)
    if lost := await store.journal.drop_unreadable():
        observer.note(f"answers that cannot be read are sampled again: {len(lost)}, the first: {lost[0]}")
    await record_data(store.journal, data)


async def save_stopped(store: RunStore, observer: Observer, loop: Stoppable) -> None:
    """With a checkpoint, if there is a step to go on from."""
    if loop.frontier.step:
        observer.status("saving a checkpoint")
        await loop.save()
    await store.journal.add_event("stopped", f"step {loop.frontier.step}")


async def finish(store: RunStore, observer: Observer, trainer: Trainer, after: dict[str, Any] | None) -> None:
    """With the trained model; after: the last evaluation."""
    observer.status("exporting the model")
    await trainer.export(store.folder / "model")
    for path in (store.folder / "model").iterdir():
        flush(path)
    await store.journal.add_event("finished", json.dumps(after))
    await store.sync()
    observer.finished(store.folder)
