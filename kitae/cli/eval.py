"""`kitae eval` and `kitae suites`."""

import json
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kitae.cli.text import table
from kitae.config.locate import find_recipe, find_run
from kitae.config.recipe import load_config, override_config
from kitae.config.root import RLConfig, reinforcement
from kitae.errors import ConfigError, Interrupted, StoreError
from kitae.observe.plain_output import terminal_of, visible

if TYPE_CHECKING:
    from kitae.evaluation.measure import Evaluation, Marks
    from kitae.evaluation.run_suites import Comparison, Entrant, EvaluationReport, EvaluationWatcher
    from kitae.evaluation.statistics import Interval
    from kitae.evaluation.suites import Suite

_OVERRIDE = re.compile(r"[\w.]*=")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command line says: `Wanted(["quickstart", "runs/quickstart-001"], ["eval.prompts=32"], …)`."""

    targets: Sequence[str]
    overrides: Sequence[str]
    model: str | None = None
    suites: str | None = None
    data: str | None = None


def evaluate(
    targets: Annotated[
        list[str],
        typer.Argument(
            help="Run folders (their trained models), recipes (their untrained models), or models: folders, hub ids, "
            "short names; and settings: eval.prompts=32 …",
            metavar="TARGET… [SECTION.KEY=VALUE]…",
        ),
    ],
    suites: Annotated[
        str | None,
        typer.Option(help="What to ask, separated by commas (kitae suites); default: the task of the run or recipe."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder with the data of suites, DIR/gsm8k/test.jsonl …; default: the hub.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Another model: a folder, a run, a hub id or a short name.")] = None,
    output: Annotated[Path, typer.Option(help="Folder that keeps the answers: what it has is not asked again.")] = Path(
        "evaluations"
    ),
    markdown: Annotated[Path | None, typer.Option(help="Write the table into this file, as Markdown.")] = None,
    answers: Annotated[Path | None, typer.Option(help="Write all answers with their verdicts, as JSONL.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The numbers as one line of JSON, and nothing else.")] = False,
) -> None:
    """Measure models on held-out prompts and suites; compare them.

    Prints avg@k, pass@k and maj@k with intervals; for k = 8: eval.samples=8 eval.temperature=1. Several models are
    asked the same problems, and compared with the first.
    """
    overrides = [a for a in targets if _OVERRIDE.match(a) and not Path(a).exists()]
    targets = [a for a in targets if a not in overrides]
    if not targets:
        raise ConfigError("an evaluation needs at least one target: a run, a recipe or a model, got none")
    wanted = Wanted(targets, overrides, model, suites, str(data) if data else None)
    for path in (markdown, answers):
        if path is not None and not path.parent.is_dir():
            raise StoreError(f"cannot write {path}: there is no folder {path.parent}")
    configs = [_config(wanted, target) for target in wanted.targets]
    base = _base(wanted, configs)
    asked = _suites(wanted, base, own=any(configs))
    entrants = [_entrant(wanted, target, config, base) for target, config in zip(targets, configs, strict=True)]
    from kitae.evaluation.run_suites import EvaluationSettings, evaluate_models

    settings = EvaluationSettings(base.eval, base.engine, base.run.seed)
    with _watching() as watcher:
        try:
            report = evaluate_models(entrants, asked, settings, output, watcher)
        except KeyboardInterrupt:
            raise Interrupted("interrupted; the same command goes on from here", signal.SIGINT) from None
    if markdown is not None:
        _write(markdown, as_markdown(report))
    if answers is not None:
        _write(answers, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in _answers(report)))
    if as_json:
        print(json.dumps(report.as_json()))
    else:
        _print(report)


def suites() -> None:
    """List the suites that models can be evaluated on."""
    from kitae.data.tasks import TASKS
    from kitae.evaluation.suites import KNOWN, PUZZLES

    def ways(name: str) -> str:
        return ", ".join(scoring.label for scoring in KNOWN[name].scorings)

    rows = [["suite", "scores", "max tokens", "hub", "or DIR/…", ""]]
    for name, known in KNOWN.items():
        rows.append([name, ways(name), str(known.max_tokens), known.hub, f"{name}/{known.files[0]}", known.summary])
    print(table(rows, left=len(rows[0])))
    print(f"\npuzzles      {' and '.join(PUZZLES)}")
    print(f"generated    {', '.join(TASKS)}")
    print("gym:NAME     a data set of reasoning-gym (pip install reasoning-gym)")
    print("own          the task of the run or recipe itself")
    print("FILE.toml    the held-out prompts of a recipe; FILE.jsonl, .json, .parquet: your own questions")
    print("\nkitae eval MODEL --suites gsm8k,svamp --data DIR     without --data, data comes from the hub")


def _config(wanted: Wanted, target: str) -> RLConfig | None:
    """The settings of a run or recipe; None: the target is a model."""
    from kitae.evaluation.targets import is_model
    from kitae.models.load import trained_settings
    from kitae.store.run_folder import is_run, read_config

    if len(wanted.targets) > 1 and (wanted.model or any(o.startswith("model.path") for o in wanted.overrides)):
        raise ConfigError(f"--model and model.path replace the model of one target, got {len(wanted.targets)} targets")
    folder = find_run(Path(target))
    other = [f"model.path={wanted.model}"] if wanted.model else []
    if is_run(folder):
        config = read_config(folder)
        if not isinstance(config, RLConfig):  # it learnt from examples, so it has no task
            return None
        own = [f"model.{key}={value}" for key, value in trained_settings(folder).items()]
        trained = own if wanted.model is None else other
        return override_config(config, [*trained, *wanted.overrides])
    if is_model(target):
        return None
    return reinforcement(load_config(find_recipe(target), [*other, *wanted.overrides]), "kitae eval")


def _base(wanted: Wanted, configs: Sequence[RLConfig | None]) -> RLConfig:
    """The settings that all models are asked with: those of the first run or recipe, or else the usual ones."""
    first = next((config for config in configs if config is not None), None)
    if first is None:
        from kitae.evaluation.targets import suite_names, without_recipe

        model, names = wanted.model or wanted.targets[0], suite_names(wanted.suites)
        first = without_recipe(model, names, wanted.data, wanted.overrides, how="--suites")
    if first.eval.prompts == 0:
        raise ConfigError("eval.prompts must be at least 1 for an evaluation, got 0")
    if any(configs):
        from kitae.run.plan import check_settings

        check_settings(first)
    return first


def _suites(wanted: Wanted, base: RLConfig, *, own: bool) -> "list[Suite]":
    """With their numbers of problems: as set, and else all of those that are named here."""
    from kitae.evaluation.suites import OWN
    from kitae.evaluation.targets import asked_suites, suite_names

    names = suite_names(wanted.suites) or [OWN, *base.eval.suites]
    limited = wanted.suites is None or any(o.startswith("eval.prompts=") for o in wanted.overrides)
    return asked_suites(names, wanted.data, base, own=own, limited=limited)


def _entrant(wanted: Wanted, target: str, config: RLConfig | None, base: RLConfig) -> "Entrant":
    from kitae.evaluation.run_suites import Entrant
    from kitae.store.run_folder import is_run

    folder = find_run(Path(target))
    if config is None:
        path = wanted.model or target
        return Entrant(path, base.model.at(path))
    return Entrant(folder.resolve().name if is_run(folder) and not wanted.model else config.model.path, config.model)


@contextmanager
def _watching() -> "Iterator[EvaluationWatcher]":
    """Shows on the error output how far it is: in place on a terminal, else a line for each suite."""
    from rich.console import Console

    from kitae.evaluation.run_suites import EvaluationWatcher

    console = Console(file=terminal_of(sys.stderr))
    with console.status("preparing") as status:

        class OnScreen(EvaluationWatcher):
            def __init__(self) -> None:
                self._done: dict[str, str] = {}

            def note(self, text: str) -> None:
                console.print(visible(text), markup=False, highlight=False)

            def asked(self, model: str, suite: str, done: int, total: int) -> None:
                self._done[suite] = f"{suite} {done}/{total}"
                status.update(f"asking {model}: {', '.join(self._done.values())}")

            def evaluated(self, model: str, suite: str, found: "Evaluation") -> None:
                self._done.clear()
                if not sys.stderr.isatty():
                    self.note(f"{model} on {suite}: {found.avg} on {found.judged} of {found.prompts} problems")

        yield OnScreen()


def _print(report: "EvaluationReport") -> None:
    lines = results(report)
    print(table(lines, left=left_columns(lines[0])))
    print()
    print("\n".join(notes(report)))


def _answers(report: "EvaluationReport") -> Iterator[dict[str, Any]]:
    for (model, suite), found in report.evaluations.items():
        for group in found.groups:
            for rollout in group.rollouts:
                score = rollout.score
                yield {
                    "model": model,
                    "suite": suite,
                    "problem": group.prompt.id,
                    "sample": rollout.index,
                    "question": group.prompt.messages[-1].content,
                    "reference": group.prompt.reference,
                    "answer": str(rollout.text),
                    "finish": rollout.finish,
                    "tokens": rollout.response_length,
                    "score": score.value if score and score.valid else None,
                    "components": dict(score.components) if score else {},
                    "detail": score.detail if score else "",
                }


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error}") from error


_NONE = "–"
_LEFT = ("suite", "score", "model")


def results(report: "EvaluationReport") -> list[list[str]]:
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
                lines.append([*line, *(_cells_of_answers(found) if number == 0 else ["", "", ""])])
    return _without_empty(lines)


def notes(report: "EvaluationReport") -> list[str]:
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


def as_markdown(report: "EvaluationReport") -> str:
    """The table with its notes below, in Markdown."""
    titles, *lines = results(report)
    rule = ["---" if title in _LEFT else "---:" for title in titles]
    table = "\n".join(f"| {' | '.join(_escaped(cell) for cell in line)} |" for line in (titles, rule, *lines))
    return f"{table}\n\n" + "\n".join(f"- {note}" for note in notes(report)) + "\n"


def _numbers(found: "Evaluation", marks: "Marks", k: int) -> list[str]:
    problems = str(found.prompts) if found.judged == found.prompts else f"{found.judged} of {found.prompts}"
    further = [_interval(marks.passed.get(k)), _interval(marks.voted.get(k))] if k > 1 else []
    return [problems, _interval(marks.avg), *further]


def _cells_of_answers(found: "Evaluation") -> list[str]:
    return [f"{found.length:.1f}", f"{found.truncated:.1%}", str(found.errors) if found.errors else _NONE]


def _difference(comparison: "Comparison | None") -> list[str]:
    if comparison is None:
        return ["", ""]
    d = comparison.difference
    if d.interval.mean != d.interval.mean:
        return [_NONE, _NONE]
    i = d.interval
    return [f"{i.mean:+.3f} [{i.low:+.3f}, {i.high:+.3f}]", "<0.001" if d.p < 0.001 else f"{d.p:.3f}"]


def _interval(estimate: "Interval | None") -> str:
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
