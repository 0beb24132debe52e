"""The results of an evaluation as a table, for the screen and in Markdown."""

from collections.abc import Sequence

from kitae.evaluation.measure import Evaluation, Marks
from kitae.evaluation.run_suites import Comparison, EvaluationReport
from kitae.evaluation.statistics import Interval

_NONE = "–"
_LEFT = ("suite", "score", "model")


def results(report: EvaluationReport) -> list[list[str]]:
    """A row of titles, and one row for each suite, scoring and model."""
    k = report.settings.eval.samples
    titles = [*_LEFT, "problems", f"avg@{k}"]
    titles += [f"pass@{k}", f"maj@{k}"] if k > 1 else []
    titles += ["difference", "p"] if report.comparisons else []
    titles += ["length", "cut off", "errors"]
    differences = {(c.suite, c.scoring, c.second): c for c in report.comparisons}
    lines = [titles]
    for suite in report.suites:
        for number, marks in enumerate(report.evaluations[report.models[0], suite].marks):
            for model in report.models:
                found = report.evaluations[model, suite]
                line = [suite, marks.label, model, *_numbers(found, found.marks[number], k)]
                if report.comparisons:
                    line += _difference(differences.get((suite, marks.label, model)))
                lines.append([*line, *(_answers(found) if number == 0 else ["", "", ""])])
    return _without_empty(lines)


def notes(report: EvaluationReport) -> list[str]:
    """Notes that explain the table."""
    e, k = report.settings.eval, report.settings.eval.samples
    how = "greedy" if e.temperature == 0 else f"temperature {e.temperature:g}"
    found = [
        f"{k} sample{'s' if k > 1 else ''} of each problem, {how}, seed {report.settings.seed}; "
        "95 % intervals over problems"
    ]
    if any(m.partial for each in report.evaluations.values() for m in each.marks):
        found.append("some scores are neither 0 nor 1: avg is a mean score, not a share of right answers")
    if k > 1:
        found.append(f"pass@{k}: one of {k} scores 1; maj@{k}: the answer that most of {k} give, ties split evenly")
    if tests := sorted({c.difference.test for c in report.comparisons}):
        found.append(
            f"difference to {report.models[0]} on the same problems; p by {' and '.join(tests)}, "
            "not corrected for their number"
        )
    return found


def as_markdown(report: EvaluationReport) -> str:
    """The table with its notes below, in Markdown."""
    titles, *lines = results(report)
    rule = ["---" if title in _LEFT else "---:" for title in titles]
    table = "\n".join(f"| {' | '.join(_escaped(cell) for cell in line)} |" for line in (titles, rule, *lines))
    return f"{table}\n\n" + "\n".join(f"- {note}" for note in notes(report)) + "\n"


def _numbers(found: Evaluation, marks: Marks, k: int) -> list[str]:
    problems = str(found.prompts) if found.judged == found.prompts else f"{found.judged} of {found.prompts}"
    further = [_interval(marks.passed.get(k)), _interval(marks.voted.get(k))] if k > 1 else []
    return [problems, _interval(marks.avg), *further]


def _answers(found: Evaluation) -> list[str]:
    return [f"{found.length:.1f}", f"{found.truncated:.1%}", str(found.errors) if found.errors else _NONE]


def _difference(comparison: Comparison | None) -> list[str]:
    if comparison is None:
        return ["", ""]
    d = comparison.difference
    if d.interval.mean != d.interval.mean:
        return [_NONE, _NONE]
    i = d.interval
    return [f"{i.mean:+.3f} [{i.low:+.3f}, {i.high:+.3f}]", "<0.001" if d.p < 0.001 else f"{d.p:.3f}"]


def _interval(estimate: Interval | None) -> str:
    return _NONE if estimate is None or estimate.mean != estimate.mean else str(estimate)


def _without_empty(lines: list[list[str]]) -> list[list[str]]:
    """The table without empty columns, such as votes where no answers can be voted on."""
    kept = [i for i in range(len(lines[0])) if any(line[i] not in ("", _NONE) for line in lines[1:])]
    return [[line[i] for i in kept] for line in lines]


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


def left_columns(titles: Sequence[str]) -> int:
    """How many of the first columns are left-aligned."""
    return sum(title in _LEFT for title in titles)
