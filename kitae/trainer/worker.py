"""One rank: the models it holds, or its shards of them, and what it does with rows. Synchronous, in one thread."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kitae.algorithms.config import AlgorithmConfig
from kitae.algorithms.loss import PolicyLoss
from kitae.data.packing import Row
from kitae.models.policy import Policy
from kitae.models.scalar import ScalarModel
from kitae.observe.meter import Kind, Totals
from kitae.trainer.base import Column, Conditions, Role
from kitae.trainer.config import TrainingConfig
from kitae.trainer.objectives import PolicyGradient, Values
from kitae.trainer.ranks import Alone, Ranks
from kitae.trainer.reference import Reference
from kitae.trainer.trained import Trained, outputs
from kitae.types import FloatArray

_FILES = {Role.POLICY: "optimizer.safetensors", Role.CRITIC: "critic.safetensors"}


class Worker:
    """reference: whether the algorithm wants one. critic: where it wants values. Models may be sharded already."""

    def __init__(
        self,
        policy: Policy,
        training: TrainingConfig,
        algorithm: AlgorithmConfig,
        *,
        max_tokens: int,
        temperature: float,
        reference: bool = False,
        critic: ScalarModel | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.policy = policy
        self.training = training
        self.ranks = ranks or Alone()
        self.reference = Reference(policy, algorithm, training, temperature) if reference else None
        updates, warmup = training.minibatches * training.epochs, (algorithm.critic_warmup or 0) if critic else 0
        gradient = PolicyGradient(policy, training, temperature, PolicyLoss(algorithm, max_tokens))
        self.trained = {
            Role.POLICY: Trained(gradient, training, self.ranks, total_updates=(training.steps - warmup) * updates)
        }
        if critic is not None:
            assert algorithm.critic_lr is not None and algorithm.critic_clip is not None
            values = Values(critic, algorithm.critic_clip)
            config = training.model_copy(update={"lr": algorithm.critic_lr})
            self.trained[Role.CRITIC] = Trained(
                values, config, self.ranks, total_updates=training.steps * updates, name="critic_"
            )

    @property
    def updates(self) -> int:
        return self.trained[Role.POLICY].optimizer.updates

    def annotate(self, rows: Sequence[Row], columns: Collection[Column]) -> dict[Column, list[FloatArray]]:
        """For each column, the numbers of the loss tokens of each row."""
        found: dict[Column, list[FloatArray]] = {}
        for column in columns:
            if column is Column.REFERENCE:
                assert self.reference is not None, "this algorithm has no reference"
                found[column] = outputs(self.reference.scores, rows)
            else:
                role = Role.POLICY if column is Column.OLD else Role.CRITIC
                found[column] = self.trained[role].outputs(rows)
        return found

    def forward_backward(self, rows: Sequence[Row], conditions: Conditions, roles: Collection[Role]) -> Totals:
        totals = Totals.of(Kind.MAX, threads=torch.get_num_threads())  # libraries add up in an order that depends on it
        for role in roles:
            totals += self.trained[role].forward_backward(rows, conditions)
        totals += _device_memory(self.policy.device)
        return self.ranks.together(totals)

    def optim_step(self) -> Totals:
        """Of every model that has gradients."""
        totals = Totals()
        for trained in self.trained.values():
            if trained.pending:
                totals += trained.optim_step()
        return totals

    def finish_step(self, step: int) -> None:
        if self.reference:
            self.reference.finish_step(step)

    def weights(self) -> Mapping[str, Tensor]:
        """The trainable parameters by name, as the modules hold them: shared memory, not copies."""
        optimizer = self.trained[Role.POLICY].optimizer
        return dict(zip(optimizer.names, (p.detach() for p in optimizer.parameters), strict=True))

    def save(self, folder: Path) -> None:
        for role, trained in self.trained.items():
            trained.save(folder / _FILES[role])
        if self.reference:
            self.reference.save_state(folder)

    def load(self, folder: Path) -> None:
        for role, trained in self.trained.items():
            trained.load(folder / _FILES[role])
        if self.reference:
            self.reference.load_state(folder)


def _device_memory(device: torch.device) -> Totals:
    """The largest share of a GPU's memory that tensors of this process have taken so far."""
    if device.type != "cuda":
        return Totals()
    _, total = torch.cuda.mem_get_info(device)
    return Totals.of(Kind.MAX, device_memory_share=torch.cuda.max_memory_allocated(device) / total)
