"""The native engine: one thread that repeats schedule → run → postprocess, and an async interface.

Commands (new requests, aborts, weight updates, pause) are taken between two steps, so they work while sequences are
in flight. The engine uses the trainer's own modules: a weight update in the same process is a new version number.

On a GPU the next step is launched before the results of the last one are read. The device alone knows by then which
sequences have ended; it leaves their rows idle. Before a prefill, a preemption, and every command but a new request,
all results are read. So prompts that would fill few free slots wait some steps, and are computed together.
"""

import asyncio
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import torch

from kitae.data.pictures import PICTURE
from kitae.engines.base import Capabilities, Completion, EngineStats, Request, Sampled, WeightUpdate
from kitae.engines.config import EngineConfig
from kitae.engines.native import grammars
from kitae.engines.native.choose_runner import make_runner
from kitae.engines.native.grammars import Grammars
from kitae.engines.native.ngram_speculation import DRAFT_TOKENS
from kitae.engines.native.page_cache import PAGE_SIZE, KVCache, PagePool
from kitae.engines.native.runner import ModelRunner, Result
from kitae.engines.native.scheduler import Scheduler
from kitae.engines.native.sequence import Decoding, Sketch
from kitae.errors import EngineError, KitaeError, RequestError
from kitae.kept_sets import KeptLog
from kitae.kernels.allocation import dismiss_team, return_freed_memory
from kitae.models.adapters import Adapter
from kitae.models.policy import Policy
from kitae.models.routing import RouterShape
from kitae.types import FinishReason
from kitae.weights.probe import Probe

T = TypeVar("T")

_CLOSE_LIMIT = 60.0  # seconds for the step that is running
_LONGEST_BURST = 25  # times the lingering over one request
_STEPS_BETWEEN_PROMPTS = 16  # at most, where prompts interrupt steps that are launched ahead


class _Command(NamedTuple):
    """What the engine's thread does between two steps. `at_rest`: only when the results of all steps are read."""

    run: Callable[[], None]
    at_rest: bool = True


class _Launched(NamedTuple):
    """A step whose results have not been read, with `width` rows of each sequence and the version that samples."""

    sequences: list[Decoding]
    width: int
    version: int
    result: Result


class NativeEngine:
    """Implements `kitae.engines.base.Engine`. `close` it when done; pending requests then raise `EngineError`.

    records_experts: keep the experts that a mixture chooses, with the cache; `ModelError` where the policy has none.
    plain: use the policy's own modules without kernels; None: as the policy was loaded. page_size: tokens in a page of
    the cache. draft_tokens: of each sequence, where few are decoded; None: as `engine.speculation` says.
    """

    capabilities = Capabilities(shares_weights=True)

    def __init__(
        self,
        policy: Policy,
        config: EngineConfig,
        version: int = 0,
        *,
        records_experts: bool = False,
        plain: bool | None = None,
        page_size: int = PAGE_SIZE,
        draft_tokens: int | None = None,
    ) -> None:
        self.policy = policy
        self.version = version
        self._config = config
        self._plain = policy.plain if plain is None else plain
        self._draft_tokens = DRAFT_TOKENS * config.speculation if draft_tokens is None else draft_tokens
        routers = RouterShape.of(policy.model) if records_experts else None
        eight_bits = config.cache_dtype == "int8"
        self.cache = KVCache(
            policy, config.memory_gb, page_size, routers, eight_bits=eight_bits, sequences=config.max_batch
        )
        self.scheduler = Scheduler(
            PagePool(self.cache.pages),
            page_size,
            config.max_batch,
            config.prefill_tokens,
            self.cache.swap_out,
            int(config.host_memory_gb * 2**30 // self.cache.page_bytes),
            self._remember if records_experts else None,
            PagePool(self.cache.states.slots) if self.cache.states else None,
            self.cache.slot_pages,
            whole_prompts=policy.vision is not None,
        )
        self._grammars = Grammars(policy.tokenizer, policy.vocabulary)
        self.runner = self._make_runner()
        self._launched: deque[_Launched] = deque()
        self._steps_since_prompts = 0
        self.generated = 0
        self.busy = 0.0
        self._sequences: dict[str, Decoding] = {}
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._paused = False
        self._closed = False
        self._failure: Exception | None = None
        self._threads = torch.get_num_threads()
        dismiss_team()  # of the thread that has made the model
        self._thread = threading.Thread(target=self._run, name="kitae-engine", daemon=True)
        self._thread.start()

    def _make_runner(self) -> ModelRunner:
        return make_runner(self.policy, self.cache, self._config, plain=self._plain, draft_tokens=self._draft_tokens)

    # The async interface. Each call becomes a command for the engine's thread.

    async def generate(self, request: Request, adapter: Adapter | None = None) -> Completion:
        """adapter: one of those that `kitae.models.adapters` adds to rows; the caller does not change it meanwhile."""
        self._check(request, adapter)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()

        def done(result: Completion | Exception) -> None:
            loop.call_soon_threadsafe(_settle, future, result)

        limit = min(request.sampling.max_tokens, self.policy.max_context - len(request.prompt_tokens))
        prior = request.prior
        sampled = list(prior.tokens), list(prior.logprobs), list(prior.versions)
        constraint, following = request.sampling.constraint, None
        if constraint is not None and (constraint.strict or grammars.can_enforce()):
            begin, stops = self._grammars.begin, request.sampling.stop_tokens
            following = await asyncio.to_thread(begin, constraint, stops, prior.tokens)
        kept = KeptLog(self.policy.vocabulary, prior.kept, len(prior.tokens)) if request.keeps else None
        sequence = Decoding(
            request,
            request.seed,
            limit,
            done,
            *sampled,
            experts=request.prior_experts,
            adapter=adapter,
            kept=kept,
            following=following,
        )
        if (turned := self.policy.turned(request.prompt_tokens)) is not None:
            sequence.shift = int(turned[:, -1].max()) + 1 - len(request.prompt_tokens)
        self._commands.put(_Command(lambda: self._add(sequence), at_rest=False))
        try:
            return await future
        except asyncio.CancelledError:
            self._commands.put(_Command(lambda: self._abort(request.id)))
            raise

    async def update_weights(self, update: WeightUpdate) -> int:
        return await self._command(lambda: self._update(update))

    async def probe(self) -> tuple[Probe, ...]:
        return ()

    async def pause(self) -> None:
        await self._command(lambda: self._set_paused(True))

    async def resume(self) -> None:
        await self._command(lambda: self._set_paused(False))

    async def abort(self, request_id: str) -> None:
        await self._command(lambda: self._abort(request_id))

    async def suspend(self) -> None:
        await self._command(self._suspend)

    def progress(self, known: Mapping[str, int]) -> dict[str, Sampled]:
        return {s.request.id: s.progress(known.get(s.request.id, 0)) for s in self.in_flight()}

    def stats(self) -> EngineStats:
        return self.scheduler.stats(self.version, self.generated, self.busy)

    def in_flight(self) -> list[Decoding]:
        """The sequences that are not done. They grow while they are read: a token counts once it is in `versions`."""
        return list(self._sequences.values())

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._commands.put(_Command(lambda: None))
            await asyncio.to_thread(self._thread.join, _CLOSE_LIMIT)

    async def _command(self, action: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result: T | Exception = action()
            except Exception as error:
                result = error
            loop.call_soon_threadsafe(_settle, future, result)

        if self._closed or not self._thread.is_alive():
            raise EngineError("the engine is closed")
        self._commands.put(_Command(run))
        return await future

    def _check(self, request: Request, adapter: Adapter | None) -> None:
        """Refuse what can never work; nothing else in flight is touched."""
        if self._closed or self._failure is not None:
            raise EngineError(f"the engine is closed{f': {self._failure}' if self._failure else ''}")
        if request.id in self._sequences:
            raise RequestError(f"request id {request.id!r} is in flight already")
        length, context = len(request.prompt_tokens), self.policy.max_context
        if length == 0:
            raise RequestError(f"request {request.id!r}: the prompt is empty")
        if adapter is not None and request.session:  # its cache would be that of another adapter
            raise RequestError(f"request {request.id!r}: one with an adapter must have no session")
        if length >= context:
            raise RequestError(
                f"request {request.id!r}: a prompt of {length} tokens leaves no room in the context of {context}"
            )
        if request.sampling.max_tokens < 1:
            raise RequestError(
                f"request {request.id!r}: max_tokens must be at least 1, got {request.sampling.max_tokens}"
            )
        self._check_shape(request)
        if len(request.prior.tokens) >= min(request.sampling.max_tokens, context - length):
            raise RequestError(f"request {request.id!r}: there is nothing left to sample after its prior tokens")
        text = [token for token in request.prompt_tokens if token < PICTURE]
        if len(text) < length:
            self._check_pictures(request)
        highest = max(text, default=0)
        if highest >= self.policy.vocabulary or min(request.prompt_tokens) < 0:
            raise RequestError(
                f"request {request.id!r}: token ids must be in 0…{self.policy.vocabulary - 1}, got {highest}"
            )

    def _check_shape(self, request: Request) -> None:
        s = request.sampling
        if s.penalised and request.keeps:
            raise RequestError(
                f"request {request.id!r}: an answer that is trained on must have {', '.join(s.penalised)} off: the "
                "trainer's log-probs would be those of other logits"
            )
        if not 0.01 <= s.repetition_penalty <= 100:  # logits must stay finite: others are in the same step
            rule = "repetition_penalty must be from 0.01 to 100"
            raise RequestError(f"request {request.id!r}: {rule}, got {s.repetition_penalty}")
        if not all(abs(x) <= 1e6 for x in (s.presence_penalty, s.frequency_penalty, *(b for _, b in s.logit_bias))):
            raise RequestError(f"request {request.id!r}: penalties and biases must be within ± 1e6")
        rows = self.policy.vocabulary
        if wrong := [token for token, _ in s.logit_bias if not 0 <= token < rows]:
            raise RequestError(f"request {request.id!r}: tokens of logit_bias must be in 0…{rows - 1}, got {wrong[0]}")

    def _check_pictures(self, request: Request) -> None:
        """Refuse pictures that nothing reads, that are not kept, or of which a part is missing."""
        vision = self.policy.vision
        shown = Counter(token for token in request.prompt_tokens if token >= PICTURE)
        if vision is None:
            raise RequestError(f"request {request.id!r}: a model of text cannot see, got {len(shown)} pictures")
        for token, places in shown.items():
            try:
                whole = vision.reader.places(token)
            except KitaeError as error:
                raise RequestError(f"request {request.id!r}: {error}") from None
            if places % whole:
                raise RequestError(f"request {request.id!r}: a picture has {whole} places, got {places}")

    # The engine's thread.

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # OpenMP keeps this per thread
        with torch.inference_mode():
            while not self._closed:
                try:
                    self._take_commands()
                    if not self._closed and not self._paused and not self.scheduler.idle:
                        self._step()
                except Exception as error:
                    self._failure = error
                    self._fail_all(EngineError(f"the engine failed: {type(error).__name__}: {error}"), cause=error)
                    break
        while not self._commands.empty():
            self._commands.get().run()
        self._fail_all(EngineError("the engine was closed"))

    def _take_commands(self) -> None:
        """Run queued commands; sleep on the queue when there is nothing else to do.

        An idle engine waits a moment after each request, so that a burst of them is computed as one batch: that is
        faster, and the same requests make the same batches again. It does not wait for a stream that does not end.
        """
        lingers = self.scheduler.idle
        longest: float | None = None
        while True:
            nothing_to_do = not self._closed and (self._paused or self.scheduler.idle)
            if nothing_to_do:
                longest = None
            elif longest is None:
                longest = time.monotonic() + _LONGEST_BURST * self.runner.linger
            waits = lingers and (longest is None or time.monotonic() < longest)
            if nothing_to_do:
                dismiss_team()
            try:
                command = self._commands.get(nothing_to_do or waits, None if nothing_to_do else self.runner.linger)
            except queue.Empty:
                return
            if command.at_rest:
                self._collect(0)
            command.run()

    def _step(self) -> None:
        """One round: admit and compute prompts if any can be admitted, else one token for everybody."""
        began = time.perf_counter()
        admission = self.scheduler.admit() if self._prompts_are_due() else None
        if admission is not None and admission.any:
            self._steps_since_prompts = 0
            self._collect(0)
            self._launched.append(_Launched(admission.fresh, 1, self.version, self.runner.prefill(admission)))
            self.scheduler.note_swapped_in(admission.resumed)
            self._collect(0)
        else:
            self._steps_since_prompts += 1
            self._launch()
            self._collect(self.runner.ahead)
        self.busy += time.perf_counter() - began

    def _prompts_are_due(self) -> bool:
        """Whether this step may compute prompts: at once, unless steps are launched ahead and few slots are free."""
        scheduler = self.scheduler
        admissible = min(len(scheduler.waiting), self._config.max_batch - len(scheduler.running))
        many = 8 * admissible >= len(scheduler.running)
        return many or not self.runner.ahead or self._steps_since_prompts >= _STEPS_BETWEEN_PROMPTS

    def _launch(self) -> None:
        """Launch a step of all running sequences.

        Drafts continue the text, so all results must be read before the first step with drafts; in a full cache there
        are no drafts.
        """
        width = self.runner.width(self.scheduler.running)
        if width > 1 and any(step.width == 1 for step in self._launched):
            self._collect(0)
            width = self.runner.width(self.scheduler.running)
        if not self.scheduler.grow(width + sum(step.width for step in self._launched), preempt=False):
            self._collect(0)
            self.scheduler.grow()
            width = 1
        if sequences := list(self.scheduler.running):
            self._launched.append(_Launched(sequences, width, self.version, self.runner.decode(sequences, width)))

    def _collect(self, left: int) -> None:
        """Read the results of all launched steps but the last `left`. Rows of ended sequences hold no token."""
        while len(self._launched) > left:
            step = self._launched.popleft()
            rows = step.sequences if step.width == 1 else [s for s in step.sequences for _ in range(step.width)]
            for sequence, token, logprob, sketch, kept in zip(rows, *step.result(), strict=True):
                if token >= 0 and (step.width == 1 or not self._has_ended(sequence)):
                    if sequence.kept is not None:
                        sequence.kept.add(kept)
                    self._append(sequence, token, logprob, sketch, step.version)

    def _has_ended(self, sequence: Decoding) -> bool:
        """Whether a stop string ended the sequence before this token: the device does not know stop strings."""
        return self._sequences.get(sequence.request.id) is not sequence

    def _append(self, sequence: Decoding, token: int, logprob: float, sketch: Sketch, version: int) -> None:
        sequence.tokens.append(token)
        if sketch:
            sequence.sketches.append(sketch)
        sequence.logprobs.append(logprob)
        sequence.versions.append(version)
        self.generated += 1
        sampling, following = sequence.request.sampling, sequence.following
        if following is not None:
            following.take(token)
        if following is not None and following.fault:
            self.scheduler.remove(sequence)
            sequence.done(RequestError(f"request {sequence.request.id!r}: {following.fault}"))
        elif (
            (following is not None and following.over and not sampling.stop_tokens)
            or token in sampling.stop_tokens
            or (sampling.stop_strings and self._ends_in_stop_string(sequence))
        ):
            self._finish(sequence, "stop")
        elif len(sequence.tokens) >= sequence.limit:
            self._finish(sequence, "length")

    def _ends_in_stop_string(self, sequence: Decoding) -> bool:
        stops = sequence.request.sampling.stop_strings
        tail = sequence.tokens[-(4 * max(map(len, stops)) + 8) :]  # a character may take four byte tokens
        text = self.policy.tokenizer.decode(tail, skip_special_tokens=False)
        return any(stop in text for stop in stops)

    def _finish(self, sequence: Decoding, finish: FinishReason) -> None:
        self._remember(sequence)
        self.scheduler.remove(sequence, keep=finish in ("stop", "length"))
        self._sequences.pop(sequence.request.id, None)
        sequence.done(sequence.completion(finish))

    def _remember(self, sequence: Decoding) -> None:
        """Keep the experts that the tokens were sampled with, from before what was computed again since."""
        start, before = sequence.request.experts_from, sequence.experts
        if start is None or not sequence.pages:
            return
        found = self.cache.experts_of(sequence.pages, start, sequence.cached)
        if found is None:
            return
        if before is not None:
            found[: len(before)] = before[: len(found)]
        sequence.experts = found

    def _add(self, sequence: Decoding) -> None:
        if self._closed or self._failure is not None:
            sequence.done(EngineError("the engine is closed"))
            return
        id, plain_done = sequence.request.id, sequence.done

        def done(result: Completion | Exception) -> None:  # does not hold the sequence, which holds it
            self._sequences.pop(id, None)
            plain_done(result)

        try:
            if id in self._sequences:
                raise RequestError(f"request id {id!r} is in flight already")
            self.scheduler.add(sequence)
        except RequestError as error:
            plain_done(error)
            return
        sequence.done = done
        self._sequences[id] = sequence

    def _abort(self, request_id: str) -> None:
        if (sequence := self._sequences.get(request_id)) is not None:
            self._finish(sequence, "abort")

    def _suspend(self) -> None:
        for sequence in list(self._sequences.values()):
            self._finish(sequence, "suspended")

    def _update(self, update: WeightUpdate) -> int:
        if update.manifest is not None:
            raise EngineError(
                f"weight update {update.version} must have no manifest: the native engine shares the trainer's weights"
            )
        self.version = update.version
        self.runner.weights_changed()
        self.scheduler.forget_prefixes()
        if update.recompute:
            self.scheduler.preempt_all(again=True)
            self.scheduler.forget_sessions()
        return self.version

    def _set_paused(self, paused: bool) -> None:
        if paused == self._paused:
            return
        self._paused = paused
        if paused:
            self.runner.rest() if self._config.keep_cache else self._free_cache()
        if self.policy.device.type == "cpu":
            return_freed_memory()  # engine and trainer allocate other sizes, so neither fills what the other has freed
        if not paused and not self._config.keep_cache:
            self._restore_cache()

    def _free_cache(self) -> None:
        """Sequences in flight give up their pages, which are swapped out or will be computed again."""
        self.scheduler.preempt_all(again=False)
        self.scheduler.forget_prefixes()
        self.scheduler.forget_sessions()
        self.runner = ModelRunner(self.policy, self.cache, plain=True)  # holds none of its memory
        self.cache.free()

    def _restore_cache(self) -> None:
        self.cache.allocate()
        with torch.inference_mode(False):
            self.runner = self._make_runner()

    def _fail_all(self, error: EngineError, cause: Exception | None = None) -> None:
        error.__cause__ = cause
        for sequence in list(self._sequences.values()):
            sequence.done(error)
        self._sequences.clear()


def _settle(future: "asyncio.Future[T]", result: T | Exception) -> None:
    if future.done():  # its awaiter was cancelled
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
