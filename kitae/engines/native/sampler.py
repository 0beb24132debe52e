"""Draw one token per sequence, each from its own random stream.

A draw needs a single uniform number, made from (seed, position) by an integer mix: no generator state, so what
is drawn for a rollout does not depend on its neighbours in the batch, on preemption or on a restart. Matrix products
round differently in batches of different size: in fp32 the same tokens come out, in bf16 a close call may fall
otherwise, unless the policy is exact.
"""

import numpy as np
import torch
from torch import Tensor

from kitae.engines.base import SamplingParams
from kitae.kernels.base import DecodingKernels
from kitae.kernels.devices import training_kernels


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


def sample(
    logits_BV: Tensor, params: list[SamplingParams], uniform_B: Tensor, *, kernels: DecodingKernels | None
) -> tuple[Tensor, Tensor]:
    """Tokens and log-probs `[B]`. Rows with top-k, top-p or min-p take the path that sorts; the others never do."""
    filtered = [i for i, p in enumerate(params) if is_filtered(p)]
    if not filtered:
        return _sample_full(logits_BV, params, uniform_B, kernels)
    tokens = torch.empty(len(params), dtype=torch.int64)
    logprobs = torch.empty(len(params), dtype=torch.float32)
    full = sorted(set(range(len(params))) - set(filtered))
    for rows, draw in ((full, _sample_full), (filtered, _sample_filtered)):
        if rows:
            index = torch.tensor(rows)
            picked = [params[i] for i in rows]
            tokens[index], logprobs[index] = draw(
                logits_BV[index.to(logits_BV.device)], picked, uniform_B[index], kernels
            )
    return tokens, logprobs


def sample_exact(
    logits_BV: Tensor, params: list[SamplingParams], uniform_B: Tensor, *, kernels: DecodingKernels | None
) -> tuple[Tensor, Tensor]:
    """As `sample`, but no row depends on another, and log-probs are made as the trainer makes them."""
    parts = [i for i, p in enumerate(params) if is_filtered(p)]
    full = sorted(set(range(len(params))) - set(parts))
    tokens = torch.empty(len(params), dtype=torch.int64)
    logprobs = torch.empty(len(params), dtype=torch.float32)
    for rows in [full] * bool(full) + [[i] for i in parts]:  # sorting in one batch would add up by its size
        index, picked = torch.tensor(rows), [params[i] for i in rows]
        tokens[index], logprobs[index] = sample(logits_BV[index], picked, uniform_B[index], kernels=kernels)
    training = training_kernels(logits_BV.device, logits_BV.dtype)
    assert training is not None
    for temperature in {params[i].temperature for i in full}:
        index = torch.tensor([i for i in full if params[i].temperature == temperature])
        inverse = 1.0 / temperature if temperature > 0 else 1.0
        logprobs[index] = training.row_statistics(logits_BV[index], tokens[index], inverse)[0]
    return tokens, logprobs


def is_filtered(params: SamplingParams) -> bool:
    """Whether tokens are taken out by top-k, top-p or min-p."""
    return params.temperature > 0 and (params.top_p < 1 or params.top_k > 0 or params.min_p > 0)


def _sample_full(
    logits_BV: Tensor, params: list[SamplingParams], uniform_B: Tensor, kernels: DecodingKernels | None
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


def _sample_filtered(
    logits_BV: Tensor, params: list[SamplingParams], uniform_B: Tensor, kernels: DecodingKernels | None
) -> tuple[Tensor, Tensor]:
    device, vocabulary = logits_BV.device, logits_BV.shape[1]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=device)[:, None]

    scaled = logits_BV.float() / column([p.temperature for p in params])
    sorted_BV, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocabulary, device=device)[None, :]
    keep = rank < column([float(p.top_k or vocabulary) for p in params])
    probs = torch.softmax(sorted_BV.masked_fill(~keep, float("-inf")), dim=-1)
    # A token stays if the mass before it is below top_p: the smallest set that reaches it.
    keep &= probs.cumsum(-1) - probs < column([p.top_p for p in params])
    keep &= probs >= column([p.min_p for p in params]) * probs[:, :1]
    keep[:, 0] = True
    logp_BV = torch.log_softmax(sorted_BV.masked_fill(~keep, float("-inf")), dim=-1)
    chosen = _invert(logp_BV.exp(), uniform_B)
    tokens = order.gather(1, chosen[:, None])[:, 0]
    return tokens.cpu(), logp_BV.gather(1, chosen[:, None])[:, 0].cpu()


def _invert(probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Index of the first cumulative probability above the uniform number."""
    cumulative = probs_BV.cumsum(-1)
    threshold = uniform_B.to(probs_BV)[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    last = (probs_BV > 0).long().cumsum(-1).argmax(-1)  # rounding must not pick a token of probability 0
    return torch.minimum(index, last)
