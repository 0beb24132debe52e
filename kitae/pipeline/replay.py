"""Compute a past step again, from the journal and the nearest checkpoint or model before it, and compare.

The steps between that checkpoint and the one asked for are trained again, on what the journal says they were trained
on, with the number of threads that each of them had. On the same machine the difference is 0: nothing of a step depends
on anything else, not on the engine either, of which there is none here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kitae.errors import StoreError
from kitae.models.load import load_policy
from kitae.pipeline.session import make_learner
from kitae.store.checkpoint import Checkpoints, Frontier, step_of
from kitae.store.journal import Journal
from kitae.store.run import Metrics, changes_of_learning, read_config

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
    config = read_config(folder)
    logged = {row["step"]: row for row in Metrics(folder / "metrics.jsonl").rows("step")}
    if step not in logged:
        done = f"1 to {max(logged)}" if logged else "none"
        raise StoreError(f"step must be one that {folder} has trained, {done}, got {step}")
    checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint.keep)
    before = [name for name in checkpoints.names() if step_of(name) < step]
    frontier, state = checkpoints.load(before[-1]) if before else (Frontier(0, 0), None)
    journal = Journal(folder / "journal.sqlite", read_only=True)
    threads = torch.get_num_threads()
    try:
        if changed := changes_of_learning(journal, frontier.step):
            raise StoreError(
                f"step {step} cannot be computed again from step {frontier.step} with the settings that the run has "
                f"now: {'; '.join(changed)}"
            )
        note(f"loading {config.model.path} at step {frontier.step}")
        learner = make_learner(config, load_policy(config.model, config.run.seed))
        if state is not None:
            learner.load_state(state, frontier.updates)
        now: dict[str, Any] = {}
        for each in range(frontier.step + 1, step + 1):
            note(f"training step {each} again")
            groups, dropped = journal.batch(each)
            torch.set_num_threads(int(logged[each].get("threads", threads)))
            now = learner.learn(each, groups, [group for group, _ in dropped])
    finally:
        torch.set_num_threads(threads)
        journal.close()
    then = logged[step]
    return Replay(step, frontier.step, {key: (then[key], now[key]) for key in COMPARED if key in then and key in now})
