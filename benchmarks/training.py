"""What benchmarks of training share: one rank, called directly, without a driver or a thread."""

from collections.abc import Sequence

from kitae.algorithms.config import AlgorithmConfig
from kitae.algorithms.group_stages import Candidate, GroupStages
from kitae.models.policy import Policy
from kitae.trainer.base import Column, Conditions, Role
from kitae.trainer.build_worker import reinforced
from kitae.trainer.config import TrainingConfig
from kitae.trainer.forward import pack_rows
from kitae.trainer.training_worker import Worker
from kitae.types import FloatArray, Group, Sample

GRPO = AlgorithmConfig(preset="grpo")


def make_worker(policy: Policy, training: TrainingConfig, max_tokens: int) -> Worker:
    return reinforced(policy, training, GRPO, max_tokens=max_tokens, temperature=1.0)


def prepared(groups: Sequence[Group], max_tokens: int) -> tuple[Sample, ...]:
    """S1 to S3 and S7: what one optimizer step trains on."""
    stages = GroupStages(GRPO, max_tokens)
    return stages.weighted(stages.advantages(stages.candidates(groups)))


def weighted(samples: Sequence[Sample], max_tokens: int) -> tuple[Sample, ...]:
    """S7 on samples that have advantages, each a rollout of its own."""
    candidates = [Candidate((s,), score=0.0, reward=0.0, baseline=None, kept=True) for s in samples]
    return GroupStages(GRPO, max_tokens).weighted(candidates)


def forward_backward(worker: Worker, samples: Sequence[Sample]) -> dict[str, float]:
    """With packing, and the metrics, which wait for the device."""
    _, rows = pack_rows(samples, worker.training, worker.policy.device, worker.policy.dtype)
    return worker.forward_backward(rows, Conditions(), [Role.POLICY]).numbers()


def log_probs(worker: Worker, samples: Sequence[Sample]) -> list[FloatArray]:
    """Of the loss tokens of each sample."""
    parts, rows = pack_rows(samples, worker.training, worker.policy.device, worker.policy.dtype)
    values = worker.annotate(rows, [Column.OLD])[Column.OLD]
    found = {
        s.key: own_N
        for part, row, values_N in zip(parts, rows, values, strict=True)
        for s, own_N in zip(part, row.split(values_N), strict=True)
    }
    return [found[s.key] for s in samples]
