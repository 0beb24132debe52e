"""Decoding on a GPU: the whole step is one CUDA graph, and its state never leaves the device.

Each sequence has a row of `state` (see `kitae.kernels.cuda.decoding` for the columns) and a row of page numbers. A step
reads them, computes one token for every row, and advances the rows: position, random stream, end. So the host only
replays the graph; it uploads rows of new sequences and numbers of new pages, moves rows together when sequences leave,
and reads tokens and log-probs one step late.

Graphs are captured when a batch size is first needed, for sizes rounded up to a bucket; rows beyond the batch are idle.
They read the policy's parameters in place, so weight updates need nothing. A model that cannot be captured (one that
waits for the device within its forward pass) runs the same step without a graph.

Samples of a prompt are neighbours and have its pages in common. Where that spares much reading, a step computes their
attention over these pages together.

Rows with top-k, top-p or min-p are sampled again from the logits by the reference code; while such a row, or one with
stop strings, is running, every step is waited for.
"""

import itertools
import logging
import math
import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from triton.errors import TritonError

from kitae.engines.native import sampler
from kitae.engines.native.gpu_decoder import GpuDecoder
from kitae.engines.native.page_cache import Kept, KVCache
from kitae.engines.native.paged_attention import ExactAttention, PrefillAttention
from kitae.engines.native.runner import (
    Draws,
    ModelRunner,
    Result,
    StepTokens,
    accepted,
    refuse_float8,
    require_finite,
)
from kitae.engines.native.scheduler import Admission
from kitae.engines.native.sequence import Decoding
from kitae.engines.proof import SKETCH, sketch
from kitae.kernels.cuda import decoding, paged, shared_prompts, speculation, training
from kitae.kernels.exact.exact_attention import Reach
from kitae.kernels.transfer import send
from kitae.models.latent import SeesLatents
from kitae.models.logprobs import HeadTransform
from kitae.models.lora import merged_bytes
from kitae.models.policy import Policy

log = logging.getLogger("kitae")

_HEADS_OF_ONE_KEY = 16  # that a program of a kernel takes, where all heads have one long key

_MERGED = 0.5  # share of the free memory that copies of weights with merged adapters may take; else there are none


def bucket(batch: int) -> int:
    """The batch size that is captured for `batch` rows: 1, 2, 4, 8, 16, 24, 32, 48, …, 128, 160, …, 256, 320, …"""
    if batch <= 8:
        return 1 << (batch - 1).bit_length()
    step = max(8, (1 << (batch - 1).bit_length()) // 8)
    return -(-batch // step) * step


class CudaRunner(ModelRunner):
    linger = 0.005
    speculative_rows = 64
    cheap_rows = 32  # up to which one more costs next to nothing: beyond, a sequence drafts one token
    worth_sharing = 80 * 2**20  # bytes that a layer must read less for prompts that are read once for all samples

    def __init__(
        self,
        policy: Policy,
        cache: KVCache,
        max_batch: int,
        *,
        float8: bool = False,
        draft_tokens: int = 0,
        proves: bool = False,
    ) -> None:
        """float8: weights are kept in 8 bits."""
        super().__init__(policy, cache, plain=True, draft_tokens=draft_tokens, proves=proves)
        self._float8 = float8
        self._merges = float8 or merged_bytes(policy.model) <= _MERGED * torch.cuda.mem_get_info(self.device)[0]
        self.decoder = self._fused()
        rows = bucket(max_batch)
        many = max(rows, self.speculative_rows if self.draft_tokens else 0)
        columns = min(-(-policy.max_context // cache.page_size), cache.pages) + 1
        self.state = torch.zeros(rows, decoding.COLUMNS, dtype=torch.int64, device=self.device)
        self.table = torch.zeros(rows, columns, dtype=torch.int32, device=self.device)
        self.logits = torch.empty(many, policy.vocabulary, dtype=policy.dtype, device=self.device)
        longest = min(policy.max_context, cache.pages * cache.page_size) + 1
        drafting = self.speculative_rows // 2 if self.draft_tokens else 0
        self.texts = torch.zeros(drafting, longest, dtype=torch.int32, device=self.device)
        self.groups = torch.zeros(max(1, rows // 2), 3, dtype=torch.int32, device=self.device)
        self.skips = torch.zeros(rows, dtype=torch.int32, device=self.device)
        self._shared: tuple[int, bool] | None = None  # for how many rows a sequence, and whether it is worth it
        self._text_rows: list[Decoding] = []  # whose texts are in the first rows, as they are now
        self._rows: list[Decoding] = []  # who holds the first rows of state and table
        self._pages: list[int] = []  # how many of their pages the table has
        self._steps: dict[tuple[int, int, bool], _Step] = {}  # by sequences, rows of each, and whether they share
        self._pool = torch.cuda.graph_pool_handle()
        self._capturable = True
        read = (2 + (SKETCH if proves else 0)) * many
        self._results = [torch.empty(read, dtype=torch.int32, pin_memory=True) for _ in range(3)]
        self._turn = 0
        self._addresses = self._find_addresses()

    def weights_changed(self) -> None:
        """Parameters that were written in place are read there; copies are made again; if somebody moved them, start
        afresh."""
        if self._addresses != self._find_addresses():
            self._steps.clear()
            self._pool = torch.cuda.graph_pool_handle()  # one whose last graph is gone takes no other
            with torch.inference_mode(False):
                self.decoder = self._fused()
            self._addresses = self._find_addresses()
        elif self.decoder is not None:
            self.decoder.refresh()

    def _fused(self) -> GpuDecoder | None:
        if self.policy.exact or not self._merges:
            return None
        found = GpuDecoder.of(self.policy, self.cache)
        if self._float8 and found is None:
            refuse_float8(self.policy, "fused")
        if found is not None and self._float8:
            found.use_float8(self.policy)
        return found

    def _find_addresses(self) -> list[int]:
        return [p.data_ptr() for p in self.policy.model.parameters()]

    # Prompts

    def prefill(self, admission: Admission) -> Result:
        for s in (*admission.fresh, *admission.resumed):
            self._forget(s)
        return super().prefill(admission)

    def _prompt_states(
        self, tokens_T: Tensor, positions_T: Tensor, context: PrefillAttention | ExactAttention
    ) -> Tensor:
        if self.decoder is None or isinstance(context, ExactAttention):
            return super()._prompt_states(tokens_T, positions_T, context)
        context.stored = True
        slots_T = context.page_of_T * self.cache.page_size + context.slot_of_T
        write = self.writer(context.page_of_T, context.slot_of_T)
        return self.decoder.hidden(tokens_T, positions_T, slots_T, context, write)

    def _sample(
        self,
        logits: Tensor,
        sequences: list[Decoding],
        hidden: Tensor,
        later: list[int] | None = None,
        draws: Draws | None = None,
    ) -> Result:
        """First tokens: the same kernels as in a step, on rows that are uploaded later."""
        return self._read(self.draw(logits, hidden, self._send(_rows(sequences))), logits, sequences)

    def draw(self, logits: Tensor, hidden: Tensor, state: Tensor) -> Tensor:
        """Sample every row and advance the state; in exact mode the log-probs are made as the trainer makes them.

        int32 `[2, B]`: tokens, bits of the log-probs; with proofs `[2 + SKETCH, B]`, with the bits of the sketches of
        the states that the logits are of.
        """
        out = decoding.sample(logits, state)
        if self.policy.exact:
            inverse = state[:, decoding.INVERSE].to(torch.int32).view(torch.float32)
            inverse = torch.where(inverse == 0, 1.0, inverse).repeat_interleave(len(logits) // len(state))
            logp = training.row_statistics(logits, out[0].long().clamp(min=0), inverse)[0]
            out[1] = logp.view(torch.int32)
        if self.directions is None:
            return out
        return torch.cat((out, sketch(hidden, self.directions).t().contiguous().view(torch.int32)))

    # Decoding

    def width(self, running: list[Decoding]) -> int:
        batch = bucket(max(1, len(running)))
        most = min(1 + self.draft_tokens, max(self.cheap_rows // batch, min(2, self.speculative_rows // batch)))
        if most < 2 or any(not s.is_plain for s in running):  # the host draws for these
            return 1
        return most

    def decode(self, running: list[Decoding], width: int = 1) -> Result:
        if running != self._rows:
            self._arrange(running)
        self._send_new_pages()
        if width > 1:
            self._upload_texts(running)
        else:
            self._text_rows = []
        shares = self._share(width)
        try:
            out = self._step_for(bucket(len(running)), width, shares).run(self)
        except TritonError as error:
            if shares:
                log.warning("%s: prompts are read for each sample, kernels do not fit: %s", self.policy.source, error)
                self.worth_sharing, self._shared = sys.maxsize, None
                return self.decode(running, width)
            if width == 1:
                raise
            log.warning("%s: no speculative decoding, its kernels do not fit this GPU: %s", self.policy.source, error)
            self.draft_tokens = 0
            alone = self.decode(running)
            return lambda: accepted([[0]] * len(running), width, alone())
        return self._read(out, self.logits, [s for s in running for _ in range(width)])

    def _share(self, width: int) -> bool:
        """Whether samples of a prompt are computed together; if so, the device knows which."""
        if self._shared is None or self._shared[0] != width:
            groups = self._find_groups(shared_prompts.most(self.policy.heads, self.policy.kv_heads, width))
            spared = sum((count - 1) * tokens for _, count, tokens in groups)
            page, layers = self.cache.page_size, len(self.cache.keys)
            worth = spared * self.cache.page_bytes // (page * layers) >= max(1, self.worth_sharing)
            self._shared = width, worth and not self.policy.exact
            if self._shared[1]:
                table = np.zeros(self.groups.shape, dtype=np.int32)
                skips = np.zeros(len(self.skips), dtype=np.int32)
                table[: len(groups)] = groups
                for first, count, tokens in groups:
                    skips[first : first + count] = tokens
                self.groups.copy_(self._send(table))
                self.skips.copy_(self._send(skips))
        return self._shared[1]

    def _find_groups(self, most: int) -> list[tuple[int, int, int]]:
        """(row, rows, tokens) of neighbours that have pages of a prompt in common, `most` of them at a time."""
        found, start = [], 0
        for _, samples in itertools.groupby(self._rows, key=lambda s: id(s.prefix)):
            same = list(samples)
            tokens = same[0].prompt_length // self.cache.page_size * self.cache.page_size
            pieces = -(-len(same) // max(1, most))
            for piece in range(pieces):
                begin, end = (len(same) * i // pieces for i in (piece, piece + 1))
                if tokens and end - begin > 1:
                    found.append((start + begin, end - begin, tokens))
            start += len(same)
        return found

    def _upload_texts(self, running: list[Decoding]) -> None:
        """Make the first rows hold the texts of these sequences; the device's are longer than the host may know."""
        if running == self._text_rows:
            return
        row_of = {id(s): row for row, s in enumerate(self._text_rows)}
        order = [row_of.get(id(s), 0) for s in running]
        if self._text_rows and order != list(range(len(running))):
            self.texts[: len(running)] = self.texts[self._send(np.array(order))]
        for row, s in enumerate(running):
            if id(s) not in row_of:
                text = np.array((*s.request.prompt_tokens, *s.tokens), dtype=np.int32)
                self.texts[row, : len(text)] = self._send(text)
        self._text_rows = list(running)

    def _read(self, out: Tensor, logits: Tensor, sequences: list[Decoding]) -> Result:
        """Start copying a step's output to the host."""
        self._turn = (self._turn + 1) % len(self._results)
        host = self._results[self._turn][: out.numel()].view(out.shape)
        host.copy_(out, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        shaped = [i for i, s in enumerate(sequences) if not s.is_plain]
        draws = self.prepare([sequences[i] for i in shaped])  # while the device computes

        def result() -> StepTokens:
            arrived.synchronize()
            tokens, floats = host[0, : len(sequences)].numpy(), host[1:, : len(sequences)].numpy().view(np.float32)
            logprobs = floats[0]
            require_finite(bool(np.isfinite(logprobs[tokens >= 0]).all()))
            sketches = [()] * len(sequences) if self.directions is None else floats[1:].T.tolist()
            drawn = StepTokens(tokens.tolist(), logprobs.tolist(), sketches, [None] * len(sequences))
            self._sample_shaped(sequences, shaped, logits, draws, drawn)
            return drawn

        return result

    def _sample_shaped(
        self, sequences: list[Decoding], rows: list[int], logits: Tensor, draws: Draws, drawn: StepTokens
    ) -> None:
        """Draw again for rows with top-k, top-p or min-p, penalties or a constraint. Their rows of the state are
        uploaded anew."""
        if not rows:
            return
        picked = [sequences[i] for i in rows]
        uniform = sampler.uniforms([s.seed for s in picked], [len(s.tokens) for s in picked])
        own = logits[torch.tensor(rows, device=self.device)]
        again = sampler.sample(own, draws(), uniform, kernels=None, exact=self.policy.exact)
        told = zip(rows, picked, again.tokens.tolist(), again.logprobs.tolist(), again.kept, strict=True)
        for i, s, token, logp, kept in told:
            if drawn.tokens[i] >= 0:
                drawn.tokens[i], drawn.logprobs[i], drawn.kept[i] = token, logp, kept
            self._forget(s)

    def _forget(self, sequence: Decoding) -> None:
        """Upload the sequence again before the next step, since the device's copy is out of date."""
        for known in (self._rows, self._text_rows):
            if sequence in known:
                known[known.index(sequence)] = _NOBODY

    def _arrange(self, running: list[Decoding]) -> None:
        """Make row i hold the i-th running sequence: rows that stay move together, new ones are uploaded."""
        row_of = {id(s): row for row, s in enumerate(self._rows)}
        source = [row_of.get(id(s), -1) for s in running]
        new = [row for row, old in enumerate(source) if old < 0]
        count = len(running)
        if any(old not in (-1, row) for row, old in enumerate(source)):
            order = self._send(np.array([max(0, old) for old in source]))
            self.state[:count] = self.state[order]
            self.table[:count] = self.table[order]
        self._pages = [self._pages[old] if old >= 0 else 0 for old in source]
        self._rows = list(running)
        self._shared = None
        self.ahead = 0 if any(_needs_host(s) for s in running) else 1
        if new:
            self.state[self._send(np.array(new))] = self._send(_rows([running[row] for row in new]))
        self.state[count:, decoding.ACTIVE] = 0

    def _send_new_pages(self) -> None:
        cells: list[int] = []
        pages: list[int] = []
        width = self.table.shape[1]
        for row, (s, known) in enumerate(zip(self._rows, self._pages, strict=True)):
            if len(s.pages) > known:
                cells.extend(range(row * width + known, row * width + len(s.pages)))
                pages.extend(s.pages[known:])
                self._pages[row] = len(s.pages)
        if cells:
            self.table.view(-1)[self._send(np.array(cells))] = self._send(np.array(pages, dtype=np.int32))

    def _send(self, array: NDArray[np.generic]) -> Tensor:
        return send(array, self.device)

    def _step_for(self, batch: int, width: int, shares: bool) -> "_Step":
        key = batch, width, shares
        if key not in self._steps:
            step = _Step(*key)
            if self._capturable:
                try:
                    step.capture(self, self._pool)
                except RuntimeError as error:
                    log.warning("%s cannot be captured as a CUDA graph: %s", self.policy.source, error)
                    self._capturable = False
            self._steps[key] = step
        return self._steps[key]


class _Step:
    """A decoding step of the first `batch` sequences of a runner, as a CUDA graph where that can be captured.

    width: rows of each sequence, its draft tokens included. shares: samples of a prompt are computed together.

    It does not hold the runner, with which its memory is free.
    """

    def __init__(self, batch: int, width: int, shares: bool) -> None:
        self.batch = batch
        self.width = width
        self.shares = shares
        self._graph: torch.cuda.CUDAGraph | None = None
        self._out: Tensor | None = None

    def run(self, runner: CudaRunner) -> Tensor:
        """Launch it; what `CudaRunner.draw` gives for `batch · width` rows. The next one overwrites the tensor."""
        if self._graph is None:
            return self._compute(runner)
        assert self._out is not None
        self._graph.replay()
        return self._out

    def capture(self, runner: CudaRunner, pool: Any) -> None:
        saved = runner.state.clone()
        runner.state[:, decoding.ACTIVE] = 0  # the trial run must leave no trace
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(stream):
                self._compute(runner)  # builds kernels and picks algorithms
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    out = self._compute(runner)
                finally:
                    graph.capture_end()
        finally:
            torch.cuda.current_stream().wait_stream(stream)
            runner.state.copy_(saved)
        self._graph, self._out = graph, out

    def _compute(self, runner: CudaRunner) -> Tensor:
        cache, batch = runner.cache, self.batch
        state, table = runner.state[:batch], runner.table[:batch]
        page, trash = cache.page_size, cache.pages * cache.page_size
        if self.width == 1:
            tokens_B, positions_B, slots_B, lengths_B = decoding.begin(state, table, page, trash)
        else:
            texts = runner.texts[:batch]
            tokens_B, positions_B, slots_B, lengths_B = speculation.begin(state, table, texts, self.width, page, trash)
        out = self._draw(runner, state, table, tokens_B, positions_B, slots_B, lengths_B)
        if self.width > 1:
            speculation.keep_accepted(state, texts, tokens_B, lengths_B, out)
        return out

    def _draw(
        self, runner: CudaRunner, state: Tensor, table: Tensor, tokens_B: Tensor, positions_B: Tensor, slots_B: Tensor,
        lengths_B: Tensor,
    ) -> Tensor:  # fmt: skip
        policy, cache, rows = runner.policy, runner.cache, self.batch * self.width
        places = slots_B // cache.page_size, slots_B % cache.page_size
        groups: shared_prompts.Groups | None = None
        if self.shares:
            most = shared_prompts.most(policy.heads, policy.kv_heads, self.width)
            groups = shared_prompts.Groups(runner.groups[: max(1, self.batch // 2)], runner.skips[: self.batch], most)
        context: _PagedAttention | ExactAttention
        if policy.exact:
            pages = table.repeat_interleave(self.width, 0)
            context = ExactAttention(cache, Reach.of_last(pages, lengths_B, cache.page_size), *places)
        else:
            context = _PagedAttention(cache, table, lengths_B, groups, slots_B, stored=runner.decoder is not None)
        logits, write = runner.logits[:rows], runner.writer(*places)
        plain = not policy.exact and getattr(policy.head, "bias", None) is None
        as_is = plain and policy.transform == HeadTransform()
        if runner.decoder is not None and as_is and rows <= runner.decoder.small_batch_rows:
            stream = runner.decoder.small_batch_logits(
                tokens_B, positions_B, slots_B, table, lengths_B, policy.head.weight, logits, write, groups
            )
            hidden = stream.gained if runner.directions is None else runner.decoder.last_states(stream)
            return runner.draw(logits, hidden, state)
        if runner.decoder is not None:
            hidden = runner.decoder.hidden(tokens_B, positions_B, slots_B, context, write)
        else:
            with runner.recording(*places):
                hidden = policy.hidden(tokens_B, positions_B, context)
        if plain:
            torch.mm(hidden, policy.head.weight.t(), out=logits)
            decoding.transform(logits, policy.transform.scale, policy.transform.softcap)
        else:
            logits.copy_(policy.logits(hidden))
        return runner.draw(logits, hidden, state)


class _PagedAttention(SeesLatents):
    """New tokens of sequences, over pages. `stored`: their keys and values are in the cache already."""

    def __init__(
        self,
        cache: KVCache,
        table: Tensor,
        lengths: Tensor,
        groups: shared_prompts.Groups | None,
        slots: Tensor,
        stored: bool,
    ) -> None:
        self.calls = cache.calls()
        self.table = table
        self.lengths = lengths
        self.groups = groups
        self.stored = stored
        if not stored:
            self.page, self.slot = slots // cache.page_size, slots % cache.page_size

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        kept = next(self.calls)
        latent, latent_BR = kept.latent, self.told_latent()
        if not self.stored:
            kept.write(self.page, self.slot, k, v, latent_BR)
        if latent is None:
            return self._attend(q.transpose(0, 1), kept, self.groups, scale, window, softcap, sinks)
        rows = latent.queries(q).transpose(0, 1)
        return latent.mixed(self._attend_to_one_key(rows, kept, scale, window, softcap, sinks))

    def _attend(
        self, rows: Tensor, kept: Kept, groups: shared_prompts.Groups | None, scale: float, window: int | None,
        softcap: float | None, sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        if rows.stride(1) != rows.shape[2]:
            rows = rows.contiguous()
        pages = (kept.keys.numbers, kept.keys.scales), (kept.values.numbers, kept.values.scales)
        begun = None
        if groups is not None and window is None:
            begun = shared_prompts.begin(rows, *pages, rows.shape[1], self.table, groups, scale=scale, softcap=softcap)
        return paged.attend(
            rows, *pages, self.table, self.lengths, scale=scale, window=window, softcap=softcap, sinks=sinks,
            begun=begun,
        )  # fmt: skip

    def _attend_to_one_key(
        self, rows: Tensor, kept: Kept, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """All heads `[B, H, R]` see the same key, and a program of the kernel has room for a few of them: so each few
        are a sequence of their own, with the same pages."""
        batch, heads, size = rows.shape
        few = math.gcd(heads, _HEADS_OF_ONE_KEY) if sinks is None else heads  # a kernel numbers them from the first
        parts = heads // few
        rows = rows.reshape(batch * parts, few, size)
        table = self.table.repeat_interleave(parts * (batch // len(self.table)), 0)
        pages = (kept.keys.numbers, kept.keys.scales), (kept.values.numbers, kept.values.scales)
        found = paged.attend(
            rows, *pages, table, self.lengths.repeat_interleave(parts), scale=scale, window=window, softcap=softcap,
            sinks=sinks,
        )  # fmt: skip
        return found.view(batch, heads, size)


_NOBODY: Any = object()


def _rows(sequences: list[Decoding]) -> NDArray[np.int64]:
    """The state of sequences as the host knows it."""
    state = np.zeros((len(sequences), decoding.COLUMNS), dtype=np.int64)
    for row, s in zip(state, sequences, strict=True):
        params = s.request.sampling
        inverse = 1.0 / params.temperature if params.temperature > 0 else 0.0
        row[decoding.TOKEN] = s.tokens[-1] if s.tokens else 0
        row[decoding.LENGTH] = s.cached
        row[decoding.COUNT] = len(s.tokens)
        row[decoding.LIMIT] = s.limit
        row[decoding.SEED] = s.seed
        row[decoding.ACTIVE] = 1
        row[decoding.INVERSE] = np.float32(inverse).view(np.int32)
        row[decoding.STOP :] = -1
        stops = params.stop_tokens[: decoding.STOPS]
        row[decoding.STOP : decoding.STOP + len(stops)] = stops
    return state


def _needs_host(sequence: Decoding) -> bool:
    """Whether the device alone cannot tell the next token, or the end."""
    params = sequence.request.sampling
    return not sequence.is_plain or bool(params.stop_strings) or len(params.stop_tokens) > decoding.STOPS
