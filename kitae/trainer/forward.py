"""Packed forward passes: rows in, one number for each loss token out. Used by policy, reference, critic and teacher."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kitae.data.packing import Observed, Row, Span, lay_out, pack
from kitae.data.pictures import PICTURE
from kitae.kernels.transfer import send
from kitae.models.attention_seam import AttentionContext
from kitae.models.logprobs import KeptColumns
from kitae.models.pass_context import carried_on
from kitae.models.policy import Policy
from kitae.models.scalar import ScalarModel
from kitae.trainer.config import LearningConfig
from kitae.trainer.packed_attention import PackedAttention
from kitae.trainer.parallel.collectives import together
from kitae.trainer.parallel.sequence_parallel import RowPart, SplitAttention
from kitae.types import FloatArray, Sample, SampleKey


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A `Row` on the device that computes it; `sample_N` gives the sequence that each loss token belongs to."""

    tokens_T: Tensor
    positions_T: Tensor
    spans: tuple[Span, ...]
    source_N: Tensor
    target_N: Tensor
    sample_N: Tensor
    weight_N: Tensor
    columns: Mapping[str, Tensor]
    sequences: int
    observed: tuple[Observed, ...] = ()
    experts_TLK: Tensor | None = None
    kept: KeptColumns | None = None

    @classmethod
    def of(cls, row: Row, device: torch.device, columns: Collection[str] | None = None) -> "MicroBatch":
        """columns: the names of those to send; None: all."""
        wanted = row.columns if columns is None else {name: row.columns[name] for name in columns}
        return cls(
            tokens_T=send(row.tokens_T, device),
            positions_T=send(row.positions_T, device),
            spans=row.spans,
            source_N=send(row.source_N, device),
            target_N=send(row.target_N, device),
            sample_N=send(np.repeat(np.arange(len(row.lengths)), row.lengths), device),
            weight_N=send(row.weight_N, device),
            columns={name: send(values, device) for name, values in wanted.items()},
            sequences=len(row.lengths),
            observed=row.observed,
            experts_TLK=None if row.experts_TLK is None else send(row.experts_TLK, device),
            kept=None if row.kept_N is None else KeptColumns.of(row.kept_N, device),
        )


def token_budget(config: LearningConfig, device: torch.device, dtype: torch.dtype) -> int:
    """The largest number of tokens in a row.

    On CPUs a longer row's activations soon take as much memory as all weights. In half precision they take half of it,
    and reading and writing the weights' gradients for each row costs as much as the products, so rows are longer.
    """
    return config.token_budget or (8192 if device.type != "cpu" else 1024 if dtype == torch.float32 else 2048)


def logit_chunk(config: LearningConfig, device: torch.device) -> int:
    """Rows of logits at a time: those of a longer micro-batch, but for the last, are made again in the backward pass.

    A GPU has room for those of a usual row, which it then need not make twice. A token budget that was set says that
    memory is short: then half of a full row's.
    """
    usual = 1024 if device.type == "cpu" else 8192
    return min(usual, max(1, config.token_budget // 2)) if config.token_budget else usual


def pack_rows(
    samples: Sequence[Sample],
    config: LearningConfig,
    device: torch.device,
    dtype: torch.dtype,
    observed: Collection[SampleKey] = (),
    *,
    share_prompts: bool = True,
) -> tuple[list[list[Sample]], list[Row]]:
    """The samples of each row, and the rows themselves."""
    parts = pack(samples, token_budget(config, device, dtype), share_prompts)
    return parts, [lay_out(part, share_prompts, observed) for part in parts]


def split_rows(parts: Sequence[Sequence[Sample]], values: Sequence[FloatArray]) -> dict[SampleKey, FloatArray]:
    """The values of each sample's loss tokens, from those of each row; parts: the samples of each row."""
    found: dict[SampleKey, FloatArray] = {}
    for part, values_N in zip(parts, values, strict=True):
        cuts = np.cumsum([s.loss_tokens for s in part])[:-1]
        found |= {s.key: own_N for s, own_N in zip(part, np.split(values_N, cuts) if part else [], strict=True)}
    return found


def attention(policy: Policy, micro: MicroBatch) -> AttentionContext:
    """Attention over a whole row. If this process holds a part of the row, it exchanges heads with the other parts."""
    if policy.sequence is None:
        return PackedAttention(micro.spans, policy.device, policy.heads, exact=policy.exact)
    heads = policy.heads // policy.sequence.size()
    whole = PackedAttention(micro.spans, policy.device, heads, exact=policy.exact)
    return SplitAttention(whole, len(micro.tokens_T), policy.sequence)


def turned(policy: Policy, micro: MicroBatch) -> Tensor:
    """The positions that the tokens of a row are turned by: of each sequence those that its pictures leave it."""
    if policy.vision is None or not policy.vision.moves or not bool((micro.tokens_T >= PICTURE).any()):
        return micro.positions_T
    tokens, turned_3T = micro.tokens_T.tolist(), micro.positions_T.expand(3, -1).clone()
    for span in micro.spans:
        before = tokens[span.prefix_start : span.prefix_start + span.prefix_length]
        found = policy.turned(before + tokens[span.start : span.start + span.length])
        if found is not None:
            turned_3T[:, span.start : span.start + span.length] = found[:, len(before) :]
    return turned_3T


class Pass:
    """The inputs of a policy's forward pass: a whole micro-batch, or this process's part of the row."""

    def __init__(self, policy: Policy, micro: MicroBatch) -> None:
        self.context = attention(policy, micro)
        self.tokens_T, self.positions_T, self.source_N = micro.tokens_T, turned(policy, micro), micro.source_N
        self.own = micro  # with only those loss tokens that are computed here
        self._group, self._total = policy.sequence, len(micro.source_N)
        if self._group is not None:
            part = RowPart.of(micro.tokens_T, micro.positions_T, micro.source_N, self._group)
            self.tokens_T, self.positions_T, self.source_N = part.tokens_t, part.positions_t, part.source_n
            self._own_n = part.own_n
            columns = {name: values_N[part.own_n] for name, values_N in micro.columns.items()}
            source_n, target_n = micro.source_N[part.own_n], micro.target_N[part.own_n]
            kept = micro.kept and micro.kept[part.own_n]
            self.own = replace(micro, source_N=source_n, target_N=target_n, columns=columns, kept=kept)

    def whole(self, *values: Tensor) -> tuple[Tensor, ...]:
        """The values of all loss tokens of the row, from those that were computed here."""
        if self._group is None:
            return values
        return together(torch.stack(values), self._own_n, self._total, self._group).unbind()


def scalars(model: ScalarModel, micro: MicroBatch) -> Tensor:
    """The model's number for each loss token."""
    read = Pass(model.policy, micro)
    return read.whole(model(read.tokens_T, read.positions_T, read.context, read.source_N))[0]


def checkpoint_activations(policy: Policy, config: LearningConfig) -> None:
    """Make the modules recompute activations in the backward pass, if the settings ask for it."""
    if config.checkpoint_activations:
        recompute_layers(policy.model)
        if policy.model is not policy.base:
            policy.model.enable_input_require_grads()


def recompute_layers(model: Any) -> None:
    """Enable activation checkpointing, which has a new name in transformers 5.23."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False, "context_fn": carried_on})


@contextmanager
def training_mode(policy: Policy, config: LearningConfig) -> Iterator[None]:
    """Modules recompute activations only in training mode; dropout stays off because models are loaded without."""
    policy.model.train(config.checkpoint_activations)
    try:
        yield
    finally:
        policy.model.eval()
