"""One of several data-parallel processes, forked from one that has the imports done. Rank 0 is the test itself.

A job has the model's folder, and for each case the algorithm's choices and the samples of every rank, which
carry the weights of the whole batch.
"""

from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from short_settings import algorithm_of
from torch import Tensor
from warm_starts import as_rank

from kitae.algorithms.control import Control
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.policy import Policy
from kitae.trainer.base import Conditions, Role
from kitae.trainer.build_worker import reinforced
from kitae.trainer.config import TrainingConfig
from kitae.trainer.forward import pack_rows
from kitae.types import Sample


@dataclass(frozen=True)
class Case:
    choices: dict[str, Any]
    shards: list[list[Sample]]


@dataclass(frozen=True)
class Job:
    folder: str
    rendezvous: str
    cases: list[Case]


def load(folder: str) -> Policy:
    return load_policy(ModelConfig(path=folder, dtype="float32", device="cpu"))


def gradient(
    policy: Policy, samples: list[Sample], choices: dict[str, Any], *, share_prompts: bool = True, **training: Any
) -> tuple[Tensor, float]:
    """The gradient of all parameters as one vector, and the loss. Samples carry their weights already."""
    algorithm, config = algorithm_of(choices), TrainingConfig(**training)
    worker = reinforced(policy, config, algorithm, max_tokens=64, temperature=0.8)
    policy.model.zero_grad(set_to_none=True)
    _, rows = pack_rows(samples, config, policy.device, policy.dtype, share_prompts=share_prompts)
    conditions = Conditions(3, Control(algorithm).coefficients)
    metrics = worker.forward_backward(rows, conditions, [Role.POLICY]).numbers()
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in policy.model.parameters()]
    return torch.cat([part.flatten() for part in parts]).clone(), metrics.get("loss", 0.0)


def work(rank: int, job: Job) -> list[tuple[Tensor, Tensor, float]]:
    """For each case: the gradient by adding over ranks, the gradient by averaging, and the loss."""
    torch.set_num_threads(1)
    world = len(job.cases[0].shards)
    dist.init_process_group("gloo", f"file://{job.rendezvous}", timedelta(seconds=60), world_size=world, rank=rank)
    try:
        policy = load(job.folder)
        found = []
        for case in job.cases:
            added, loss = gradient(policy, case.shards[rank], case.choices)
            total = torch.tensor(loss, dtype=torch.float64)
            dist.all_reduce(added)
            dist.all_reduce(total)
            # A library that averages gradients: each rank multiplies by the number of ranks.
            scaled = [replace(s, weight_T=s.weight_T * np.float32(world)) for s in case.shards[rank]]
            averaged, _ = gradient(policy, scaled, case.choices)
            dist.all_reduce(averaged)
            found.append((added, averaged / world, total.item()))
        return found
    finally:
        dist.destroy_process_group()


def join(rank: int, job: Job, errors: Path) -> None:
    """In a process of its own, whose errors go to a file."""
    with as_rank(errors):
        work(rank, job)
