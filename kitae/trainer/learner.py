"""One step of learning: a batch of groups in, updated weights out. It handles samples, and leaves tensors to a trainer.

candidates  S1, S2 on all groups
annotate    log-probs of π_old, π_ref and a teacher, values of the critic: only what the algorithm reads
advantages  S3
updates     epochs over mini-batches of whole groups: S7 on each, then forward and backward, then one optimizer step
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from kitae.algorithms.control import Control
from kitae.algorithms.group_stages import Candidate, GroupStages, replace_samples
from kitae.clock import now
from kitae.observe.meter import Totals, average
from kitae.observe.token_numbers import Columns, TokenChoice, with_samples
from kitae.trainer.base import Batch, Column, Conditions, Mark, Role, Trainer
from kitae.trainer.config import TrainingConfig
from kitae.types import Group, Sample, SampleKey

T = TypeVar("T")

STATE_FILE = "algorithm.json"


@dataclass(frozen=True, slots=True)
class Learnt:
    """What a step did: `Learnt(updates=4, samples=32, numbers={"loss": 0.01, …}, seconds={"annotate": 0.2, …})`.

    updates: optimizer steps. samples: rollouts that were trained on. skipped: updates that left the weights alone
    because a gradient was not finite. seconds: the time spent, by phase. tokens: numbers of single
    tokens, for the samples that are recorded.
    """

    updates: int
    samples: int
    skipped: int = 0
    numbers: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    tokens: Mapping[SampleKey, Columns] = field(default_factory=dict)


async def no_wait() -> None:
    pass


class Learner:
    """Turns batches of groups into updates of a trainer. recorded: chooses the samples whose token numbers are kept."""

    def __init__(
        self,
        trainer: Trainer,
        groups: GroupStages,
        control: Control,
        training: TrainingConfig,
        seed: int,
        recorded: TokenChoice | None = None,
    ) -> None:
        self.trainer = trainer
        self.groups = groups
        self.control = control
        self.training = training
        self.seed = seed
        self._recorded = recorded or TokenChoice(0.0, 0, seed)

    @property
    def updates(self) -> int:
        return self.trainer.updates

    async def learn(
        self,
        step: int,
        groups: Sequence[Group],
        dropped: Sequence[Group] = (),
        before_update: Callable[[], Awaitable[None]] = no_wait,
    ) -> Learnt:
        """Make all updates of one batch. A batch without any sample leaves the weights alone.

        `before_update` is awaited once: before the first optimizer step, or before the step is finished if there is
        none. Until then, of all that a checkpoint holds only `state` has changed.
        """
        watch = _Stopwatch()
        candidates = await asyncio.to_thread(self.groups.candidates, groups, dropped)
        candidates = await watch.over("annotate", self._annotate(candidates))
        kl_coef = self.control.coefficients.kl
        candidates = await asyncio.to_thread(self.groups.advantages, candidates, kl_coef)
        numbers = self.groups.group_metrics([*groups, *dropped])
        totals, updates = Totals(), 0
        if candidates:
            totals, updates = await self._update(step, candidates, before_update, watch)
            numbers |= self.control.used
            self.control.finish_step(totals, len(candidates))
        else:
            await watch.over("hold", before_update())
        await self.trainer.finish_step(step)
        numbers = totals.numbers() | numbers
        return Learnt(updates, len(candidates), int(totals[Mark.SKIPPED] or 0), numbers, watch.seconds, totals.tokens)

    def state(self) -> str:
        """The algorithm's own state (statistics of groups, adapted coefficients) as JSON, valid between two steps."""
        return json.dumps({**self.groups.state(), "coefficients": self.control.state()})

    async def save(self, folder: Path, state: str) -> None:
        """Save beside everything but the next update; `state` is that of the step being saved."""
        await self.trainer.save(folder)
        (folder / STATE_FILE).write_text(state)

    async def load(self, folder: Path) -> None:
        await self.trainer.load(folder)
        state = json.loads((folder / STATE_FILE).read_text())
        self.control.load_state(state.pop("coefficients"))
        self.groups.load_state(state)

    async def _annotate(self, candidates: list[Candidate]) -> list[Candidate]:
        """Add the columns that the algorithm reads. Dropped samples need them only where group statistics use them."""
        t, g = self.training, self.groups
        several = t.minibatches * t.epochs > 1
        routed = several and g.config.experts.routing == "old"
        columns = [Column.OLD] if g.wants_old or routed or (several and g.config.ratio.anchor != "interpolated") else []
        columns += [Column.EXPERTS] if routed else []
        columns += [Column.REFERENCE] if g.wants_reference else []
        columns += [Column.TEACHER] if g.wants_teacher else []
        columns += [Column.VALUE] if g.wants_values else []
        if not columns:
            return candidates
        wanted = [s for c in candidates if c.kept or g.kl_in_reward for s in c.samples]
        return replace_samples(candidates, await self.trainer.annotate(wanted, columns))

    async def _update(
        self,
        step: int,
        candidates: Sequence[Candidate],
        before_update: Callable[[], Awaitable[None]],
        watch: "_Stopwatch",
    ) -> tuple[Totals, int]:
        roles = self._roles(step)
        observed = self._recorded.among(step, [s for c in candidates for s in c.samples])
        found: list[Totals] = []
        for part in self._minibatches(step, candidates):
            samples = await asyncio.to_thread(self.groups.weighted, part)
            samples = _for_critic(samples) if Role.CRITIC in roles else samples
            conditions = Conditions(step, self.control.coefficients)
            batch = Batch(samples, conditions, roles, observed)
            passed = await watch.over("train", self.trainer.forward_backward(batch))
            passed = replace(passed, tokens=with_samples(passed.tokens, samples))
            if not found:
                await watch.over("hold", before_update())
            found.append(passed + await watch.over("update", self.trainer.optim_step()))
        return average(found), len(found)

    def _roles(self, step: int) -> tuple[Role, ...]:
        if not self.groups.wants_values:
            return (Role.POLICY,)
        warm = step > (self.groups.config.critic.warmup or 0)
        return (Role.CRITIC, Role.POLICY) if warm else (Role.CRITIC,)

    def _minibatches(self, step: int, candidates: Sequence[Candidate]) -> Iterator[list[Candidate]]:
        """Mini-batches of whole groups, shuffled anew in each epoch if there is more than one of them."""
        t = self.training
        by_group: dict[int, list[Candidate]] = {}
        for c in candidates:
            by_group.setdefault(c.group, []).append(c)
        groups = list(by_group.values())
        for epoch in range(t.epochs):
            order = np.arange(len(groups))
            if t.minibatches * t.epochs > 1:
                np.random.default_rng((self.seed, step, epoch)).shuffle(order)
            for part in np.array_split(order, min(t.minibatches, len(order))):
                yield [c for i in sorted(part) for c in groups[i]]


class _Stopwatch:
    """Adds up how long things take, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    async def over(self, name: str, work: Awaitable[T]) -> T:
        began = now()
        try:
            return await work
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + now() - began


def _for_critic(samples: Iterable[Sample]) -> tuple[Sample, ...]:
    """The samples with `value_weight`: one over the number of loss tokens of the whole batch."""
    samples = tuple(samples)
    weight = np.float32(1 / max(1, sum(s.loss_tokens for s in samples)))
    return tuple(s.with_columns(value_weight=s.spread(weight)) for s in samples)
