"""Prompts into slots, and what becomes of each: sample, score, journal, filter, perhaps refill.

    feed      takes a free slot, issues the next prompt of the stream                 waits for: a slot
    rollouts  one task per slot, until there is a result to put into the buffer       waits for: engine, verifier, disk

A third task copies unfinished responses into the journal from time to time. A cancelled slot leaves nothing behind but
journalled rollouts, which a resumed run takes up again; a suspended one also journals its partial rollouts.

Of prompts that were mastered the last time, most visits are left out (`pipeline.mastered_visits`).
"""

import asyncio
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from statistics import fmean
from time import perf_counter

from kitae.config.root import RLConfig
from kitae.data.prompt_stream import PromptStream
from kitae.engines.base import Provable, rollout_of
from kitae.envs.episode_context import Suspended
from kitae.envs.rollouts import Episodes
from kitae.errors import DataError, RequestError
from kitae.observe.observer import Observer
from kitae.rl.buffer import Buffer, Slot, SlotResult
from kitae.rl.config import PipelineConfig
from kitae.rl.watchdog import Watch
from kitae.store.journal import Journal, PendingSlot
from kitae.types import Group, Prompt


class Curriculum:
    """pass_rates: by prompt id, the group that asked it the last time, and the mean score of that group."""

    def __init__(self, config: PipelineConfig, seed: int, pass_rates: Mapping[str, tuple[int, float]]) -> None:
        self.config = config
        self._seed = seed
        self._rates = dict(pass_rates)

    def skips(self, group_id: int, prompt: Prompt) -> str:
        """Why this visit is left out, by a coin that knows only the seed and the visit; empty: it is not."""
        if not self.active(self.config):
            return ""
        _, rate = self._rates.get(prompt.id, (-1, float("-inf")))
        coin = random.Random(f"{self._seed}/{group_id}").random()
        return "mastered" if rate >= self.config.mastered and coin >= self.config.mastered_visits else ""

    def record(self, group: Group) -> None:
        """Remember the mean score of a visit, if it is the newest one to its prompt."""
        if not self.active(self.config) or not group.valid:
            return
        last, _ = self._rates.get(group.prompt.id, (-1, 0.0))
        if group.id >= last:
            self._rates[group.prompt.id] = (group.id, fmean(r.score.value for r in group.valid if r.score))

    @staticmethod
    def active(config: PipelineConfig) -> bool:
        return config.mastered_visits < 1


_SUSPEND_LIMIT = 10.0  # seconds
_WORTH_A_COPY = 32  # tokens that a response must have grown by
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 30.0  # seconds between copies


@dataclass(frozen=True, slots=True)
class GivenUp:
    """How many slots a batch did not wait for, and how many groups were asked for it and not needed."""

    overdue: int = 0
    spare: int = 0


class Issuing:
    """Issues prompts and fills slots. cursor: the next prompt of the stream; issued: slots so far.

    drop_reason: why a group is not trained on, or None if it is. wants_greedy: whether groups need a greedy response.
    """

    def __init__(
        self,
        config: RLConfig,
        journal: Journal,
        stream: PromptStream,
        episodes: Episodes,
        buffer: Buffer,
        curriculum: Curriculum,
        observer: Observer,
        watch: Watch,
        *,
        drop_reason: Callable[[Group], str | None],
        wants_greedy: bool,
    ) -> None:
        self.cursor, self.issued = journal.issued()
        self.overdue = 0  # slots given up since the last batch
        self.spare = 0  # groups that were asked and not needed since then
        self.proved: Provable | None = None  # the engine, where its answers are checked
        self.config = config
        self._journal = journal
        self._stream = stream
        self._episodes = episodes
        self._buffer = buffer
        self._curriculum = curriculum
        self._observer = observer
        self._watch = watch
        self._drop_reason = drop_reason
        self._wants_greedy = wants_greedy
        self._wanted = asyncio.Semaphore(0)  # slots that are to be issued
        self._given_up: set[Slot] = set()  # and not in the journal yet
        self._lock = asyncio.Lock()
        self._fills: dict[Slot, asyncio.Task[None]] = {}
        self._refills_left = self._refill_limit
        self._finished = 0  # rollouts since the last batch

    @property
    def _refill_limit(self) -> int:
        return int(self.config.pipeline.refill.most * self.config.training.prompts_per_step)

    @property
    def _next_step(self) -> int:
        return self._buffer.version + 1

    async def feed(self, tasks: asyncio.TaskGroup, last_step: int) -> None:
        """Fill first the slots that an interrupted run had issued and not trained, then new ones, as many as are
        wanted up to the last step."""
        needed = (last_step - self._buffer.version) * self._buffer.size
        resumed = await self._resumed(needed)
        for _ in range(needed - len(resumed)):
            self._wanted.release()
        for pending in resumed:
            with self._watch.waits("feed", "a free slot"):
                slot = await self._buffer.reserve(pending.number, pending.oldest)
            self._refills_left -= max(0, pending.asked - self._width(slot))
            self._start(tasks, slot, list(pending.groups), pending.asked)
        while True:
            with self._watch.waits("feed", "nothing: all prompts are issued"):
                await self._wanted.acquire()
            with self._watch.waits("feed", "a free slot"):
                slot = await self._buffer.reserve(self.issued)
            self.issued += 1
            self._start(tasks, slot, [], 0)

    async def snapshots(self) -> None:
        """Copy what unfinished responses have grown by into the journal, so that a killed run loses little of them.

        The pause between two copies follows what the last one took, so that copies cost half a percent of the time.
        """
        pause = _SHORTEST_PAUSE
        while self._journal.lasts:
            await asyncio.sleep(pause)
            began = perf_counter()
            if grown := self._episodes.grown(_WORTH_A_COPY):
                await self._journal.extend_suspended(*grown)
            pause = min(max(200 * (perf_counter() - began), _SHORTEST_PAUSE), _LONGEST_PAUSE)

    def taken(self, rollouts: int) -> GivenUp:
        """A batch with so many rollouts was taken. Returns what was given up for it, and counts anew."""
        self._finished -= rollouts
        self._refills_left = self._refill_limit
        given_up, self.overdue, self.spare = GivenUp(self.overdue, self.spare), 0, 0
        return given_up

    def give_up(self, slot: Slot) -> None:
        """Cancel a slot that a batch did not wait for. Another is issued in its place when the journal has this."""
        self._given_up.add(slot)
        self.overdue += 1
        self._fills[slot].cancel()

    async def suspend(self) -> None:
        """Journal partial rollouts; complete ones are there already. Verdicts that have not arrived after a while are
        asked for again when the run is resumed."""
        await self._episodes.suspend()
        if self._fills:
            await asyncio.wait(self._fills.values(), timeout=_SUSPEND_LIMIT)

    def cancel(self) -> None:
        for task in self._fills.values():
            task.cancel()

    async def _resumed(self, needed: int) -> list[PendingSlot]:
        """The slots to take up again, at most as many as are needed. One that cannot be trained in time is skipped: a
        batch had given it up, and the run was killed before that was in the journal."""
        kept: list[PendingSlot] = []
        found, version = self._journal.pending(), self._buffer.version
        for slot in sorted(found, key=lambda s: version if s.oldest is None else s.oldest):
            trained_at = version + len(kept) // self._buffer.size
            if slot.oldest is not None and slot.oldest + self._buffer.bound < trained_at:
                await self._journal.skip_slot(self._next_step, slot.number, "overdue")
            elif len(kept) < needed:
                kept.append(slot)
        return sorted(kept, key=lambda s: s.number)

    async def _issue(self, slot: Slot) -> int:
        """Issue a new group for the slot; it is in the journal before it counts. A slot that is given up while its
        group is being written gets the group all the same: else the journal might have one that belongs to no slot."""
        issuing = asyncio.ensure_future(self._issue_next(slot))
        try:
            return await asyncio.shield(issuing)
        except asyncio.CancelledError:
            if slot in self._given_up:
                await asyncio.wait({issuing})
            issuing.cancel()
            raise

    async def _issue_next(self, slot: Slot) -> int:
        async with self._lock:
            while True:
                group_id = self.cursor
                prompt = self._stream.at(group_id)
                skipped = self._curriculum.skips(group_id, prompt)
                with self._watch.waits("feed", "the journal"):
                    await self._journal.add_prompt(group_id, prompt, slot.version, slot.number, skipped)
                self.cursor += 1
                if not skipped:
                    return group_id

    def _start(self, tasks: asyncio.TaskGroup, slot: Slot, group_ids: list[int], had: int) -> None:
        task = self._fills[slot] = tasks.create_task(self._fill(tasks, slot, group_ids, had))
        task.add_done_callback(lambda _: self._fills.pop(slot))

    def _width(self, slot: Slot) -> int:
        """How many groups a slot asks at once: over all slots, `oversample` on average."""
        share = self.config.pipeline.refill.oversample
        return int((slot.number + 1) * share) - int(slot.number * share)

    async def _fill(self, tasks: asyncio.TaskGroup, slot: Slot, group_ids: list[int], had: int) -> None:
        """Ask groups of prompts until one can be trained on.

        group_ids: groups that the slot had before an interruption and that have no fate yet; had: how many groups it
        had in all, dropped ones included.

        Groups are judged in the order in which they were issued, even if a later one is ready first: short answers have
        no advantage. Groups after the first that can be trained on are spare. After an interruption the replacement
        of a group may be spare: the group itself can be trained on now if, say, its verifier works again.
        """
        width = self._width(slot)
        new, paid = max(0, width - had), max(0, had - width)  # prompts to issue; replacements that were counted before
        dropped: list[tuple[Group, str]] = []
        asked: dict[int, asyncio.Task[Group | None]] = {}
        try:
            while True:
                while len(asked) < width and (group_ids or new):
                    if not group_ids:
                        group_ids.append(await self._issue(slot))
                        new -= 1
                    asked[group_ids[0]] = tasks.create_task(self._ask(group_ids[0]))
                    group_ids.pop(0)
                if not asked:
                    self._buffer.put(slot, SlotResult(None, tuple(dropped)))
                    return
                group = await asked[first := next(iter(asked))]
                if group is None:  # the run is stopping
                    await asyncio.wait(asked.values())
                    return
                del asked[first]
                self._curriculum.record(group)
                reason = self._drop_reason(group)
                if reason is None:
                    await self._skip_spare(asked, group_ids)
                    self._buffer.put(slot, SlotResult(group, tuple(dropped)))
                    return
                dropped.append((group, reason))
                if paid:
                    paid -= 1
                elif self._refills_left > 0:
                    self._refills_left -= 1
                    new += 1
        except asyncio.CancelledError:
            await _ended(asked.values())
            if slot not in self._given_up:
                raise
            await self._journal.skip_slot(self._next_step, slot.number, "overdue")
            self._given_up.remove(slot)
            self._wanted.release()

    async def _skip_spare(self, asked: dict[int, asyncio.Task[Group | None]], unasked: list[int]) -> None:
        """Cancel the other groups of a slot that has one to train on."""
        if spare := [*asked, *unasked]:
            ended = await _ended(asked.values())
            self._finished -= sum(len(group.rollouts) for group in ended)
            self.spare += len(spare)
            await self._journal.skip(self._next_step, spare, "spare")

    async def _ask(self, group_id: int) -> Group | None:
        """None: the run is stopping, and what was sampled is in the journal. Any other error ends the run."""
        try:
            return await self._run_group(group_id)
        except Suspended:
            return None

    async def cleaned(self, result: SlotResult) -> SlotResult:
        """The same without answers of engines that are out: these are sampled again, and the group is judged anew. No
        other group is asked in its place."""
        if result.group is None or not self._withdrawn(result.group):
            return result
        group = await self._without_withdrawn(result.group)
        reason = self._drop_reason(group)
        return (
            SlotResult(group, result.dropped)
            if reason is None
            else SlotResult(None, (*result.dropped, (group, reason)))
        )

    def _withdrawn(self, group: Group) -> list[str]:
        """Rollouts of a group that an engine answered which is out by now."""
        if self.proved is None or not self.proved.withdrawn:
            return []
        known = (*group.rollouts, *([group.greedy] if group.greedy else ()))
        return [id for r in known if (id := f"{self._episodes.label}/{r.id}") in self.proved.withdrawn]

    async def _run_group(self, group_id: int) -> Group:
        return await self._without_withdrawn(await self._sample_group(group_id))

    async def _without_withdrawn(self, group: Group) -> Group:
        while self.proved is not None and (gone := self._withdrawn(group)):
            self.proved.withdrawn.difference_update(gone)
            await self._journal.forget_rollouts([rollout_of(id) for id in gone])
            self._finished -= len(group.rollouts)
            group = await self._sample_group(group.id)
        return group

    async def _sample_group(self, group_id: int) -> Group:
        prompt = self._stream.at(group_id)
        size = self.config.training.group_size
        try:
            group = await self._episodes.group(group_id, prompt, size, self._journal, greedy=self._wants_greedy)
        except (RequestError, DataError) as problem:
            # The prompt itself is impossible (longer than the context, say, or one that the chat template refuses): its
            # group is lost, the others go on.
            await self._journal.add_event("bad prompt", f"{prompt.id}: {problem}")
            self._observer.note(f"prompt {prompt.id} was skipped: {problem}")
            group = Group(group_id, prompt, (), problem=str(problem))
        self._finished += len(group.rollouts)
        expected = self._buffer.slots * size
        self._observer.status(f"step {self._next_step}: {self._finished}/{expected} rollouts")
        return group


async def _ended(tasks: Collection[asyncio.Task[Group | None]]) -> list[Group]:
    """Cancel tasks and wait for their end; returns the groups of those that were complete."""
    for task in tasks:
        task.cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    return [group for group in found if isinstance(group, Group)]
