"""A run as one HTML file: the built page of `kitae ui` with its answers inside the file instead of behind a server.

    make_report(Path("runs/quickstart-001"), Path("report.html"))

The only script that the Content-Security-Policy of the file allows is the page's own, by its hash, and the policy
allows no request. Commands and addresses of hooks and logins in addresses are left out. Texts and lists are cut, so
that the file stays below `MOST_BYTES` whatever a run holds.
"""

import base64
import hashlib
import html
import re
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from kitae.errors import KitaeError, StoreError
from kitae.evaluation.held_out import HeldOutAnswer, PairedRuns, answers_at, pair_ends
from kitae.observe import timeline
from kitae.observe.machine import machine_of
from kitae.store.disk import write_whole
from kitae.store.run_summary import RunView, look
from kitae.ui import overview, prompt_history, queries, samples, schedule
from kitae.ui.records import (
    AnswerPair,
    GroupView,
    ReportCard,
    RunDetail,
    RunReport,
    SampleView,
    Series,
    Setting,
    as_json,
)
from kitae.ui.tables import Tables

MOST_BYTES = 2_000_000
KEY = "run"  # how the addresses inside the file name its one run
_STATIC = Path(__file__).parent / "static"
_LONG_TEXT = 1500  # characters
_LONG_VALUE = 400  # characters of a setting or of a reason
_MOST_STEPS = 200  # points of a curve
_MOST_COLUMNS = 200
_MOST_EVALUATIONS = 100
_MOST_EVENTS = 60
_MOST_SPANS = 1500
_MOST_PARTS = 8  # of a score
_SHOWN = 5  # examples of each kind
_GROUPS = 3
_OF_GROUP = 4  # answers of a group
_PRIVATE = re.compile(r"observe\.on_\w+")  # commands and addresses, with whatever key is in them
_LOGIN = re.compile(r"(?<=://)[^/\s@]+@")

T = TypeVar("T")


def make_report(run: Path, target: Path) -> Path:
    answers = report_answers(run)
    if not target.parent.is_dir():
        raise StoreError(f"cannot write {target}: there is no folder {target.parent}")
    name = answers[f"/api/runs/{KEY}"].summary.name
    text = _page(f"{name} · Kitae", as_json(_shortened(answers)))
    assert len(text.encode()) < MOST_BYTES, f"{len(text.encode())} bytes: something in it is not cut"
    write_whole(target, text)
    return target


def _page(title: str, answers: str) -> str:
    """The built page with its script, its style and the answers in it. The answers are a block of data, which no
    browser runs; `<` is written as an escape there, so that no text can end the block."""
    built = (_STATIC / "index.html").read_text("utf-8")
    script, style = (_asset(built, kind) for kind in ("js", "css"))
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "connect-src 'none'; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    data = answers.replace("<", "\\u003c")
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        '<meta name="referrer" content="no-referrer">',
        f"<title>{html.escape(title)}</title>",
        f"<style>{style}</style>",
    ]
    body = [
        '<div id="app"></div>',
        "<noscript>This page needs JavaScript.</noscript>",
        f'<script type="application/json" id="kitae-answers">{data}</script>',
        f'<script type="module">{script}</script>',
    ]
    lines = ["<!doctype html>", '<html lang="en"><head>', *head, "</head><body>", *body, "</body></html>", ""]
    return "\n".join(lines)


def _asset(built: str, kind: str) -> str:
    """The text of the one script or style sheet that the built page names."""
    (name,) = re.findall(rf'"/assets/([^"]+\.{kind})"', built)
    return (_STATIC / "assets" / str(name)).read_text("utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _shortened(value: Any) -> Any:
    """The same records as plain values, with every long text cut."""
    if isinstance(value, str):
        return _short(value, _LONG_TEXT)
    if isinstance(value, Mapping):
        return {key: _shortened(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_shortened(each) for each in value]
    if is_dataclass(value):
        return {field.name: _shortened(getattr(value, field.name)) for field in fields(value)}
    return value


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit:,} more characters)"


# What the file holds.


def report_answers(run: Path) -> dict[str, Any]:
    """By address, the answers that the page asks for."""
    view = _look(run)
    tables = Tables()
    detail = _detail(overview.detail(KEY, run, tables))
    series, every, evaluations = _thinned(tables.series(run, detail.metrics))
    lanes = schedule.schedule(run)
    shown = replace(lanes, spans=lanes.spans[:_MOST_SPANS], left_out=lanes.left_out + len(lanes.spans[_MOST_SPANS:]))
    one = f"/api/runs/{KEY}"
    return {
        one: detail,
        f"{one}/series": series,
        f"{one}/timeline": shown,
        f"{one}/diagnosis": overview.diagnosis(run),
        f"{one}/report": _report(view, detail, every, evaluations),
    }


def _look(run: Path) -> RunView:
    if (run / "chain.json").is_file():
        stages = sorted(path.name for path in run.iterdir() if (path / "config.json").is_file())
        raise StoreError(f"{run} is a chain; a report is of one run of it: {', '.join(stages) or 'there is none yet'}")
    return look(run)


def _detail(found: RunDetail) -> RunDetail:
    return replace(
        found,
        summary=replace(found.summary, name=Path(found.summary.folder).resolve().name, eta=None),
        metrics=found.metrics[:_MOST_COLUMNS],
        evaluations=found.evaluations[:_MOST_COLUMNS],
        settings=[replace(setting, value=_told(setting)) for setting in found.settings],
        events=[replace(event, detail=_short(event.detail, _LONG_VALUE)) for event in found.events[-_MOST_EVENTS:]],
    )


def _told(setting: Setting) -> Any:
    """The value of a setting without the keys and logins that it may hold."""
    if setting.value in (None, "", [], {}):
        return setting.value
    if _PRIVATE.fullmatch(setting.key):
        return "(set; not told here)"
    if isinstance(setting.value, bool | int | float):
        return setting.value
    return _short(_LOGIN.sub("…@", str(setting.value)), _LONG_VALUE)


def _thinned(found: Series) -> tuple[Series, int, int]:
    """The columns at no more than `_MOST_STEPS` steps, the last one among them; of how many steps one is left; and how
    many evaluations there were, of which the first and the last ones are left."""
    every = max(1, -(-len(found.steps) // _MOST_STEPS))
    steps = list(range(len(found.steps)))[::-1][::every][::-1]
    count = len(found.evaluation_steps)
    judged = list(range(count))
    kept = judged if count <= _MOST_EVALUATIONS else [0, *judged[1 - _MOST_EVALUATIONS :]]

    def columns(of: Mapping[str, list[float | None]], rows: Sequence[int]) -> dict[str, list[float | None]]:
        return {name: [_rounded(of[name][i]) for i in rows] for name in list(of)[:_MOST_COLUMNS]}

    series = Series(
        [found.steps[i] for i in steps],
        columns(found.columns, steps),
        [found.evaluation_steps[i] for i in kept],
        columns(found.evaluations, kept),
    )
    return series, every, count


def _rounded(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else float(f"{value:.6g}")


def _report(view: RunView, detail: RunDetail, every: int, evaluations: int) -> RunReport:
    run, steps = view.folder, view.steps
    spans = [row for row in timeline.read(run) if row.get("part") in timeline.PARTS]
    moved, before_after = _held_out(view)
    metric = detail.summary.metric
    values = [row[metric] for row in steps if metric and row.get(metric) is not None]
    unpaired = PairedRuns(None, None, None, "the evaluations cannot be read")
    return RunReport(
        made=f"Made by kitae report on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.",
        measure=_readable(lambda: view.config.measure, "score"),  # settings of another version have none
        first=values[0] if values else None,
        last=values[-1] if values else None,
        machine=_machine(run),
        seconds=max((r["end"] for r in spans), default=sum(r.get("step_seconds") or 0.0 for r in steps)),
        paired=overview.paired_record(KEY, _readable(lambda: pair_ends(view), unpaired)),
        moved=moved,
        before_after=before_after or _readable(lambda: _visited_again(run), []),
        best=_readable(lambda: _ranked(run, "best"), []),
        worst=_readable(lambda: _ranked(run, "worst"), []),
        groups=_readable(lambda: _some_groups(run), []),
        phases={name: total for name in detail.phases if (total := sum(row.get(name) or 0.0 for row in steps)) > 0},
        busy=timeline.busy_shares(spans),
        every=every,
        evaluations=evaluations,
    )


def _machine(run: Path) -> list[str]:
    machine = machine_of(run)
    if machine is None:
        return ["The machine of this run is not on record."]
    versions = " · ".join(f"{name} {version}" for name, version in machine.versions.items())
    return [machine.hardware, machine.system, versions]


def _readable(read: Callable[[], T], otherwise: T) -> T:
    """A damaged journal leaves a report without what is in it."""
    try:
        return read()
    except (KitaeError, sqlite3.Error):
        return otherwise


# Answers.


def _held_out(view: RunView) -> tuple[dict[str, int], list[AnswerPair]]:
    """How many held-out prompts became better, worse, …, and examples of those that changed or are still not right."""
    if len(view.evaluations) < 2:
        return {}, []
    first, last = (int(view.evaluations[i]["step"]) for i in (0, -1))
    before, after = (_answers(view.folder, step) for step in (first, last))
    kinds: dict[str, list[AnswerPair]] = {"worse": [], "better": [], "still not right": [], "right as before": []}
    for key in before.keys() & after.keys():
        a, b = before[key], after[key]
        if a.value is not None and b.value is not None:
            kinds[_kind(a.value, b.value)].append(_both(a, b, first, last))
    shown = [example for kind in ("better", "worse", "still not right") for example in _by_question(kinds[kind])[:2]]
    return {kind: len(found) for kind, found in kinds.items() if found}, shown[:_SHOWN]


def _answers(run: Path, step: int) -> dict[str, HeldOutAnswer]:
    return _readable(lambda: answers_at(run, step), {})


def _kind(a: float, b: float) -> str:
    if a != b:
        return "better" if b > a else "worse"
    return "right as before" if b >= 1 else "still not right"


def _both(a: HeldOutAnswer, b: HeldOutAnswer, first: int, last: int) -> AnswerPair:
    x, y = (str(each.rollouts[0].text) if each.rollouts else "" for each in (a, b))
    question, reference = a.prompt.messages[-1].content, str(a.prompt.reference)
    return AnswerPair(question, reference, f"step {first}", x, a.value, f"step {last}", y, b.value)


def _by_question(found: Sequence[AnswerPair]) -> list[AnswerPair]:
    return sorted(found, key=lambda each: each.question)


def _visited_again(run: Path) -> list[AnswerPair]:
    """Training prompts that were asked several times: the first and the last time."""
    found: list[AnswerPair] = []
    for row in prompt_history.history(run).rows:
        if len(row.visits) < 2 or len(found) == _SHOWN:
            break
        first, last = (samples.group(run, row.visits[i].group) for i in (0, -1))
        if first.samples and last.samples:
            a, b = first.samples[0], last.samples[0]
            x, y = f"step {first.step}", f"step {last.step}"
            found.append(AnswerPair(_question(first), first.reference, x, a.text, a.value, y, b.text, b.value))
    return found


def _ranked(run: Path, order: str) -> list[ReportCard]:
    """The best or the worst answers that were judged, no more than one of each group."""
    page = queries.rollouts(run, queries.RolloutFilter(verdict="scored", order=order), limit=40 * _SHOWN)
    first = {row.group: row for row in reversed(page.rows)}
    found = []
    for row in [row for row in page.rows if first[row.group] is row][:_SHOWN]:
        view = samples.group(run, row.group)
        sample = next(s for s in view.samples if s.sample == row.sample)
        title = f"step {row.step} · {row.prompt_id}" if row.step is not None else f"pending · {row.prompt_id}"
        found.append(ReportCard(title, _question(view), view.reference, [_cut_sample(sample)]))
    return found


def _question(view: GroupView) -> str:
    return view.messages[-1].text if view.messages else ""


def _some_groups(run: Path) -> list[ReportCard]:
    """Of the beginning, the middle and the end of the run, the group whose answers differ most."""
    with queries.reading(run) as db:
        found = db.execute(
            "SELECT r.group_id, max(r.value) - min(r.value) FROM rollouts r JOIN fates f USING (group_id) "
            "WHERE r.value IS NOT NULL AND f.fate != 'skipped' GROUP BY r.group_id ORDER BY r.group_id"
        ).fetchall()
    size = -(-len(found) // _GROUPS)
    parts = [found[i : i + size] for i in range(0, len(found), size)] if found else []
    chosen = [max(part, key=lambda row: row[1])[0] for part in parts]
    return [_group_card(samples.group(run, group)) for group in chosen]


def _group_card(view: GroupView) -> ReportCard:
    """The best answer of a group, the worst, and some between them."""
    ordered = sorted(view.samples, key=lambda s: -1e9 if s.value is None else s.value, reverse=True)
    every = max(1, (len(ordered) - 1) // (_OF_GROUP - 1)) if len(ordered) > _OF_GROUP else 1
    shown = ordered[: every * (_OF_GROUP - 1) : every] + ordered[-1:] if len(ordered) > _OF_GROUP else ordered
    title = f"step {view.step} · {view.prompt_id} · {view.fate}{f': {view.reason}' if view.reason else ''}"
    return ReportCard(title, _question(view), view.reference, [_cut_sample(sample) for sample in shown])


def _cut_sample(sample: SampleView) -> SampleView:
    """An answer of several turns as one text; lists that may be long are left out."""
    turns = [f"{turn.role}: {turn.text}{' '.join(turn.calls)}" for turn in sample.transcript]
    return replace(
        sample,
        text="\n".join(turns) if sample.turns > 1 else sample.text,
        detail=_short(sample.detail, _LONG_VALUE),
        components=dict(list(sample.components.items())[:_MOST_PARTS]),
        transcript=[],
        versions=[],
        rewards=[],
    )
