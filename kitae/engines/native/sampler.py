"""RowDraw one token per sequence, each from its own random stream.

A draw needs a single uniform number, made from (seed, position) by an integer mix: no generator state, so what
is drawn for a rollout does not depend on its neighbours in the batch, on preemption or on a restart. Matrix products
round differently in batches of different size: in fp32 the same tokens come out, in bf16 a close call may fall
otherwise, unless the policy is exact.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kitae.engines.base import SamplingParams
from kitae.kept_sets import Words, words_of
from kitae.kernels.base import DecodingKernels
from kitae.kernels.devices import training_kernels
from kitae.models.logprobs import EXCLUDED

_USUAL = 512  # tokens: most nuclei are smaller


def uniforms(seeds: list[int], positions: list[int]) -> Tensor:
    """One number in [0, 1) per (seed, position): the splitmix64 mix of a Weyl sequence."""
    with np.errstate(over="ignore"):
        z = np.array(seeds, dtype=np.uint64) + (np.array(positions, dtype=np.uint64) + np.uint64(1)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return torch.from_numpy((z >> np.uint64(11)).astype(np.float64) * 2.0**-53)


@dataclass(frozen=True, slots=True)
class RowDraw:
    """What decides a row's token: the settings, one number from the row's random stream, and the text so far.

    `RowDraw(SamplingParams(top_p=0.9), prompt=(1, 5, 9), answer=(42,), allowed=None, keeps=True)`
    allowed: the tokens that a constraint leaves, a bit for each (uint32); None: all. keeps: somebody wants to know the
    set that the token was drawn from.
    """

    params: SamplingParams
    prompt: Sequence[int] = ()
    answer: Sequence[int] = ()
    allowed: Words | None = None
    keeps: bool = False

    @property
    def plain(self) -> bool:
        """Whether any token can be drawn, from the logits as they are."""
        return self.allowed is None and not is_shaped(self.params)


class DrawnRows(NamedTuple):
    """Tokens and log-probs `[B]`, and the kept set of each row (`KeptSets`), where it was wanted and is not all."""

    tokens: Tensor
    logprobs: Tensor
    kept: list[Words | None]


def sample(
    logits_BV: Tensor,
    draws: Sequence[RowDraw],
    uniform_B: Tensor,
    *,
    kernels: DecodingKernels | None,
    exact: bool = False,
) -> DrawnRows:
    """One token for each row. Rows with penalties, a constraint, top-k, top-p or min-p are written over: a token that
    is not kept gets the logit `EXCLUDED`, and all rows are drawn alike from there.

    exact: no row depends on another, and log-probs are made as the trainer makes them.
    """
    kept: list[Words | None] = [None] * len(draws)
    params = [draw.params for draw in draws]
    rows = [i for i, draw in enumerate(draws) if not draw.plain]
    keep_RV: Tensor | None = None
    if rows:
        index = torch.tensor(rows, device=logits_BV.device)
        shaped, keep_RV = _shape(logits_BV[index], [draws[i] for i in rows], exact)
        logits_BV[index] = shaped
        for i, own in zip(rows, _words_of_rows(keep_RV, [draws[i] for i in rows]), strict=True):
            kept[i] = own
    tokens, logprobs = _sample_full(logits_BV, params, uniform_B, kernels)
    if keep_RV is not None:
        _mend(tokens, logprobs, rows, keep_RV, logits_BV, params)
    if exact:
        _exact_logprobs(logits_BV, params, tokens, logprobs)
    return DrawnRows(tokens, logprobs, kept)


def _exact_logprobs(logits_BV: Tensor, params: Sequence[SamplingParams], tokens: Tensor, logprobs: Tensor) -> None:
    training = training_kernels(logits_BV.device, logits_BV.dtype)
    assert training is not None
    for temperature in {p.temperature for p in params}:
        index = torch.tensor([i for i, p in enumerate(params) if p.temperature == temperature])
        inverse = 1.0 / temperature if temperature > 0 else 1.0
        own = index.to(logits_BV.device)
        told = training.row_statistics(logits_BV[own], tokens[index].to(logits_BV.device), inverse)[0]
        logprobs[index] = told.cpu()


def is_shaped(params: SamplingParams) -> bool:
    """Whether the settings change logits or take tokens out, so that the host must look at them."""
    return is_filtered(params) or bool(params.penalised)


def is_filtered(params: SamplingParams) -> bool:
    """Whether tokens are taken out by top-k, top-p or min-p."""
    return params.temperature > 0 and (params.top_p < 1 or params.top_k > 0 or params.min_p > 0)


# What is left of the vocabulary


def _shape(logits_RV: Tensor, draws: Sequence[RowDraw], exact: bool) -> tuple[Tensor, Tensor]:
    """The logits as they are drawn from, and which tokens are kept."""
    for row, draw in zip(logits_RV, draws, strict=True):
        if draw.params.penalised:
            _penalise(row, draw)
    keep_RV = _allowed(draws, logits_RV)
    logits_RV = logits_RV.masked_fill(~keep_RV, EXCLUDED)
    some = [i for i, draw in enumerate(draws) if is_filtered(draw.params)]
    for rows in [[i] for i in some] if exact else [some] * bool(some):  # sorting in one batch would add up by its size
        index = torch.tensor(rows, device=logits_RV.device)
        keep_RV[index] &= _truncate(logits_RV[index], [draws[i].params for i in rows])
    return logits_RV.masked_fill_(~keep_RV, EXCLUDED), keep_RV


def _penalise(row_V: Tensor, draw: RowDraw) -> None:
    p = draw.params
    if p.repetition_penalty != 1:
        seen = torch.tensor(sorted({*draw.prompt, *draw.answer}), device=row_V.device)
        own = row_V[seen]
        row_V[seen] = torch.where(own > 0, own / p.repetition_penalty, own * p.repetition_penalty)
    if (p.presence_penalty or p.frequency_penalty) and draw.answer:
        tokens, counts = np.unique(np.array(draw.answer), return_counts=True)
        less = p.presence_penalty + p.frequency_penalty * counts
        row_V[torch.from_numpy(tokens).to(row_V.device)] -= torch.from_numpy(less).to(row_V)
    for token, added in p.logit_bias:
        row_V[token] += added


def _allowed(draws: Sequence[RowDraw], logits_RV: Tensor) -> Tensor:
    keep = np.ones(logits_RV.shape, np.bool_)
    for row, draw in zip(keep, draws, strict=True):
        if draw.allowed is not None:
            row[:] = np.unpackbits(draw.allowed.view(np.uint8), bitorder="little")[: len(row)]
    return torch.from_numpy(keep).to(logits_RV.device)


def _truncate(logits_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Which tokens top-k, top-p and min-p keep, in this order."""
    device, vocabulary = logits_RV.device, logits_RV.shape[1]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=device)[:, None]

    scaled = logits_RV.float() / column([p.temperature for p in params])
    top_p = column([p.top_p for p in params])
    top_k = column([min(p.top_k or vocabulary, vocabulary) for p in params])
    keep_RV = scaled >= scaled.amax(-1, keepdim=True) + column(
        [math.log(p.min_p) if p.min_p else -math.inf for p in params]
    )
    if all(p.top_p == 1 and not p.top_k for p in params):
        return keep_RV
    unlimited = top_k >= vocabulary
    log_total = torch.logsumexp(scaled, -1, keepdim=True)
    for count in (min(_USUAL, vocabulary), vocabulary):  # sorting everything takes longer than a small model's pass
        some, order = scaled.topk(count, sorted=True)
        within = torch.arange(count, device=device)[None, :] < top_k
        log_of_k = torch.logsumexp(some.masked_fill(~within, -math.inf), -1, keepdim=True)
        probs = (some - torch.where(unlimited, log_total, log_of_k)).exp()
        before = probs.cumsum(-1) - probs
        # A token stays if the mass before it is below top_p: the smallest set that reaches it.
        stays = within & ((before < top_p) | (top_p >= 1))
        stays[:, 0] = True
        everything = unlimited & (top_p >= 1)
        reached = unlimited & (before[:, -1:] + probs[:, -1:] >= top_p)
        if bool((everything | reached | (top_k <= count)).all()):
            break
    return keep_RV & (everything | torch.zeros_like(keep_RV).scatter_(1, order, stays))


def _words_of_rows(keep_RV: Tensor, draws: Sequence[RowDraw]) -> Iterator[Words | None]:
    """The kept set of each row that wants it; None where it is the whole vocabulary."""
    vocabulary, wanted = keep_RV.shape[1], any(draw.keeps for draw in draws)
    keep = keep_RV.cpu().numpy() if wanted else None
    for row, draw in enumerate(draws):
        if keep is None or not draw.keeps or draw.params.temperature == 0 or keep[row].all():
            yield None
        else:
            yield words_of(np.flatnonzero(keep[row]), vocabulary)


def _mend(
    tokens: Tensor, logprobs: Tensor, rows: Sequence[int], keep_RV: Tensor, logits_BV: Tensor,
    params: Sequence[SamplingParams],
) -> None:  # fmt: skip
    """Rounding of sums may leave a draw behind the last token that counts: it becomes that token."""
    index = torch.tensor(rows)
    good = keep_RV.gather(1, tokens[index].to(keep_RV.device)[:, None])[:, 0].cpu()
    for place in torch.nonzero(~good)[:, 0].tolist():
        row, ids = rows[place], torch.nonzero(keep_RV[place])[:, 0].cpu()
        before = ids[ids < tokens[row]]
        tokens[row] = before[-1] if len(before) else ids[0]
        scaled = logits_BV[row].float() / (params[row].temperature or 1.0)
        logprobs[row] = (scaled[tokens[row]] - torch.logsumexp(scaled, -1)).cpu()


# The draw


def _sample_full(
    logits_BV: Tensor, params: Sequence[SamplingParams], uniform_B: Tensor, kernels: DecodingKernels | None
) -> tuple[Tensor, Tensor]:
    inverse = torch.tensor([1.0 / p.temperature if p.temperature > 0 else 0.0 for p in params], dtype=torch.float32)
    if kernels is not None:
        return kernels.sample(logits_BV, inverse, uniform_B)
    inverse = inverse.to(logits_BV.device)
    greedy = inverse == 0
    logits_BV = logits_BV.float() * torch.where(greedy, 1.0, inverse)[:, None]
    logp_BV = torch.log_softmax(logits_BV, dim=-1)
    tokens = torch.where(greedy, logits_BV.argmax(-1), _invert(logp_BV.exp(), uniform_B))
    return tokens.cpu(), logp_BV.gather(1, tokens[:, None])[:, 0].cpu()


def _invert(probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Index of the first cumulative probability above the uniform number."""
    cumulative = probs_BV.cumsum(-1)
    threshold = uniform_B.to(probs_BV)[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    last = (probs_BV > 0).long().cumsum(-1).argmax(-1)  # rounding must not pick a token of probability 0
    return torch.minimum(index, last)
