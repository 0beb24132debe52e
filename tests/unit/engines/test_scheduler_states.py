"""The scheduler alone, with pages that hold tokens: whatever happens, a sequence reads its own, and all comes back."""

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kitae.engines.base import Request, SamplingParams
from kitae.engines.native.page_cache import PagePool
from kitae.engines.native.scheduler import Scheduler
from kitae.engines.native.sequence import Decoding, SwappedPages
from kitae.errors import RequestError

Held = list[tuple[int, int, int] | None]  # (epoch, position, token); epoch: counts updates that compute all anew


class Machine:
    """Does to pages what a runner does, at random."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.size = rng.choice([1, 2, 4, 8])
        self.host = rng.choice([0, 1, 3, 10, 1000])
        self.pool = PagePool(rng.randrange(6, 40) * 8 // self.size)
        self.slots = rng.choice([None, PagePool(rng.randrange(2, 12))])
        self.scheduler = Scheduler(
            self.pool, self.size, rng.randrange(1, 8), rng.choice([16, 64]), self.swap_out, self.host, None, self.slots,
            rng.randrange(3) if self.slots else 0,
        )  # fmt: skip
        self.pages: dict[int, Held] = {}
        self.states: dict[int, tuple[int, tuple[int, ...]]] = {}  # (epoch, tokens) of each slot
        self.prompts = [self.some(rng.choice([1, 2, 4, 7, 8, 9, 16])) for _ in range(3)]
        self.said: dict[str, tuple[int, ...]] = {}
        self.epoch = self.asked = self.ended = 0
        self.paused = False

    def some(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(1000) for _ in range(count))

    def swap_out(self, pages: list[int], slot: int | None) -> Any:
        kept: Any = tuple(list(self.pages[page]) for page in pages)
        state: Any = () if slot is None else self.states[slot]
        return SwappedPages(len(pages), kept, state, len(pages) + self.scheduler._slot_pages)

    def carry(self, tokens: tuple[int, ...], start: int, before: int | None, after: int | None) -> None:
        """What mixers do with tokens from `start` on: they go on from the state of all tokens before, and no other."""
        if after is None:
            return
        assert (self.states[before] if before is not None else (self.epoch, ())) == (self.epoch, tokens[:start])
        self.states[after] = (self.epoch, tokens)

    def write(self, tokens: tuple[int, ...], start: int, pages: list[int]) -> None:
        for t in range(start, len(tokens)):
            held = self.pages.setdefault(pages[t // self.size], [None] * self.size)
            held[t % self.size] = (self.epoch, t, tokens[t])

    def add(self) -> None:
        rng, limit = self.rng, self.rng.randrange(1, 40)
        session, prompt = rng.choice(["", "", "a", "b"]), rng.choice(self.prompts)
        if session in self.said and rng.random() < 0.7:
            prompt = self.said[session] + self.some(rng.randrange(1, 5))
        prior = self.some(rng.randrange(limit)) if rng.random() < 0.3 else ()
        request = Request(
            str(self.asked), prompt, SamplingParams(max_tokens=limit), 0, share=rng.choice(["", "x"]), session=session
        )
        none = [0] * len(prior)
        sequence = Decoding(request, 0, limit, self.done, list(prior), [0.0 for _ in none], none)
        self.asked += 1
        try:
            self.scheduler.add(sequence)
        except RequestError as error:
            self.done(error)

    def done(self, _: Any) -> None:
        self.ended += 1

    def step(self) -> None:
        if self.paused or self.scheduler.idle:
            return
        if (admission := self.scheduler.admit()).any:
            for prefix in admission.prefixes:
                self.write(prefix.tokens, prefix.start, prefix.pages)
                self.carry(prefix.tokens, prefix.start, prefix.slot if prefix.start else None, prefix.slot)
            if not self.slots:
                self.resume(admission.resumed)
            for source, target in admission.copies:
                self.pages[target] = list(self.pages[source])
            for source, target in admission.branches:
                self.states[target] = self.states[source]
            if self.slots:
                self.resume(admission.resumed)
            self.scheduler.note_swapped_in(admission.resumed)
            self.sample(admission.fresh)
        else:
            self.scheduler.grow()
            for s in self.scheduler.running:
                self.write(self.tokens(s)[: s.cached + 1], s.cached, s.pages)
                self.carry(self.tokens(s)[: s.cached + 1], s.cached, s.slot, s.slot)
                self.check(s)
            self.sample(list(self.scheduler.running))

    def resume(self, resumed: list[Decoding]) -> None:
        for s in resumed:
            first = s.prompt_length // self.size
            if s.swapped is not None:
                self.pages |= zip(s.pages[first:], map(list, s.swapped.tensors), strict=False)
                if s.slot is not None:
                    self.states[s.slot] = s.swapped.states  # type: ignore[assignment]
            elif self.slots:
                self.write(self.tokens(s)[:-1], s.prompt_length, s.pages)
                self.carry(self.tokens(s)[:-1], s.prompt_length, s.slot, s.slot)
            else:
                self.write(self.tokens(s)[:-1], first * self.size, s.pages)

    def check(self, s: Decoding) -> None:
        assert self.pool._holders[s.pages[s.cached // self.size]] == 1, "somebody else reads what is written"
        for t, token in enumerate(self.tokens(s)):
            assert self.pages[s.pages[t // self.size]][t % self.size] == (self.epoch, t, token)

    def sample(self, sequences: list[Decoding]) -> None:
        for s in sequences:
            s.tokens.append(self.rng.randrange(1000))
            if len(s.tokens) >= s.limit or self.rng.random() < 0.02:
                self.said[s.request.session] = self.tokens(s)
                self.scheduler.remove(s, keep=True)
                s.done(None)

    def abort(self) -> None:
        if in_flight := [*self.scheduler.running, *self.scheduler.waiting]:
            sequence = self.rng.choice(in_flight)
            self.scheduler.remove(sequence)
            sequence.done(None)

    def update(self) -> None:
        self.scheduler.forget_prefixes()
        if self.rng.random() < 0.5:
            self.scheduler.preempt_all(again=True)
            self.scheduler.forget_sessions()
            self.epoch += 1

    def pause(self) -> None:
        self.paused = not self.paused
        if self.paused:
            self.scheduler.preempt_all(again=False)
            self.scheduler.forget_prefixes()
            self.scheduler.forget_sessions()
            assert self.pool.free == self.pool.total
            self.pages.clear()

    def swapped(self) -> int:
        return sum(s.swapped.room for s in self.scheduler.waiting if s.swapped)

    @staticmethod
    def tokens(s: Decoding) -> tuple[int, ...]:
        return (*s.request.prompt_tokens, *s.tokens)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_a_sequence_reads_its_own_tokens_and_all_comes_back(seed: int) -> None:
    rng = random.Random(seed)
    machine = Machine(rng)
    doings = machine.add, machine.abort, machine.update, machine.pause, machine.step
    for _ in range(300):
        rng.choices(doings, (15, 3, 2, 2, 78))[0]()
        assert machine.scheduler.host_pages + machine.swapped() == machine.host
    machine.paused = False
    while not machine.scheduler.idle:
        machine.step()
    machine.scheduler.forget_sessions()
    assert machine.ended == machine.asked
    assert machine.pool.free == machine.pool.total and machine.scheduler.host_pages == machine.host
    assert not machine.slots or machine.slots.free == machine.slots.total
