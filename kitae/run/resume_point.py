"""Where a run starts or goes on, and which of its steps are trained again.

    0 ─────────── checkpoint ─────────── last step of the journal ─────────── training.steps
                  │ loaded               │
                  └── trained again ─────┘ the loop repeats these (RL: on the groups that the journal has of them)

An offline run has no journal of steps: what a step trains on follows from its number, so it simply goes on from the
checkpoint, to the same numbers.

A run also notes what it trains on: checksums of the data and of the files of its models, which must be the same when it
goes on.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kitae.config.root import DistilConfig, DistilFileConfig, RLConfig, Root, StageConfig
from kitae.errors import ConfigError, CorruptError, DataError, ModelError, StoreError
from kitae.evaluation.held_out import forget_after
from kitae.models.fingerprint import fingerprint_files
from kitae.models.load import find_model
from kitae.observe.observer import Observer
from kitae.store.checkpoints import START, Frontier
from kitae.store.journal import Journal
from kitae.store.run_folder import Metrics, Result, RunStore, TimeLimit, changes_of_learning, needed_again
from kitae.store.run_summary import look

_DATA, _MODELS = "data", "models"  # the events that say what the run trains on


@dataclass(frozen=True, slots=True)
class TrainedOn:
    """`TrainedOn("9f3c…", {"/models/qwen/model.safetensors": "0a1e…"})`: a checksum of the data, and of each file of
    the models that the run loads."""

    data: str
    models: Mapping[str, str] = field(default_factory=dict)


def check_data(journal: Journal, fingerprint: str, what: str, way_out: str) -> None:
    """Refuse to go on with other data than before. A run that did not record its data is let pass."""
    if _known(journal, _DATA) not in (None, fingerprint):
        raise DataError(f"{what} or what is held out was changed since then. Put it back; or {way_out}")


def check_models(journal: Journal, models: Mapping[str, str]) -> None:
    """Refuse to go on with other models than before: the one that is trained, and those that it learns from."""
    known = json.loads(_known(journal, _MODELS) or "{}")
    changed = sorted(path for path in {*known, *models} if known.get(path) != models.get(path)) if known else []
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise ModelError(
            f"the models must be those that the run began with, but {changed[0]}{more} was changed, added or removed "
            f"since then. Put it back; or start a new run, or give all steps up: --from {START} --forget"
        )


async def record(journal: Journal, origin: TrainedOn) -> None:
    """From here on, this is what it trains on."""
    for kind, now in ((_DATA, origin.data), (_MODELS, json.dumps(dict(origin.models)))):
        if _known(journal, kind) != now:
            await journal.add_event(kind, now)


def _known(journal: Journal, kind: str) -> str | None:
    return next((detail for _, each, detail in reversed(journal.events()) if each == kind), None)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """`ResumePoint(Frontier(step=20, updates=20), Path("…/checkpoints/step-000020"), last_step=23, …)`: steps 21 to 23
    are trained again, unless `forget` gives them up. state: of the trainer; None: the model as it is before the first
    step. origin: the data and the models."""

    frontier: Frontier
    state: Path | None
    last_step: int
    origin: TrainedOn
    forget: bool


def check_models_of(store: RunStore) -> None:
    """`ModelError` if a model is not the one that the run began with."""
    check_models(store.journal, model_files(store.config))


def resume_point(store: RunStore, fingerprint: str, checkpoint: str | None, forget: bool) -> ResumePoint:
    """The named checkpoint, or the newest. forget: steps after it are given up. Refuses what cannot go on from there:
    a journal that has lost what it had, fewer steps than were trained, other data, or other settings for steps that
    must be trained again as they were."""
    frontier, state = Frontier(0, 0), None
    if checkpoint != START and (checkpoint or store.checkpoints.names()):
        frontier, state = store.checkpoints.load(checkpoint)
        _check_claim(store, frontier, state)
    config, origin = store.config, TrainedOn(fingerprint, model_files(store.config))
    if isinstance(config, StageConfig):
        _check_examples(config, store, frontier.step, fingerprint)
        return ResumePoint(frontier, state, frontier.step, origin, forget)
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
    return ResumePoint(frontier, state, last, origin, forget)


def _check_claim(store: RunStore, frontier: Frontier, folder: Path) -> None:
    journal = store.journal
    if journal.meets(frontier.claim, frontier.step):
        return
    older = store.checkpoints.that_fits(journal.meets, frontier.step)
    again = ", which trains all steps again on what the journal has" if older == START else ""
    raise CorruptError(
        f"checkpoint {folder} was saved when the journal had all that was trained up to step {frontier.step}, but "
        f"{journal.path} has not: what it has ends at step {journal.last_step()}, or is of another run. Perhaps its "
        "-wal was removed or damaged, or it was copied without it. Nothing was changed. Put back the journal that "
        f"belongs to it, or go on from where it is whole with --from {older}{again}"
    )


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
    needed = needed_again(config)
    refused = [text for key, text in store.changes.items() if key in needed]
    refused += changes_of_learning(store.journal, step, needed)
    if last > step and refused:
        raise ConfigError(
            f"steps {step + 1} to {last} come after the checkpoint and are trained again as they were, so "
            f"this must not have changed:\n  {'; '.join(refused)}\nGo on from the last checkpoint without a change, "
            f"and make it after a Ctrl-C, which saves a checkpoint; or give those steps up: {way_out}"
        )


_ROUNDING = ("training.token_budget", "training.checkpoint_activations", "model.device")
"""Changeable settings on which the order of sums depends."""


async def begin_at(point: ResumePoint, store: RunStore, observer: Observer) -> None:
    """The first change of the run folder. The model was loaded before, so that nothing is touched where that fails."""
    first, last, rows = point.frontier.step + 1, point.last_step, store.metrics.rows("step")
    logged = max((row["step"] for row in rows), default=0)
    for damage in store.damage:
        observer.note(f"damage: {damage}")
    if lines := store.metrics.damaged():
        observer.note(f"damage: {store.metrics.path}: lines that are not what was written are left out: {lines}")
    if not point.forget and logged > last and isinstance(store.config, RLConfig):
        observer.note(
            f"damage: the metrics have steps up to {logged}, and the journal has them up to {last}: what came after is "
            "asked and sampled again"
        )
    for change in store.changes.values():
        observer.note(f"changed for this run from here on: {change}")
    if first <= last and (rounding := [k for k in store.changes if k in _ROUNDING or k.startswith("cluster.")]):
        observer.note(
            f"steps {first} to {last} are trained again with another {', '.join(rounding)}: they may round otherwise"
        )
    if point.state is not None:
        observer.note(f"going on after step {point.frontier.step}, from {point.state}")
    await store.begin(point.frontier.step, point.forget)
    if lost := await store.journal.drop_unreadable():
        observer.note(f"answers that cannot be read are sampled again: {len(lost)}, the first: {lost[0]}")
    await record(store.journal, point.origin)
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


def model_files(config: Root) -> dict[str, str]:
    """Checksums of those that are on this machine."""
    paths = [config.model.path]
    if isinstance(config, DistilFileConfig) or (isinstance(config, DistilConfig) and config.method.teacher.path):
        paths.append(config.method.teacher.path)
    found = [find_model(path, download=False) for path in paths]
    found += [Path(config.model.adapter).expanduser()] if config.model.adapter else []
    return fingerprint_files({folder.resolve() for folder in found if folder is not None})
