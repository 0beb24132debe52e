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
        self.scheduler = Scheduler(
            self.pool, self.size, rng.randrange(1, 8), rng.choice([16, 64]), self.swap_out, self.host
        )
        self.pages: dict[int, Held] = {}
        self.prompts = [self.some(rng.choice([1, 2, 4, 7, 8, 9, 16])) for _ in range(3)]
        self.said: dict[str, tuple[int, ...]] = {}
        self.epoch = self.asked = self.ended = 0
        self.paused = False

    def some(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(1000) for _ in range(count))

    def swap_out(self, pages: list[int]) -> Any:
        return SwappedPages(len(pages), tuple(list(self.pages[page]) for page in pages))

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
            for s in admission.resumed:
                first = s.prompt_length // self.size
                if s.swapped is None:
                    self.write(self.tokens(s)[:-1], first * self.size, s.pages)
                else:
                    self.pages |= zip(s.pages[first:], map(list, s.swapped.tensors), strict=False)
            for source, target in admission.copies:
                self.pages[target] = list(self.pages[source])
            self.scheduler.note_swapped_in(admission.resumed)
            self.sample(admission.fresh)
        else:
            self.scheduler.grow()
            for s in self.scheduler.running:
                self.write(self.tokens(s)[: s.cached + 1], s.cached, s.pages)
                self.check(s)
            self.sample(list(self.scheduler.running))

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
        return sum(s.swapped.pages for s in self.scheduler.waiting if s.swapped)

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
