"""Where a run starts or goes on, and which of its steps are trained again.

    0 ─────────── checkpoint ─────────── last step of the journal ─────────── training.steps
                  │ loaded               │
                  └── trained again ─────┘ the loop repeats these (RL: on the groups that the journal has of them)

An offline run has no journal of steps: what a step trains on follows from its number, so it simply goes on from the
checkpoint, to the same numbers.
"""

from dataclasses import dataclass
from pathlib import Path

from kitae.config.root import RLConfig, Root, StageConfig
from kitae.errors import ConfigError, StoreError
from kitae.evaluation.held_out import forget_after
from kitae.observe.observer import Observer
from kitae.store.checkpoints import START, Frontier
from kitae.store.provenance import check_data, record_data
from kitae.store.run_folder import LEARNING, Metrics, Result, RunStore, changes_of_learning
from kitae.store.run_summary import look
from kitae.store.time_limit import TimeLimit


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """`ResumePoint(Frontier(step=20, updates=20), Path("…/checkpoints/step-000020"), last_step=23, …)`: steps 21 to 23
    are trained again, unless `forget` gives them up. state: of the trainer; None: the model as it is before the first
    step. fingerprint: of the data."""

    frontier: Frontier
    state: Path | None
    last_step: int
    fingerprint: str
    forget: bool


def resume_point(store: RunStore, fingerprint: str, checkpoint: str | None, forget: bool) -> ResumePoint:
    """The named checkpoint, or the newest. forget: steps after it are given up. Refuses what cannot go on from there:
    fewer steps than were trained, other data, or other settings for steps that must be trained again as they were."""
    frontier, state = Frontier(0, 0), None
    if checkpoint != START and (checkpoint or store.checkpoints.names()):
        frontier, state = store.checkpoints.load(checkpoint)
    config = store.config
    if isinstance(config, StageConfig):
        _check_examples(config, store, frontier.step, fingerprint)
        return ResumePoint(frontier, state, frontier.step, fingerprint, forget)
    assert isinstance(config, RLConfig)
    last = frontier.step if forget else max(frontier.step, store.journal.last_step())
    _check_steps(config, store, frontier.step, last)
    if not forget:
        store.journal.check_answers(frontier.step)
    if frontier.step or not forget:
        check_data(
            store.journal,
            fingerprint,
            f"the prompts must be those that the run began with, but {config.data.path or config.data.hub}",
            f"ask the new ones from the start with --from {START} --forget, or in a new run from a model of your "
            "choice",
        )
    return ResumePoint(frontier, state, last, fingerprint, forget)


def _check_examples(config: StageConfig, store: RunStore, step: int, fingerprint: str) -> None:
    if config.training.steps == 0:  # only a new run takes as many as its epochs need
        raise ConfigError("training.steps must be at least 1 for a run that goes on, got 0")
    if config.training.steps < step:
        raise ConfigError(
            f"training.steps must be at least {step}, the steps that the run has trained, got "
            f"{config.training.steps}; --from CHECKPOINT goes back to an older one"
        )
    if step:
        check_data(
            store.journal,
            fingerprint,
            f"the examples must be those that the run began with, but {config.data.source}",
            f"train on the new ones from the start with --from {START}, or in a new run from a model of your choice",
        )


def _check_steps(config: RLConfig, store: RunStore, step: int, last: int) -> None:
    t = config.training
    way_out = "--from CHECKPOINT --forget goes back to an older one"
    if t.steps < last:
        raise ConfigError(
            f"training.steps must be at least {last}, the steps that the run has trained, got {t.steps}; {way_out}"
        )
    needed = LEARNING if t.schedule == "constant" else (*LEARNING, "training.steps")
    refused = [text for key, text in store.changes.items() if key in needed]
    refused += changes_of_learning(store.journal, step)
    if last > step and refused:
        raise ConfigError(
            f"steps {step + 1} to {last} come after the checkpoint and are trained again as they were, so "
            f"this must not have changed:\n  {'; '.join(refused)}\nGo on from the last checkpoint without a change, "
            f"and make it after a Ctrl-C, which saves a checkpoint; or give those steps up: {way_out}"
        )


async def begin_at(point: ResumePoint, store: RunStore, observer: Observer) -> None:
    """The first change of the run folder. The model was loaded before, so that nothing is touched where that fails."""
    for change in store.changes.values():
        observer.note(f"changed for this run from here on: {change}")
    await store.begin(point.frontier.step, point.forget)
    if lost := await store.journal.drop_unreadable():
        observer.note(f"answers that cannot be read are sampled again: {len(lost)}, the first: {lost[0]}")
    await record_data(store.journal, point.fingerprint)
    forget_after(store.folder, point.last_step)


def finished(folder: Path, config: Root) -> Result | None:
    """How a run ended, if nothing is left to do; one that cannot go on is refused."""
    seen = look(folder)
    if not (seen.is_finished and seen.has_model):
        return None
    limit = TimeLimit(config.training.minutes, Metrics(folder / "metrics.jsonl").seconds())
    if seen.step == config.training.steps or limit.is_reached:
        by_step = {row["step"]: row for row in seen.evaluations}
        return Result(folder, None, seen.step, by_step.get(0), by_step.get(seen.step))
    if not seen.checkpoints:
        raise StoreError(
            f"{folder} cannot go on: its checkpoints were removed. Start a new run from its model with: kitae train "
            f"RECIPE model.path={folder} (or train all of its steps again, from its journal, with --from start)"
        )
    return None
