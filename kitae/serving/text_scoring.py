"""Log-probs of texts that are there already, and the likeliest tokens at each place, by the policy itself.

    score() ─► queue ─► all that wait, packed into rows without padding ─► one row after the other, in a thread

The engine goes on meanwhile: both only read the weights. Log-probs are in fp32 after the head's product; the company in
a row changes them by rounding alone.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kitae.data.packing import Row, lay_out, pack
from kitae.errors import RequestError
from kitae.kernels.transfer import send
from kitae.models.adapters import Adapter, SlicedRows, using
from kitae.models.logprobs import chunk_logits
from kitae.models.policy import Policy
from kitae.models.scorer import RowAttention
from kitae.types import Sample

_ROW = 2048  # tokens
_CHUNK = 128  # rows of logits at once


@dataclass(frozen=True, slots=True)
class ScoredText:
    """Of each token but the first: `ScoredText(logprobs=(-0.7, …), top=(((42, -0.1), (7, -2.5)), …))`.

    top: the likeliest tokens at its place, with their log-probs, best first.
    """

    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]


@dataclass(frozen=True, slots=True)
class _Wanted:
    tokens: tuple[int, ...]
    top: int
    temperature: float
    adapter: Adapter | None
    found: "asyncio.Future[ScoredText]"


class TextScorer:
    """`TextScorer(policy)`, then any number of `score`; `close` it when done."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._waiting: list[_Wanted] = []
        self._working: asyncio.Task[None] | None = None
        self._threads = torch.get_num_threads()
        self._thread = ThreadPoolExecutor(1, "kitae-scoring")

    async def score(
        self, tokens: Sequence[int], top: int = 0, temperature: float = 1.0, adapter: Adapter | None = None
    ) -> ScoredText:
        """Raises `RequestError` where the tokens are not the model's, or more than its context holds."""
        most, context = self._policy.vocabulary - 1, self._policy.max_context
        if not tokens or min(tokens) < 0 or max(tokens) > most:
            raise RequestError(f"token ids must be in 0…{most}, got {max(tokens, default='none')}")
        if len(tokens) > context:
            raise RequestError(f"a text to score must fit into the context of {context} tokens, got {len(tokens)}")
        if len(tokens) == 1:
            return ScoredText((), ())
        found: asyncio.Future[ScoredText] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Wanted(tuple(tokens), top, temperature, adapter, found))
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        return await found

    async def close(self) -> None:
        if self._working is not None:
            self._working.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _work(self) -> None:
        """Until nobody waits."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            await asyncio.sleep(0)  # those that came together go together
            taken, self._waiting = [w for w in self._waiting if not w.found.done()], []
            try:
                scored = await loop.run_in_executor(self._thread, self._compute, taken)
            except Exception as error:
                for wanted in taken:
                    if not wanted.found.done():
                        wanted.found.set_exception(error)
                continue
            for wanted, text in zip(taken, scored, strict=True):
                if not wanted.found.done():
                    wanted.found.set_result(text)

    def _compute(self, wanted: Sequence[_Wanted]) -> list[ScoredText]:
        torch.set_num_threads(self._threads)  # OpenMP keeps this per thread
        samples = [_sample(i, w.tokens) for i, w in enumerate(wanted)]
        found: dict[int, ScoredText] = {}
        with torch.inference_mode():
            for part in pack(samples, _ROW, share_prompts=False):
                asked = [wanted[sample.index] for sample in part]
                texts = self._score_row(lay_out(part, share_prompts=False), asked)
                found.update(zip((sample.index for sample in part), texts, strict=True))
        return [found[i] for i in range(len(wanted))]

    def _score_row(self, row: Row, asked: Sequence[_Wanted]) -> list[ScoredText]:
        device = self._policy.device
        tokens_T, positions_T, source_N = (send(a, device) for a in (row.tokens_T, row.positions_T, row.source_N))
        spans = zip(asked, row.spans, strict=True)
        adapters = SlicedRows([(w.adapter, span.start, span.start + span.length) for w, span in spans])
        with using(adapters):
            hidden_NH = self._policy.hidden(tokens_T, positions_T, RowAttention(row.spans, positions_T))[source_N]
        inverse = [1.0 / w.temperature if w.temperature > 0 else 1.0 for w in asked]
        inverse_N = torch.tensor(np.repeat(inverse, row.lengths), dtype=torch.float32, device=device)
        target_N = torch.as_tensor(row.target_N, device=device)
        most = min(max(w.top for w in asked), self._policy.vocabulary)
        logp_N, best_NK, ids_NK = self._likeliest(hidden_NH, target_N, inverse_N, most)
        ends = np.cumsum(row.lengths).tolist()
        return [
            ScoredText(
                tuple(logp_N[start:end]),
                tuple(
                    tuple(zip(ids[: w.top], best[: w.top], strict=True))
                    for ids, best in zip(ids_NK[start:end], best_NK[start:end], strict=True)
                ),
            )
            for w, start, end in zip(asked, [0, *ends], ends, strict=False)
        ]

    def _likeliest(
        self, hidden_NH: Tensor, target_N: Tensor, inverse_N: Tensor, most: int
    ) -> tuple[list[float], list[list[float]], list[list[int]]]:
        head = self._policy.output
        buffer = hidden_NH.new_empty(_CHUNK, head.weight.shape[0])
        logp: list[float] = []
        best: list[list[float]] = []
        ids: list[list[int]] = []
        for i in range(0, len(hidden_NH), _CHUNK):
            part = slice(i, i + _CHUNK)
            logits = chunk_logits(hidden_NH[part], head.weight, head.bias, buffer, head.exact)
            scaled = head.transform(logits.float()) * inverse_N[part, None]
            logp_NV = scaled.log_softmax(-1)
            logp += logp_NV.gather(1, target_N[part, None])[:, 0].tolist()
            found = logp_NV.topk(most, dim=-1)
            best += found.values.tolist()
            ids += found.indices.tolist()
        return logp, best, ids


def _sample(index: int, tokens: Sequence[int]) -> Sample:
    tokens_T = np.array(tokens, dtype=np.int64)
    mask_T = np.arange(len(tokens)) > 0
    return Sample(0, index, tokens_T, 1, mask_T, mask_T.astype(np.float32))
