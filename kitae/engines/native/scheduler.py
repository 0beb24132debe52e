"""Which sequences run in the next step. Pure bookkeeping on pages and lists; no tensors.

Waiting sequences are admitted in order of arrival as soon as a batch slot and pages are free, and prompts go before
decoding, so a finished sequence's slot is refilled at once. When the cache is full, the sequence admitted last gives
its pages back and waits in front of the queue; its random stream is a function of the position, so it continues
exactly where it was. Its own pages are swapped out to the memory of the host while there is room, and swapped in when
it is admitted again; otherwise they are computed again.

The cache of a session is kept after an answer, as long as nobody needs the pages: the next request of the session
computes only what is new. These pages are the first to be freed, those of the session that waits longest before others.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kitae.engines.base import EngineStats
from kitae.engines.native.page_cache import PagePool
from kitae.engines.native.sequence import Decoding, Prefix, PrefixKey, SessionPrefix, SwappedPages
from kitae.errors import RequestError


@dataclass(slots=True)
class Admission:
    """Work of a prefill step: new prompts to compute, fresh samples to start, preempted ones to restore."""

    prefixes: list[Prefix] = field(default_factory=list)
    fresh: list[Decoding] = field(default_factory=list)
    resumed: list[Decoding] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    branches: list[tuple[int, int]] = field(default_factory=list)  # slots of prompts, and of sequences that begin there
    tokens: int = 0

    @property
    def any(self) -> bool:
        return bool(self.fresh or self.resumed)


class Scheduler:
    """Assigns pages and batch slots to sequences.

    swap_out: copies pages and a slot to the host, which has room for `host_pages`, of which a slot takes `slot_pages`.
    before_preemption: called with a sequence before its pages are taken. slots: of what mixers carry on; None: the
    model has none. whole_prompts: a tail is computed from the end of its prompt on alone, as it always is with mixers.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        max_batch: int,
        prefill_tokens: int,
        swap_out: Callable[[list[int], int | None], SwappedPages] | None = None,
        host_pages: int = 0,
        before_preemption: Callable[[Decoding], None] | None = None,
        slots: PagePool | None = None,
        slot_pages: int = 0,
        whole_prompts: bool = False,
    ) -> None:
        self.pool = pool
        self._whole_prompts = whole_prompts or slots is not None
        self.slots = slots
        self._slot_pages = slot_pages
        self.page_size = page_size
        self.max_batch = max_batch
        self.prefill_tokens = prefill_tokens
        self.waiting: deque[Decoding] = deque()
        self.running: list[Decoding] = []
        self.prefixes: dict[PrefixKey, Prefix] = {}
        self.users: dict[PrefixKey, int] = {}
        self.session_prefixes: OrderedDict[str, SessionPrefix] = OrderedDict()  # by session, the oldest first
        self.prompt_tokens = 0
        self.prompt_tokens_shared = 0
        self.preemptions = 0
        self.restored = 0
        self.host_pages = host_pages  # that are free
        self._swap_out = swap_out
        self._before_preemption = before_preemption

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, sequence: Decoding) -> None:
        """Queue a request, or raise `RequestError` if the whole cache could not hold it."""
        needed = self._pages(sequence.prompt_length) + 2  # its own tail page and one to grow into
        if needed > self.pool.total:
            raise RequestError(
                f"request {sequence.request.id!r}: a prompt of {sequence.prompt_length} tokens needs {needed} pages of "
                f"{self.page_size} tokens, and the whole cache has {self.pool.total}; raise engine.memory_gb"
            )
        self.users[sequence.key] = self.users.get(sequence.key, 0) + 1
        self.waiting.append(sequence)

    def admit(self) -> Admission:
        """Move sequences from waiting to running while there is room."""
        admission = Admission()
        while self.waiting and len(self.running) < self.max_batch:
            if not self._admit_one(self.waiting[0], admission):
                break
            self.running.append(self.waiting.popleft())
        if not admission.any and not self.running and self.waiting:
            if not self._drop_unused_prefixes() and not self._drop_session():
                self._fail(self.waiting[0])
            return self.admit()
        return admission

    def _admit_one(self, sequence: Decoding, admission: Admission) -> bool:
        prefix = self.prefixes.get(sequence.key)
        found = self._session_prefix(sequence) if prefix is None else None
        kept = found or SessionPrefix((), [])
        shared = sequence.prompt_length // self.page_size
        own = self._pages(sequence.cached) - shared
        prompt = 0 if prefix else self._pages(sequence.prompt_length) - len(kept.pages)
        again = 0 if sequence.swapped else max(0, len(sequence.tokens) - 1)
        work = (0 if prefix else sequence.prompt_length - len(kept.tokens)) + again
        # Every running sequence may need a page soon; without this reserve admission and preemption would alternate.
        reserve = min(len(self.running), self.pool.total // 8)
        slots = 1 if prefix or found else 2
        while own + prompt + reserve > self.pool.free or (self.slots and self.slots.free < slots):
            if not self._drop_session(but=found):
                return False
        if admission.any and admission.tokens + work > self.prefill_tokens:
            return False
        if prefix is None:
            self.session_prefixes.pop(sequence.request.session, None)
            pages, slot = kept.pages + self.pool.take(prompt), kept.slot if found else self._take_slot()
            prefix = Prefix(sequence.key, pages, len(kept.tokens), adapter=sequence.adapter, slot=slot)
            self.prefixes[sequence.key] = prefix
            admission.prefixes.append(prefix)
            self.prompt_tokens += sequence.prompt_length - len(kept.tokens)
            self.prompt_tokens_shared += len(kept.tokens)
        else:
            self.prompt_tokens_shared += sequence.prompt_length
        full = prefix.pages[:shared]
        self.pool.share(full)
        sequence.prefix = prefix
        sequence.pages = full + self.pool.take(own)
        sequence.slot = self._take_slot()
        admission.tokens += work
        (admission.resumed if sequence.tokens else admission.fresh).append(sequence)
        if not sequence.swapped and (self._whole_prompts or not sequence.tokens):
            if sequence.prompt_length % self.page_size:
                admission.copies.append((prefix.pages[shared], sequence.pages[shared]))
            if sequence.slot is not None and prefix.slot is not None:
                admission.branches.append((prefix.slot, sequence.slot))
        return True

    def _take_slot(self) -> int | None:
        return self.slots.take(1)[0] if self.slots else None

    def _release_slot(self, slot: int | None) -> None:
        if self.slots and slot is not None:
            self.slots.release([slot])

    def grow(self, ahead: int = 1, *, preempt: bool = True) -> bool:
        """Give every running sequence pages for its next `ahead` tokens; returns whether all have them.

        When there are too few pages, the youngest sequences are preempted, unless `preempt` is off.
        """
        position = 0
        while position < len(self.running):
            sequence = self.running[position]
            wanted = min(sequence.cached + ahead, sequence.capacity)
            if len(sequence.pages) * self.page_size >= wanted:
                position += 1
            elif self.pool.free or self._drop_session():
                sequence.pages += self.pool.take(1) if self.pool.free else []
            elif not preempt:
                return False
            elif not self._drop_unused_prefixes() and not self._preempt_youngest():
                self._fail(sequence)
        return True

    def preempt_all(self, *, again: bool) -> None:
        """All running sequences give their pages back; `again`: nothing is swapped out, since the weights changed."""
        while self.running:
            self._preempt(again=again)
        for sequence in self.waiting if again else ():
            self.forget_swapped(sequence)

    def _preempt_youngest(self) -> bool:
        if len(self.running) < 2:
            return False
        self._preempt()
        self.preemptions += 1
        return True

    def _preempt(self, *, again: bool = False) -> None:
        victim = self.running.pop()
        if self._before_preemption:
            self._before_preemption(victim)
        own = victim.pages[victim.prompt_length // self.page_size : self._pages(victim.cached)]
        room = len(own) + self._slot_pages
        if self._swap_out and victim.tokens and not again and own and room <= self.host_pages:
            self.host_pages -= room
            victim.swapped = self._swap_out(own, victim.slot)
        self._release_pages(victim)
        self.waiting.appendleft(victim)

    def note_swapped_in(self, resumed: list[Decoding]) -> None:
        """The pages of these sequences are in the cache again."""
        for sequence in resumed:
            self.restored += sequence.swapped is not None
            self.forget_swapped(sequence)

    def forget_swapped(self, sequence: Decoding) -> None:
        """Free the copy on the host, which is back in the cache or of no use."""
        if sequence.swapped is not None:
            self.host_pages += sequence.swapped.room
            sequence.swapped = None

    def _fail(self, sequence: Decoding) -> None:
        """End a sequence that alone needs more than the whole cache, where no preemption can help."""
        held = sequence.cached
        self.remove(sequence)
        sequence.done(
            RequestError(
                f"request {sequence.request.id!r}: its {held} tokens fill the whole cache of {self.pool.total} "
                f"pages of {self.page_size} tokens; raise engine.memory_gb or lower max_tokens"
            )
        )

    def remove(self, sequence: Decoding, *, keep: bool = False) -> None:
        """Forget a finished, failed or aborted sequence; `keep`: its pages stay for the next request of its session."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        if keep and sequence.request.session and sequence.pages:
            self._keep_for_session(sequence)
        self._release_pages(sequence)
        self.forget_swapped(sequence)
        self.users[sequence.key] -= 1
        if not self.users[sequence.key]:
            del self.users[sequence.key]
            self._drop_prefix(sequence.key)

    def _keep_for_session(self, sequence: Decoding) -> None:
        tokens = (*sequence.request.prompt_tokens, *sequence.tokens)[: sequence.cached]
        held = self._pages(len(tokens))
        self._drop_session(session=sequence.request.session)
        self.session_prefixes[sequence.request.session] = SessionPrefix(tokens, sequence.pages[:held], sequence.slot)
        sequence.pages, sequence.slot = sequence.pages[held:], None

    def _session_prefix(self, sequence: Decoding) -> SessionPrefix | None:
        """What the cache keeps of the request's session, where the prompt begins with it; else that is freed."""
        session, prompt = sequence.request.session, sequence.request.prompt_tokens
        kept = self.session_prefixes.get(session)
        if kept is None:
            return None
        if len(kept.tokens) < len(prompt) and prompt[: len(kept.tokens)] == kept.tokens:
            return kept
        self._drop_session(session=session)
        return None

    def _drop_session(self, *, session: str | None = None, but: SessionPrefix | None = None) -> bool:
        """Free the pages of a session, or of the one that waits longest; returns whether there were any."""
        for name, kept in self.session_prefixes.items():
            if kept is not but and session in (None, name):
                self.pool.release(self.session_prefixes.pop(name).pages)
                self._release_slot(kept.slot)
                return True
        return False

    def forget_sessions(self) -> None:
        while self._drop_session():
            pass

    def forget_prefixes(self) -> None:
        """After a weight update: later sequences must compute their prompts again. Running ones keep their pages."""
        for key in list(self.prefixes):
            self._drop_prefix(key)

    def _drop_unused_prefixes(self) -> bool:
        """Free prompts that only waiting sequences want; they will be computed again when those are admitted."""
        in_use = {id(s.prefix) for s in self.running}
        unused = [key for key, prefix in self.prefixes.items() if id(prefix) not in in_use]
        for key in unused:
            self._drop_prefix(key)
        return bool(unused)

    def _drop_prefix(self, key: PrefixKey) -> None:
        prefix = self.prefixes.pop(key, None)
        if prefix is not None:
            self.pool.release(prefix.pages)
            self._release_slot(prefix.slot)

    def _release_pages(self, sequence: Decoding) -> None:
        self.pool.release(sequence.pages)
        self._release_slot(sequence.slot)
        sequence.pages, sequence.slot = [], None
        sequence.prefix = None

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def stats(self, version: int, generated: int, busy: float) -> EngineStats:
        return EngineStats(
            version=version,
            prompt_tokens=self.prompt_tokens,
            prompt_tokens_shared=self.prompt_tokens_shared,
            generated_tokens=generated,
            preemptions=self.preemptions,
            restored=self.restored,
            running=len(self.running),
            waiting=len(self.waiting),
            busy_seconds=busy,
        )
