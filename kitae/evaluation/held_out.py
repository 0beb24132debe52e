"""A run's results on each held-out prompt, by evaluation, and the paired comparison of two runs on these.

    RUN/evaluations/step-000015/own/NAME-3f9a1c02/answers.sqlite    answers and verdicts, as `storage` keeps them
    RUN/evaluations/step-000015/suites/gsm8k-77c0d1e4/…             the same for other suites
    RUN/evaluations/step-000015/examples.json                       for a run that learns from examples: a number each

Answers are stored as they come, so a killed evaluation continues where it was. An evaluation without its line in the
metrics is not complete, and its results are not read.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from kitae.config.root import RLConfig, StageConfig
from kitae.errors import KitaeError, StoreError
from kitae.evaluation.statistics import Difference, compare
from kitae.evaluation.storage import Answers
from kitae.store.disk import write_whole
from kitae.store.journal import Journal
from kitae.store.run_summary import RunView
from kitae.types import GREEDY, Prompt, Rollout

FOLDER = "evaluations"
_EXAMPLES = "examples.json"
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True)
class HeldOutAnswer:
    """`HeldOutAnswer(Prompt("reverse/eval/3", …), (Rollout(…),), 1.0)`; value: the mean score, if there is one."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    value: float | None


@dataclass(frozen=True, slots=True)
class HeldOutResults:
    """One evaluation: `HeldOutResults(15, "accuracy", {"9f86d081…": 1.0, …})`; keys: digests of the prompts."""

    step: int
    measure: str
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PairedRuns:
    """The last evaluations of two runs, on the prompts that both were judged on; difference: second minus first.

    `PairedRuns(0.52, 0.98, Difference(128, …), "")`; reason: why nothing can be compared, or "".
    """

    first: float | None
    second: float | None
    difference: Difference | None
    reason: str = ""


def evaluation_due(config: RLConfig | StageConfig, step: int, last: int) -> bool:
    """Whether a run evaluates after this step: before the first one, after the last, and every `eval.every` in between,
    if anything is held out."""
    every = config.eval.every
    held_out = config.eval.prompts if isinstance(config, RLConfig) else config.eval.examples
    return held_out > 0 and (step in (0, last) or bool(every and step % every == 0))


# Writing.


def answers_of(run: Path, step: int, suite: str, own: bool, settings: Mapping[str, Any]) -> Answers:
    return Answers(_folder(run, step), "own" if own else "suites", suite, settings)


def keep_examples(run: Path, step: int, values: Mapping[str, float]) -> None:
    """Store the values by digest of the example, without those that are not finite."""
    folder = _folder(run, step)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot make the folder {folder}: {error}") from error
    write_whole(folder / _EXAMPLES, json.dumps({key: v for key, v in values.items() if np.isfinite(v)}))


def forget_after(run: Path, step: int) -> None:
    """Remove the evaluations of later steps, which are discarded."""
    for folder in (run / FOLDER).glob("step-*"):
        if (found := _NAME.fullmatch(folder.name)) is not None and int(found[1]) > step:
            shutil.rmtree(folder)


def digest(asked: str) -> str:
    return hashlib.sha256(asked.encode()).hexdigest()[:16]


# Reading.


def answers_at(run: Path, step: int) -> dict[str, HeldOutAnswer]:
    """The answers to the held-out prompts of the run's own task, by digest; empty if they were not kept."""
    files = sorted((_folder(run, step) / "own").glob("*/answers.sqlite"), key=lambda path: path.stat().st_mtime)
    if not files:
        return {}
    journal = Journal(files[-1], read_only=True)
    try:
        found = (_answer(journal, group) for group in range(journal.counts()["prompts"]))
        return {_key(answer.prompt): answer for answer in found}
    finally:
        journal.close()


def last_results(view: RunView) -> HeldOutResults | None:
    """The results of the last evaluation in the metrics; None if there is none, or if its results were not kept."""
    return results_at(view, int(view.evaluations[-1]["step"])) if view.evaluations else None


def results_at(view: RunView, step: int) -> HeldOutResults | None:
    file = _folder(view.folder, step) / _EXAMPLES
    if file.is_file():
        try:
            values = json.loads(file.read_text("utf-8"))
        except ValueError as error:
            raise StoreError(f"{file} cannot be read: {error}") from None
    else:
        values = {key: a.value for key, a in answers_at(view.folder, step).items() if a.value is not None}
    return HeldOutResults(step, view.config.measure, values) if values else None


def pair(first: Path, second: Path) -> PairedRuns:
    found = []
    for run in (first, second):
        try:
            results = last_results(view := RunView(run))
        except KitaeError as error:
            return _unpaired(str(error))
        if results is None:
            kept = "has no evaluation yet" if not view.evaluations else "kept no results of single prompts"
            return _unpaired(f"{run.name} {kept}")
        found.append(results)
    a, b = found
    if a.measure != b.measure:
        return _unpaired(f"{first.name} was measured by {a.measure}, {second.name} by {b.measure}")
    if not a.values.keys() & b.values.keys():
        asked = f"{len(a.values)} of {first.name}, {len(b.values)} of {second.name}"
        return _unpaired(f"they have no held-out prompt in common: {asked}")
    return _paired(a, b)


def pair_ends(view: RunView) -> PairedRuns:
    """Compare the first and the last evaluation of one run."""
    if len(view.evaluations) < 2:
        return _unpaired(f"{view.folder.name} was evaluated {len(view.evaluations)} times")
    ends = [results_at(view, int(view.evaluations[i]["step"])) for i in (0, -1)]
    a, b = ends
    if a is None or b is None or not a.values.keys() & b.values.keys():
        return _unpaired(f"{view.folder.name} kept no results of single prompts")
    return _paired(a, b)


def _paired(a: HeldOutResults, b: HeldOutResults) -> PairedRuns:
    both = sorted(a.values.keys() & b.values.keys())
    x, y = (np.array([results.values[key] for key in both], dtype=np.float32) for results in (a, b))
    return PairedRuns(float(x.mean()), float(y.mean()), compare(x, y))


def _unpaired(reason: str) -> PairedRuns:
    return PairedRuns(None, None, None, reason)


def _answer(journal: Journal, group: int) -> HeldOutAnswer:
    prompt = journal.prompt(group)
    assert prompt is not None  # prompts are numbered from 0, and stored before any is asked
    rollouts = tuple(r for r in journal.rollouts(group) if r.index != GREEDY)
    scores = [r.score.value for r in rollouts if r.score and r.score.valid]
    return HeldOutAnswer(prompt, rollouts, fmean(scores) if scores else None)


def _key(prompt: Prompt) -> str:
    return digest(json.dumps([[[m.role, m.content, list(m.parts)] for m in prompt.messages], prompt.reference]))


def _folder(run: Path, step: int) -> Path:
    return run / FOLDER / f"step-{step:06d}"
