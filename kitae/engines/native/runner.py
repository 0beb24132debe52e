"""Turn the scheduler's plan into tensors, run the policy's modules, and sample."""

import importlib.util
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kitae.engines.config import EngineConfig
from kitae.engines.native import sampler
from kitae.engines.native.attention import DecodeAttention, ExactAttention, PrefillAttention, Span
from kitae.engines.native.cache import KVCache
from kitae.engines.native.scheduler import Admission
from kitae.engines.native.sequence import Sequence
from kitae.errors import EngineError
from kitae.kernels import amx, ops
from kitae.kernels.exact import Reach
from kitae.models.policy import Policy

Result = Callable[[], tuple[list[int], list[float]]]  # waits; the token is -1 for a sequence that had ended


def make_runner(policy: Policy, cache: KVCache, config: EngineConfig) -> "Runner":
    """Kernels and graphs on a GPU with Triton, a compiled decoder on a CPU with AMX, else the policy's own modules."""
    if policy.exact and not config.fast:
        raise EngineError("an exact policy runs on kernels of its own, got engine.fast = false, which asks for none")
    if policy.exact and policy.device.type == "cpu":
        return Runner(policy, cache, config.fast)
    if config.fast and policy.device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from kitae.engines.native.cuda import CudaRunner

        return CudaRunner(policy, cache, config.max_batch)
    if config.fast and policy.device.type == "cpu" and amx.available():
        from kitae.engines.native.cpu import CpuRunner

        return CpuRunner(policy, cache)
    return Runner(policy, cache, config.fast)


class Runner:
    """The reference: every step runs the policy's modules and is done when it returns."""

    ahead = 0  # steps that may be launched before the results of an earlier one are read
    linger = 0.02  # seconds that an idle engine waits for more requests

    def __init__(self, policy: Policy, cache: KVCache, fast: bool) -> None:
        self.policy = policy
        self.cache = cache
        self.device = policy.device
        self.fast = fast and ops.available(policy.device, policy.dtype, policy.head_dim)

    def weights_changed(self) -> None:
        """Called after every weight update."""

    def prefill(self, admission: Admission) -> Result:
        """Compute new prompts and preempted tails, and sample the first token of every fresh sequence."""
        self._compute_prompts(admission)
        self.cache.copy_pages([a for a, _ in admission.copies], [b for _, b in admission.copies])
        if not admission.fresh:
            return lambda: ([], [])
        prefixes = list(dict.fromkeys(s.prefix for s in admission.fresh))
        row_of = {id(prefix): row for row, prefix in enumerate(prefixes)}
        logits = self._logits(torch.stack([p.hidden for p in prefixes if p and p.hidden is not None]))
        rows = torch.tensor([row_of[id(s.prefix)] for s in admission.fresh], device=self.device)
        return self._sample(logits[rows], admission.fresh)

    def _compute_prompts(self, admission: Admission) -> None:
        page_size = self.cache.page_size
        tokens: list[int] = []
        positions: list[int] = []
        spans: list[Span] = []
        pages_of_T: list[int] = []

        def add(sequence_tokens: tuple[int, ...], start: int, pages: list[int]) -> None:
            end = len(sequence_tokens)
            spans.append(Span(len(tokens), end - start, start, pages))
            tokens.extend(sequence_tokens[start:])
            positions.extend(range(start, end))
            pages_of_T.extend(pages[t // page_size] for t in range(start, end))

        for prefix in admission.prefixes:
            add(prefix.tokens, 0, prefix.pages)
        for s in admission.resumed:
            # From the last shared page border on: the tail of the prompt goes into the sequence's own page again.
            start = s.prompt_length // page_size * page_size
            if s.cached > start:
                add((*s.request.prompt_tokens, *s.tokens[:-1]), start, s.pages)
        if not spans:
            return
        positions_T = torch.tensor(positions, device=self.device)
        places = torch.tensor(pages_of_T, device=self.device), positions_T % page_size
        context: PrefillAttention | ExactAttention = PrefillAttention(self.cache, spans, *places)
        if self.policy.exact:
            runs = [(s.row, s.length, s.start, s.pages) for s in spans]
            group = self.policy.heads // self.policy.kv_heads
            context = ExactAttention(self.cache, Reach.of(runs, page_size, group, self.device), *places)
        hidden = self._prompt_states(torch.tensor(tokens, device=self.device), positions_T, context)
        for prefix, span in zip(admission.prefixes, spans, strict=False):
            prefix.hidden = hidden[span.row + span.length - 1].clone()

    def _prompt_states(
        self, tokens_T: Tensor, positions_T: Tensor, context: PrefillAttention | ExactAttention
    ) -> Tensor:
        return self.policy.hidden(tokens_T, positions_T, context)

    def decode(self, running: list[Sequence]) -> Result:
        """One token for every running sequence."""
        lengths = np.array([s.cached + 1 for s in running], dtype=np.int32)
        table = np.zeros((len(running), max(len(s.pages) for s in running)), dtype=np.int32)
        for row, s in enumerate(running):
            table[row, : len(s.pages)] = s.pages
        lengths_B = torch.from_numpy(lengths).to(self.device)
        last = torch.tensor([s.tokens[-1] for s in running], device=self.device)
        hidden = self._decode_states(last, lengths_B, torch.from_numpy(table).to(self.device))
        return self._sample(self._logits(hidden), running)

    def _decode_states(self, tokens_B: Tensor, lengths_B: Tensor, table: Tensor) -> Tensor:
        context: DecodeAttention | ExactAttention = DecodeAttention(self.cache, table, lengths_B, self.fast)
        if self.policy.exact:
            size, last_B = self.cache.page_size, lengths_B.long() - 1
            page_B = table.gather(1, (last_B // size)[:, None])[:, 0].long()
            context = ExactAttention(self.cache, Reach.of_last(table, lengths_B, size), page_B, last_B % size)
        return self.policy.hidden(tokens_B, lengths_B.long() - 1, context)

    def _logits(self, hidden_BH: Tensor) -> Tensor:
        return self.policy.logits(hidden_BH)

    def _sample(self, logits: Tensor, sequences: list[Sequence]) -> Result:
        uniform = sampler.uniforms([s.seed for s in sequences], [len(s.tokens) for s in sequences])
        params = [s.request.sampling for s in sequences]
        draw = sampler.sample_exact if self.policy.exact else sampler.sample
        tokens, logprobs = draw(logits, params, uniform, fast=self.fast)
        require_finite(bool(torch.isfinite(logprobs).all()))
        done = tokens.tolist(), logprobs.tolist()
        return lambda: done


def require_finite(finite: bool) -> None:
    if not finite:
        raise EngineError("the model's logits are not finite (NaN or infinity): the weights are broken")
