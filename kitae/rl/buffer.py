"""The buffer between generation and training: what bounds staleness.

A prompt is issued into a slot, and the slot is stamped with the version that the engine serves at that moment, so no
token sampled for it is older. A slot comes back only after the engine serves the version that was trained from it; the
next batch may be taken a moment before that. There are `(max_staleness + 1) × prompts_per_step` slots. With n prompts
per step and the bound k, a slot issued at version v must be trained while the policy is at most at version v + k: that
is its deadline.

Batches are taken oldest slot first from what is ready, but only if what is left behind can still make its deadlines,
n slots a step: after the batch of version t, at most m × n slots with a deadline up to t + m, for m = 0 … k. Else the
batch waits for older slots, or, if overdue ones are to be dropped, goes without those that are not ready. It never
waits forever: once everything issued is ready, the oldest n satisfy the rule, because the rule held before.
`docs/async.md` has the proof.

Without dropping, no slot can be passed over for more than k steps, however long it took: finishing early decides when
a prompt is trained on, never whether.
"""

import asyncio
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kitae.types import Group


@dataclass(frozen=True, slots=True)
class SlotResult:
    """What became of a slot: a group to train on, or None where every group that was tried was dropped.

    dropped: those groups, each with the reason.
    """

    group: Group | None
    dropped: tuple[tuple[Group, str], ...]


@dataclass(eq=False, slots=True)
class Slot:
    """One place in the buffer, from issue to training. `number` counts slots over the whole run; `version` is that of
    the oldest token that may be sampled for it."""

    number: int
    version: int
    result: SlotResult | None = field(default=None, repr=False)


class Buffer:
    """Slots, and the two versions that the bound is about.

    version: the policy that the next batch trains from; deadlines are counted from it, and a checkpoint is of it.
    served: the policy that the engine samples from; new slots are stamped with it. It is one behind `version` from an
    update (`train`) until the engine has the new weights (`release`). An engine counts versions too, since every token
    must say what it was sampled with.

    on_overdue: is called with each slot that is given up because a batch would have to wait for it; None: batches wait.
    """

    def __init__(
        self,
        prompts_per_step: int,
        max_staleness: int,
        version: int = 0,
        on_overdue: Callable[[Slot], None] | None = None,
    ) -> None:
        self.size = prompts_per_step
        self.bound = max_staleness
        self.version = self.served = version
        self.on_overdue = on_overdue
        self.slots = (max_staleness + 1) * prompts_per_step
        self.open: list[Slot] = []  # issued and not trained yet, oldest first
        self._ready = 0  # open slots that are filled, at most
        self._taken: deque[int] = deque()  # slots of each batch whose version is not served yet
        self._changed = asyncio.Event()

    async def reserve(self, number: int, version: int | None = None) -> Slot:
        """Wait for a free slot; unblocked by `release`. version: of the oldest token in a resumed slot, if it has any.

        Such a token may be of a version that the run lost and has not trained again yet. The slot is then stamped with
        the version that is served.
        """
        while len(self.open) + sum(self._taken) >= self.slots:
            await self._change()
        slot = Slot(number, self.served if version is None else min(version, self.served))
        insort(self.open, slot, key=lambda s: (s.version, s.number))
        return slot

    def put(self, slot: Slot, slot_result: SlotResult) -> None:
        assert slot.result is None, f"slot {slot.number} has been filled already"
        slot.result = slot_result
        self._ready += 1
        self._wake()

    async def take(self) -> list[Slot]:
        """Wait for a batch; unblocked by `put`. Its slots are no longer open, and not free before `release`."""
        while (batch := self.pick()) is None:
            await self._change()
        overdue = self._overdue(batch)
        gone = {*batch, *overdue}
        self.open = [slot for slot in self.open if slot not in gone]
        self._ready -= len(batch)
        self._taken.append(len(batch))
        if self.on_overdue and overdue:
            for slot in overdue:
                self.on_overdue(slot)
            self._wake()
        return batch

    def pick(self) -> list[Slot] | None:
        """The slots of the next batch; None: it has to wait."""
        if self._ready < self.size:  # called after every `put`, so it must not look at all slots each time
            return None
        batch = [slot for slot in self.open if slot.result is not None][: self.size]
        if len(batch) < self.size or (self.on_overdue is None and self._overdue(batch)):
            return None
        return batch

    @property
    def awaited(self) -> list[Slot]:
        """The slots that keep the next batch waiting: for the watchdog's message."""
        ready = [slot for slot in self.open if slot.result is not None][: self.size]
        return self._overdue(ready) or [slot for slot in self.open if slot.result is None]

    def train(self, version: int) -> None:
        """The batch that was taken has become `version`."""
        self.version = version

    def release(self, version: int) -> None:
        """The engine serves `version`: the slots it was trained from are free."""
        self.served = version
        if self._taken:
            self._taken.popleft()
        self._wake()

    def _overdue(self, batch: list[Slot]) -> list[Slot]:
        """Slots that would have to be in no later batch than this one, or others could miss their deadlines.

        None of them is ready: a ready one would be in the batch, which is made of the oldest.
        """
        taken = set(batch)
        left = [slot for slot in self.open if slot not in taken]  # oldest first, so by deadline
        late = 0
        for m in range(self.bound + 1):
            due = sum(slot.version + self.bound - self.version <= m for slot in left) - late
            late += max(0, due - m * self.size)
        return left[:late]

    async def _change(self) -> None:
        await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
