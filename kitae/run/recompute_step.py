"""Compute a past step again, from the journal and the nearest checkpoint or model before it, and compare.

The steps between that checkpoint and the one asked for are trained again, on what the journal says they were trained
on, with the number of threads that each of them had. On the same machine the difference is 0: nothing of a step depends
on anything else, not on the engine either, of which there is none here. Several ranks add up in another order than this
one process: then the difference is rounding.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kitae.config.root import RLConfig, reinforcement
from kitae.errors import StoreError
from kitae.models.load import load_policy
from kitae.store.checkpoints import Checkpoints, Frontier, step_of
from kitae.store.journal import Journal
from kitae.store.run_folder import Metrics, changes_of_learning, needed_again, read_config
from kitae.trainer.learner import Learnt
from kitae.trainer.start_trainer import local_trainer, make_learner

COMPARED = ("samples_trained", "loss", "grad_norm", "entropy", "ratio", "logp_gap")


@dataclass(frozen=True, slots=True)
class Replay:
    """What a step logged, and what it gives now: `Replay(7, 4, {"loss": (0.013, 0.013)})`."""

    step: int
    checkpoint: int
    numbers: dict[str, tuple[float, float]]

    @property
    def difference(self) -> float:
        return max((abs(then - now) for then, now in self.numbers.values()), default=0.0)


def replay(folder: Path, step: int, note: Callable[[str], None]) -> Replay:
    config = reinforcement(read_config(folder), "kitae replay")
    logged = {row["step"]: row for row in Metrics(folder / "metrics.jsonl").rows("step")}
    if step not in logged:
        done = f"1 to {max(logged)}" if logged else "none"
        raise StoreError(f"step must be one that {folder} has trained, {done}, got {step}")
    checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint.keep)
    before = [name for name in checkpoints.names() if step_of(name) < step]
    frontier, state = checkpoints.load(before[-1]) if before else (Frontier(0, 0), None)
    journal = Journal(folder / "journal.sqlite", read_only=True)
    try:
        if changed := changes_of_learning(journal, frontier.step, needed_again(config)):
            raise StoreError(
                f"step {step} cannot be computed again from step {frontier.step} with the settings that the run has "
                f"now: {'; '.join(changed)}"
            )
        note(f"loading {config.model.path} at step {frontier.step}")
        if (ranks := config.cluster.ranks) > 1:
            note(f"{ranks} ranks trained it, one process rounds otherwise: small differences are no news")
        found = asyncio.run(_train_again(config, journal, frontier.step, state, step, logged, note))
    finally:
        journal.close()
    then = logged[step]
    now = {"samples_trained": float(found.samples), **found.numbers}
    return Replay(step, frontier.step, {key: (then[key], now[key]) for key in COMPARED if key in then and key in now})


async def _train_again(
    config: RLConfig,
    journal: Journal,
    start: int,
    state: Path | None,
    step: int,
    logged: Mapping[int, Mapping[str, Any]],
    note: Callable[[str], None],
) -> Learnt:
    """The steps after `start`, up to `step`; what the last of them gave."""
    trainer = local_trainer(config, load_policy(config.model, config.run.seed))
    try:
        learner = make_learner(config, trainer)
        if state is not None:
            await learner.load(state)
        found = Learnt(0, 0)
        for each in range(start + 1, step + 1):
            note(f"training step {each} again")
            groups, dropped = journal.batch(each)
            await trainer.use_threads(int(logged[each].get("threads", torch.get_num_threads())))
            found = await learner.learn(each, groups, [group for group, _ in dropped])
        return found
    finally:
        await trainer.close()
