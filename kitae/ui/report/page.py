"""The page of a report: its parts, one after the other, and the file.

    make_report(Path("runs/quickstart-001"), Path("report.html"))

The page has no script, and its Content-Security-Policy allows none, nor anything from elsewhere. Texts and lists are
cut, so that a file stays below `MOST_BYTES` whatever a run holds.
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kitae.errors import StoreError
from kitae.store.disk import write_whole
from kitae.ui.records import GroupView, LaneView, SampleView, Setting
from kitae.ui.report import curves
from kitae.ui.report.markup import Markup, element, joined
from kitae.ui.report.number_text import chance, duration, fixed, interval, number
from kitae.ui.report.report_data import BeforeAfter, Shown, Told, tell

MOST_BYTES = 2_000_000
_LONG_TEXT = 1500  # characters of an answer
_LONG_VALUE = 400  # of a setting, or of what happened
_MOST_ROWS = 100  # evaluations
_MOST_EVENTS = 60
_MOST_SPANS = 1500
_PRIVATE = re.compile(r"observe\.on_\w+")  # commands and addresses, with whatever key is in them
_LOGIN = re.compile(r"(?<=://)[^/\s@]+@")
_STYLE = Path(__file__).parent / "style.css"


def make_report(run: Path, target: Path) -> Path:
    told = tell(run)
    if not target.parent.is_dir():
        raise StoreError(f"cannot write {target}: there is no folder {target.parent}")
    text = page(told)
    assert len(text.encode()) < MOST_BYTES, f"{len(text.encode())} bytes: something in it is not cut"
    write_whole(target, text)
    return target


def page(told: Told) -> str:
    style = _STYLE.read_text("utf-8")
    allowed = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{allowed}'; base-uri 'none'; form-action 'none'"
    head = element(
        "head",
        Markup('<meta charset="utf-8">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup('<meta name="color-scheme" content="light dark">'),
        Markup('<meta name="referrer" content="no-referrer">'),
        element("title", f"{told.detail.summary.name} · Kitae"),
        Markup(f"<style>{style}</style>"),
    )
    parts = [_headline(told), *_sections(told), _footer(told)]
    body = element("body", element("main", *parts))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _sections(told: Told) -> Iterable[Markup]:
    yield _section("Diagnosis", _diagnosis(told))
    yield _section("Curves", _curves(told))
    yield _section("Evaluations", _evaluations(told))
    yield _section("Before and after, on the same prompts", _before_after(told))
    yield _section("Best answers", _beside(map(_answer, told.best)))
    yield _section("Worst answers", _beside(map(_answer, told.worst)))
    yield _section("Groups", joined(map(_group, told.groups)))
    yield _section("Where the time went", _time(told))
    yield _section("Settings", _settings(told.detail.settings))
    yield _section("What happened", _events(told))


def _section(title: str, body: Markup) -> Markup:
    """Nothing, where there is nothing to say."""
    return element("section", element("h2", title), body) if body else Markup("")


def _beside(cards: Iterable[Markup]) -> Markup:
    found = joined(cards)
    return element("div", found, class_="beside") if found else found


# The beginning and the end.


def _headline(told: Told) -> Markup:
    s = told.detail.summary
    stats = [
        ("step", f"{s.step:,}{'' if s.steps is None else f' of {s.steps:,}'}", ""),
        *_held_out(told),
        *_first_and_last(told),
        ("time", duration(told.seconds), f"{number(s.step_seconds, 2)} s a step" if s.step_seconds else ""),
        ("tokens per second", number(s.speed and round(s.speed)), ""),
    ]
    machine = told.machine
    facts = [machine.hardware, machine.system] if machine else ["The machine of this run is not on record."]
    facts += [" · ".join(f"{name} {version}" for name, version in machine.versions.items())] if machine else []
    return element(
        "header",
        element("h1", s.name, " ", element("span", s.status, class_=f"status {s.status}")),
        element("p", s.title, class_="muted"),
        element("dl", *(_stat(*stat) for stat in stats), class_="stats"),
        element("p", *(joined([fact, Markup("<br>")]) for fact in facts), class_="muted small"),
    )


def _stat(name: str, value: str, more: str) -> Markup:
    small = element("small", more) if more else None
    return element("div", element("dt", name), element("dd", value, small))


def _held_out(told: Told) -> Iterable[tuple[str, str, str]]:
    before, after = told.detail.summary.before, told.detail.summary.after
    if before is None:
        return
    name = f"held-out {told.measure}"
    last = after or before
    if after is None:
        yield name, fixed(before.mean), "" if before.low is None else f"{fixed(before.low)} – {fixed(before.high)}"
        return
    found = told.paired.difference
    if found is not None:
        i = found.interval
        more = f"{i.mean:+.3f} [{i.low:+.3f}, {i.high:+.3f}], {chance(found.p)}, on the same {found.problems}"
    else:
        more = "" if last.low is None else f"{fixed(last.low)} – {fixed(last.high)} at the end"
    yield name, f"{fixed(before.mean)} → {fixed(after.mean)}", more


def _first_and_last(told: Told) -> Iterable[tuple[str, str, str]]:
    name = told.detail.summary.metric
    found = [row[name] for row in told.steps if name and row.get(name) is not None]
    if found:
        yield name, f"{fixed(found[0])} → {fixed(found[-1])}", "first and last step"


def _footer(told: Told) -> Markup:
    made = datetime.now(UTC)
    text = f"Made by kitae report on {made:%Y-%m-%d %H:%M} UTC of the run {told.detail.summary.name}. "
    return element("footer", text, "This file holds everything it shows and asks for nothing.", class_="muted small")


# Curves and tables.


def _curves(told: Told) -> Markup:
    if not told.steps:
        return element("p", "No step is finished yet.", class_="muted")
    drawn = curves.drawn(told.steps, told.evaluations, told.measure, told.detail.phases)
    hint = "Point at a curve, or tap it, to read the values of a step."
    left_out = f" Every {drawn.every}th step is shown." if drawn.every > 1 else ""
    return joined(
        [
            element("p", hint, left_out, class_="muted small no-print"),
            element("div", *drawn.charts, class_="charts"),
            element("details", element("summary", "The numbers of these curves"), _table(drawn.titles, drawn.rows)),
        ]
    )


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    head = element("tr", *(element("th", title) for title in titles))
    body = (element("tr", *(element("td", cell) for cell in row)) for row in rows)
    return element("div", element("table", element("thead", head), element("tbody", *body)), class_="card scroll")


_EVALUATED = ("prompts", "examples", "samples", "length", "truncated", "errors")


def _evaluations(told: Told) -> Markup:
    rows = told.evaluations
    if not rows:
        return Markup("")
    marks = [key for key in _keys(rows) if f"{key}_low" in _keys(rows) and _says_more(key, rows)]
    others = [key for key in _EVALUATED if any(row.get(key) for row in rows)]
    suites = any("suite" in row for row in rows)
    titles = ["step", *(["suite"] if suites else []), told.measure, *marks, *others]
    shown = rows if len(rows) <= _MOST_ROWS else [*rows[:1], *rows[1 - _MOST_ROWS :]]
    cells = [
        [
            number(row["step"]),
            *([str(row.get("suite", "own task"))] if suites else []),
            *(interval(row.get(key), row.get(f"{key}_low"), row.get(f"{key}_high")) for key in ("avg", *marks)),
            *(number(row.get(key)) for key in others),
        ]
        for row in shown
    ]
    cut = f"The first and the last {_MOST_ROWS - 1} of {len(rows)} evaluations." if len(shown) < len(rows) else ""
    note = element("p", f"Means with 95 % intervals. {cut}", class_="muted small")
    return joined([_table(titles, cells), note])


def _says_more(key: str, rows: Sequence[dict[str, Any]]) -> bool:
    """With one sample of a prompt, pass@1 is the mean score."""
    return any(row.get(key) != row.get("avg") for row in rows)


def _keys(rows: Iterable[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


# Answers.


def _before_after(told: Told) -> Markup:
    if not told.before_after:
        return Markup("")
    counts = ", ".join(f"{count} {kind}" for kind, count in told.moved.items())
    note = (
        f"Held-out prompts, first and last evaluation: {counts}."
        if counts
        else "Training prompts, first and last time."
    )
    return joined([element("p", note, class_="muted small"), *map(_pair, told.before_after)])


def _pair(pair: BeforeAfter) -> Markup:
    def side(at: str, text: str, value: float | None) -> Markup:
        return element("div", element("p", _chip(value), f" {at}", class_="small"), _said(text))

    first = side(pair.first_at, pair.first, pair.first_value)
    last = side(pair.last_at, pair.last, pair.last_value)
    return element(
        "article", _asked(pair.question, pair.reference), element("div", first, last, class_="two"), class_="card"
    )


def _answer(shown: Shown) -> Markup:
    return element(
        "article", _asked(shown.question, shown.reference), _sample(shown.sample, shown.where), class_="card"
    )


def _group(view: GroupView) -> Markup:
    said = view.messages[-1].text if view.messages else ""
    fate = f"{view.fate}{f': {view.reason}' if view.reason else ''}"
    title = f"step {view.step} · {view.prompt_id} · {fate}"
    some = (_sample(sample, f"sample {sample.sample}") for sample in view.samples)
    return element(
        "article", element("p", title, class_="muted small"), _asked(said, view.reference), *some, class_="card"
    )


def _asked(question: str, reference: str) -> Markup:
    wanted = element("p", "reference: ", element("code", _short(reference, _LONG_VALUE)), class_="muted small")
    return joined([element("pre", _short(question, _LONG_TEXT), class_="question"), wanted if reference else None])


def _sample(sample: SampleView, where: str) -> Markup:
    facts = [where, f"{sample.length} tokens", "cut off" if sample.finish == "length" else sample.finish]
    facts += [f"{name} {number(value)}" for name, value in list(sample.components.items())[:8]]
    talk = [f"{t.role}: {t.text}{' '.join(t.calls)}" for t in sample.transcript] if sample.turns > 1 else [sample.text]
    return joined(
        [
            element("p", _chip(sample.value), " ", " · ".join(facts), class_="small facts"),
            _said("\n".join(talk)),
            element("p", _short(sample.detail, _LONG_VALUE), class_="muted small") if sample.detail else None,
        ]
    )


def _said(text: str) -> Markup:
    return element("pre", _short(text, _LONG_TEXT) or "(nothing)", class_="said")


def _chip(value: float | None) -> Markup:
    if value is None:
        return element("span", "not judged", class_="chip warn")
    kind = "good" if value >= 1 else "bad" if value <= 0 else "half"
    return element("span", number(value, 2), class_=f"chip {kind}")


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit:,} more characters)"


# The rest.


def _diagnosis(told: Told) -> Markup:
    found = told.diagnosis
    if not found.findings:
        return element("p", f"Nothing stands out: none of {found.rules} rules has found a problem.", class_="muted")
    return joined(
        element(
            "article",
            element(
                "h3",
                element("span", f.severity, class_=f"chip {'bad' if f.severity == 'bad' else 'warn'}"),
                f" {f.title}",
            ),
            element("p", _short(f.evidence, _LONG_TEXT)),
            element("p", f"→ {f.advice}", class_="advice"),
            class_="card",
        )
        for f in found.findings
    )


def _time(told: Told) -> Markup:
    parts = [_phases(told), _busy(told), _lanes(told.lanes)]
    return joined(parts)


def _phases(told: Told) -> Markup:
    """Seconds of all steps by phase."""
    totals = {name: sum(row.get(name) or 0.0 for row in told.steps) for name in told.detail.phases}
    whole = sum(totals.values())
    if not whole:
        return Markup("")
    rows = [
        [name.removesuffix("_seconds"), duration(seconds), f"{seconds / whole:.1%}"]
        for name, seconds in sorted(totals.items(), key=lambda item: -item[1])
        if seconds / whole >= 0.0005
    ]
    return joined([element("h3", "Phases of a step, all steps together"), _table(["phase", "time", "share"], rows)])


def _busy(told: Told) -> Markup:
    if not told.busy:
        return Markup("")
    rows = [[part, f"{share:.1%}", f"{1 - share:.1%}"] for part, share in told.busy.items()]
    title = element("h3", "Who worked, and who waited")
    return joined([title, _table(["part", "at work", "waiting"], rows)])


_COLOURS = {"generate": 2, "verify": 3, "train": 1, "sync": 6, "save": 4, "evaluate": 5}


def _lanes(view: LaneView) -> Markup:
    if not view.spans:
        return Markup("")
    whole = view.end - view.start or 1.0
    drawn = []
    for part, count in view.lanes.items():
        height = max(2.0, min(14.0, 100 / count))
        found = [span for span in view.spans if span.part == part][:_MOST_SPANS]
        rects = (
            element(
                "rect",
                element("title", f"{part}, step {span.step}: {span.start:.2f} – {span.end:.2f} s"),
                x=1000 * (max(span.start, view.start) - view.start) / whole,
                width=max(1.0, 1000 * (min(span.end, view.end) - max(span.start, view.start)) / whole),
                y=span.lane * height,
                height=height - 1,
                class_=f"f{_COLOURS.get(part, 7)}",
            )
            for span in found
        )
        tall = max(14.0, count * height)
        label = f"{part}: at work {view.busy.get(part, 0.0):.0%} of the time"
        picture = element("svg", *rects, viewBox=f"0 0 1000 {tall:.0f}", preserveAspectRatio="none", role="img",
                          aria_label=label, height=tall)  # fmt: skip
        share = element("b", f"{view.busy[part]:.0%}") if part in view.busy else None
        drawn.append(element("div", element("span", part, " ", share), picture, class_="lane"))
    ends = element("div", element("span"), element("span", f"{view.start:.0f} s", element("span", f"{view.end:.0f} s"),
                   class_="ends"), class_="lane axis")  # fmt: skip
    title = element("h3", f"The last steps, {view.first} to {view.last}")
    return joined([title, element("div", *drawn, ends, class_="card lanes")])


def _settings(settings: Sequence[Setting]) -> Markup:
    if not settings:
        return element("p", "The settings of this run cannot be read.", class_="muted")
    changed = [s for s in settings if s.changed]
    usual = [s for s in settings if not s.changed]
    rest = element("details", element("summary", f"The {len(usual)} others, which are as usual"), _values(usual))
    return joined([_values(changed) if changed else None, rest if usual else None])


def _values(settings: Sequence[Setting]) -> Markup:
    rows = (element("tr", element("td", s.key), element("td", _value(s))) for s in settings)
    return element("div", element("table", element("tbody", *rows)), class_="card scroll settings")


def _value(setting: Setting) -> str:
    if setting.value in (None, ""):
        return "–"
    if _PRIVATE.fullmatch(setting.key):
        return "(set; not told here)"
    return _short(_LOGIN.sub("…@", str(setting.value)), _LONG_VALUE)


def _events(told: Told) -> Markup:
    events = told.detail.events
    if not events:
        return Markup("")
    rows = [
        [f"{datetime.fromtimestamp(e.time, UTC):%Y-%m-%d %H:%M:%S}", e.kind, _short(e.detail, _LONG_VALUE)]
        for e in events[-_MOST_EVENTS:]
    ]
    table = _table(["UTC", "event", ""], rows)
    return element("details", element("summary", f"The last {len(rows)} of {len(events)} events"), table)
