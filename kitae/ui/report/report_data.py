"""What a report tells of: a run as the pages of `kitae ui` read it, put together once."""

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from kitae.errors import KitaeError, StoreError
from kitae.evaluation.held_out import HeldOutAnswer, PairedRuns, answers_at, pair_ends
from kitae.observe import timeline
from kitae.observe.machine import HostMachine, machine_of
from kitae.store.run_folder import Metrics
from kitae.store.run_summary import RunView, look
from kitae.types import Prompt
from kitae.ui import findings, overview, prompt_history, queries, samples, schedule
from kitae.ui.records import Diagnosis, GroupView, LaneView, RunDetail, SampleView
from kitae.ui.tables import Tables

SHOWN = 5  # samples of each kind
_GROUPS = 3
_OF_GROUP = 4

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shown:
    """An answer with what was asked: `Shown("Reverse 1, 2", "2, 1", "step 3 · reverse/17 · sample 2", sample)`."""

    question: str
    reference: str
    where: str
    sample: SampleView


@dataclass(frozen=True, slots=True)
class BeforeAfter:
    """The same prompt at two times: `BeforeAfter("Reverse 1, 2", "2, 1", "step 0", "1, 2", 0.0, "step 15", …)`."""

    question: str
    reference: str
    first_at: str
    first: str
    first_value: float | None
    last_at: str
    last: str
    last_value: float | None


@dataclass(frozen=True, slots=True)
class Told:
    """measure: what is held out measures, "accuracy" or "loss". moved: by what happened to held-out prompts between the
    first and the last evaluation, how many; empty where their answers were not kept."""

    run: Path
    detail: RunDetail
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    measure: str
    machine: HostMachine | None
    seconds: float
    paired: PairedRuns
    moved: dict[str, int]
    before_after: list[BeforeAfter]
    best: list[Shown]
    worst: list[Shown]
    groups: list[GroupView]
    lanes: LaneView
    busy: dict[str, float]
    diagnosis: Diagnosis


def tell(run: Path) -> Told:
    view = _look(run)
    metrics = Metrics(run / "metrics.jsonl")
    spans = [row for row in timeline.read(run) if row.get("part") in timeline.PARTS]
    steps = metrics.rows("step")
    moved, before_after = _held_out(view)
    return Told(
        run=run,
        detail=overview.detail(run.resolve().name, run, Tables()),
        steps=steps,
        evaluations=metrics.rows("eval"),
        measure=_measure(view),
        machine=machine_of(run),
        seconds=max((r["end"] for r in spans), default=sum(r.get("step_seconds") or 0.0 for r in steps)),
        paired=_readable(lambda: pair_ends(view), PairedRuns(None, None, None, "they cannot be read")),
        moved=moved,
        before_after=before_after or _readable(lambda: _visited_again(run), []),
        best=_readable(lambda: _first(run, "best"), []),
        worst=_readable(lambda: _first(run, "worst"), []),
        groups=_readable(lambda: _some_groups(run), []),
        lanes=schedule.schedule(run),
        busy=timeline.busy_shares(spans),
        diagnosis=findings.diagnosis(run),
    )


def _look(run: Path) -> RunView:
    if (run / "chain.json").is_file():
        stages = sorted(path.name for path in run.iterdir() if (path / "config.json").is_file())
        raise StoreError(f"{run} is a chain; a report is of one run of it: {', '.join(stages) or 'there is none yet'}")
    return look(run)


def _readable(read: Callable[[], T], otherwise: T) -> T:
    """A damaged journal leaves a report without what is in it."""
    try:
        return read()
    except (KitaeError, sqlite3.Error):
        return otherwise


def _measure(view: RunView) -> str:
    return _readable(lambda: view.config.measure, "score")  # settings of another version


def _held_out(view: RunView) -> tuple[dict[str, int], list[BeforeAfter]]:
    """By what became of held-out prompts, how many; and examples of those that changed, or are still not right."""
    if len(view.evaluations) < 2:
        return {}, []
    first, last = (int(view.evaluations[i]["step"]) for i in (0, -1))
    before, after = _answers(view.folder, first), _answers(view.folder, last)
    kinds: dict[str, list[BeforeAfter]] = {"worse": [], "better": [], "still not right": [], "right as before": []}
    for key in before.keys() & after.keys():
        a, b = before[key], after[key]
        if a.value is not None and b.value is not None:
            kinds[_kind(a.value, b.value)].append(_both(a, b, first, last))
    shown = [example for kind in ("better", "worse", "still not right") for example in _sorted(kinds[kind])[:2]]
    return {kind: len(found) for kind, found in kinds.items() if found}, shown[:SHOWN]


def _answers(run: Path, step: int) -> dict[str, HeldOutAnswer]:
    return _readable(lambda: answers_at(run, step), {})


def _kind(a: float, b: float) -> str:
    if a != b:
        return "better" if b > a else "worse"
    return "right as before" if b >= 1 else "still not right"


def _both(a: HeldOutAnswer, b: HeldOutAnswer, first: int, last: int) -> BeforeAfter:
    texts = [str(each.rollouts[0].text) if each.rollouts else "" for each in (a, b)]
    return BeforeAfter(
        _question(a.prompt),
        str(a.prompt.reference),
        f"step {first}",
        texts[0],
        a.value,
        f"step {last}",
        texts[1],
        b.value,
    )


def _sorted(found: Sequence[BeforeAfter]) -> list[BeforeAfter]:
    return sorted(found, key=lambda each: each.question)


def _question(prompt: Prompt) -> str:
    return prompt.messages[-1].content


def _visited_again(run: Path) -> list[BeforeAfter]:
    """Training prompts that were asked several times: the first and the last time."""
    found: list[BeforeAfter] = []
    for row in prompt_history.history(run).rows:
        if len(row.visits) < 2 or len(found) == SHOWN:
            break
        first, last = (samples.group(run, row.visits[i].group) for i in (0, -1))
        if first.samples and last.samples:
            a, b = first.samples[0], last.samples[0]
            times = [f"step {view.step}" for view in (first, last)]
            found.append(
                BeforeAfter(
                    first.messages[-1].text, first.reference, times[0], a.text, a.value, times[1], b.text, b.value
                )
            )
    return found


def _first(run: Path, order: str) -> list[Shown]:
    """One of each prompt, of those that were judged."""
    page = queries.rollouts(run, queries.RolloutFilter(verdict="scored", order=order), limit=40 * SHOWN)
    by_prompt = {row.group: row for row in reversed(page.rows)}
    rows = [row for row in page.rows if by_prompt[row.group] is row][:SHOWN]
    found = []
    for row in rows:
        view = samples.group(run, row.group)
        sample = next(s for s in view.samples if s.sample == row.sample)
        where = f"step {row.step} · {row.prompt_id}" if row.step is not None else f"pending · {row.prompt_id}"
        found.append(Shown(_last_said(view), view.reference, where, sample))
    return found


def _last_said(view: GroupView) -> str:
    return view.messages[-1].text if view.messages else ""


def _some_groups(run: Path) -> list[GroupView]:
    """Of the beginning, the middle and the end, those whose answers differ most, cut to a few answers each."""
    with queries.reading(run) as db:
        found = db.execute(
            "SELECT r.group_id, max(r.value) - min(r.value) FROM rollouts r JOIN fates f USING (group_id) "
            "WHERE r.value IS NOT NULL AND f.fate != 'skipped' GROUP BY r.group_id ORDER BY r.group_id"
        ).fetchall()
    size = -(-len(found) // _GROUPS)
    parts = [found[i : i + size] for i in range(0, len(found), size)] if found else []
    chosen = [max(part, key=lambda row: row[1])[0] for part in parts]
    return [_cut(samples.group(run, group)) for group in chosen]


def _cut(view: GroupView) -> GroupView:
    """The best, the worst, and some between them."""
    ordered = sorted(view.samples, key=lambda s: -1e9 if s.value is None else s.value, reverse=True)
    every = max(1, (len(ordered) - 1) // (_OF_GROUP - 1)) if len(ordered) > _OF_GROUP else 1
    shown = ordered[: every * (_OF_GROUP - 1) : every] + ordered[-1:] if len(ordered) > _OF_GROUP else ordered
    return replace(view, samples=shown)
