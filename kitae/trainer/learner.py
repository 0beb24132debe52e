"""One step of learning: a batch of groups in, updated weights out. Everything an algorithm needs meets here.

samples     S1, S2 on all groups
annotate    log-probs of π_old and π_ref, values of the critic: only what the algorithm asks for
advantages  S3
updates     epochs over mini-batches of whole groups: S7 on each, then forward and backward, then one optimizer step
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kitae.algorithms.objective import Objective
from kitae.trainer.critic import Critic
from kitae.trainer.reference import Reference
from kitae.trainer.trainer import Trainer
from kitae.types import FloatArray, Group, Sample

STATE_FILE = "algorithm.json"


class Learner:
    """`reference` and `critic` are None unless the algorithm wants them."""

    def __init__(
        self,
        trainer: Trainer,
        objective: Objective,
        seed: int,
        reference: Reference | None = None,
        critic: Critic | None = None,
    ) -> None:
        self.trainer = trainer
        self.objective = objective
        self.seed = seed
        self.reference = reference
        self.critic = critic

    @property
    def updates(self) -> int:
        return self.trainer.optimizer.updates

    def learn(
        self,
        step: int,
        groups: Sequence[Group],
        dropped: Sequence[Group] = (),
        before_update: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """All updates of one batch; the metrics of the step. A batch without any sample leaves the weights alone.

        `before_update` is called once, before the first optimizer step changes the policy.
        """
        began = time.perf_counter()
        samples = self._annotate(self.objective.samples(groups, dropped))
        samples = self.objective.advantages(samples)
        metrics = self.objective.group_metrics([*groups, *dropped])
        metrics |= {"samples_trained": float(len(samples)), "updates": 0.0}
        metrics["threads"] = float(torch.get_num_threads())  # libraries add up in an order that depends on it
        metrics["annotate_seconds"] = time.perf_counter() - began
        if samples:
            metrics |= self._update(step, samples, before_update)
            metrics |= self.objective.finish_step(metrics, len(samples))
        if self.reference:
            self.reference.finish_step(step)
        return metrics

    def save_state(self, folder: Path) -> None:
        self.trainer.save_state(folder)
        updates = {"critic_updates": self.critic.optimizer.updates} if self.critic else {}
        (folder / STATE_FILE).write_text(json.dumps({**self.objective.state(), **updates}))
        if self.reference:
            self.reference.save_state(folder)
        if self.critic:
            self.critic.save_state(folder)

    def load_state(self, folder: Path, updates: int) -> None:
        self.trainer.load_state(folder, updates)
        state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text())
        self.objective.load_state(state)
        if self.reference:
            self.reference.load_state(folder)
        if self.critic:
            self.critic.load_state(folder, state["critic_updates"])

    def _annotate(self, samples: list[Sample]) -> list[Sample]:
        """Add what the algorithm reads. Samples that are not kept need it only for the statistics of their group."""
        t, o = self.trainer.config, self.objective
        wanted = [s for s in samples if s.kept or o.kl_in_reward]
        several = t.minibatches * t.epochs > 1 and not o.estimates_old
        found: dict[str, Sequence[FloatArray]] = {}
        if several or o.kl_in_reward:
            found["logp_old_T"] = self.trainer.logprobs(wanted)
        if self.reference:
            found["logp_ref_T"] = self.reference.logprobs(wanted)
        if self.critic:
            found["value_T"] = self.critic.values(wanted)
        if not found:
            return samples
        rows = zip(*found.values(), strict=True)
        annotated = {
            (s.group, s.index): replace(s, **dict(zip(found, row, strict=True)))
            for s, row in zip(wanted, rows, strict=True)
        }
        return [annotated.get((s.group, s.index), s) for s in samples]

    def _update(self, step: int, samples: Sequence[Sample], before_update: Callable[[], None]) -> dict[str, float]:
        t = self.trainer.config
        by_group: dict[int, list[Sample]] = {}
        for s in samples:
            by_group.setdefault(s.group, []).append(s)
        groups = list(by_group.values())
        metrics: dict[str, float] = {}
        updates = 0
        untouched = True
        for epoch in range(t.epochs):
            order = np.arange(len(groups))
            if t.minibatches * t.epochs > 1:
                np.random.default_rng((self.seed, step, epoch)).shuffle(order)
            for part in np.array_split(order, min(t.minibatches, len(order))):
                batch = self.objective.batch([s for i in sorted(part) for s in groups[i]])
                numbers: dict[str, float] = {}
                if self.critic:
                    numbers |= self.critic.forward_backward(batch)
                    numbers |= self.critic.optim_step()
                if self.critic is None or step > self.critic.warmup:
                    numbers |= self.trainer.forward_backward(batch, self.objective, version=step)
                    if untouched:
                        before_update()
                        untouched = False
                    numbers |= self.trainer.optim_step()
                updates += 1
                _merge(metrics, numbers)
        for key in metrics:
            if key not in _SUMS and not key.endswith("_max"):
                metrics[key] /= updates
        return {**metrics, "updates": float(updates)}


_SUMS = {"train_seconds", "train_tokens", "skipped_updates", "critic_skipped_updates"}


def _merge(into: dict[str, float], numbers: dict[str, float]) -> None:
    for key, value in numbers.items():
        into[key] = max(value, into.get(key, value)) if key.endswith("_max") else into.get(key, 0.0) + value
