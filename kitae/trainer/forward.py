"""Packed forward passes: samples in, one number for each loss token out. Shared by policy, reference and critic."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from kitae.data.packing import MicroBatch, collate, pack
from kitae.models.policy import Policy
from kitae.trainer.attention import PackedAttention
from kitae.trainer.config import TrainingConfig
from kitae.trainer.logprobs import token_logprobs
from kitae.types import FloatArray, Sample


def token_budget(config: TrainingConfig, device: torch.device) -> int:
    """Most tokens of a micro-batch. CPUs gain nothing from larger ones, and activations are most of the memory."""
    return config.token_budget or (2048 if device.type == "cpu" else 8192)


def micro_batches(samples: Sequence[Sample], config: TrainingConfig, device: torch.device) -> Iterator[MicroBatch]:
    for part in pack(samples, token_budget(config, device), config.share_prompts):
        yield collate(part, device, config.share_prompts)


def predicting_states(policy: Policy, micro: MicroBatch) -> Tensor:
    """The hidden states `[N, H]` that predict the loss tokens."""
    context = PackedAttention(micro.spans, policy.device, policy.heads, exact=policy.exact)
    return policy.hidden(micro.tokens_T, micro.positions_T, context)[micro.source_N]


def log_probs(
    policy: Policy, micro: MicroBatch, config: TrainingConfig, temperature: float, entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """`(logp_N, entropy_N)` of the loss tokens."""
    return token_logprobs(
        policy,
        predicting_states(policy, micro),
        micro.target_N,
        temperature=temperature,
        chunk=config.logit_chunk,
        entropy_grad=entropy_grad,
    )


def each_token(
    samples: Sequence[Sample],
    config: TrainingConfig,
    device: torch.device,
    compute: Callable[[MicroBatch], Tensor],
) -> list[FloatArray]:
    """What `compute` gives for the loss tokens, per sample over all its tokens, 0 elsewhere. No gradients."""
    found: dict[tuple[int, int], FloatArray] = {}
    with torch.no_grad():
        for micro in micro_batches(samples, config, device):
            values_N = compute(micro).float().cpu().numpy()
            for s, values in zip(micro.samples, micro.split(values_N), strict=True):
                laid_out = np.zeros(s.length, dtype=np.float32)
                laid_out[s.mask_T] = values
                found[s.group, s.index] = laid_out
    return [found[s.group, s.index] for s in samples]


def checkpoint_activations(policy: Policy, config: TrainingConfig) -> None:
    """Make the modules recompute activations in the backward pass, if asked for."""
    if config.checkpoint_activations:
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        if policy.model is not policy.base:
            policy.model.enable_input_require_grads()


@contextmanager
def training_mode(policy: Policy, config: TrainingConfig) -> Iterator[None]:
    """Modules recompute activations only in training mode; dropout stays off because models are loaded without."""
    policy.model.train(config.checkpoint_activations)
    try:
        yield
    finally:
        policy.model.eval()
