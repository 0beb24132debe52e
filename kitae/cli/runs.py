"""Runs seen from outside: `kitae runs`, `compare`, `clean`, `scale`, `diagnose`, `replay`, `report` and `plot`."""

import json
import shutil
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from kitae.cli.arguments import Run, Runs
from kitae.cli.text import as_size, as_time, table
from kitae.config.root import RLConfig, StageConfig
from kitae.errors import ConfigError, KitaeError, StoreError
from kitae.observe import diagnosis
from kitae.store.run_summary import RunView, ask_for, find_runs, look, size_of

_AFTER = "held out after"
_LAST = 5  # steps whose mean is the reward at the end


def runs(
    folder: Annotated[Path, typer.Argument(help="The folder that holds them.", metavar="[DIR]")] = Path("runs"),
) -> None:
    """List runs with their status, results and size."""
    found = find_runs(folder)
    if not found:
        print(f"no runs in {folder}; start one with: kitae train quickstart")
        return
    print(table([["run", "status", "step", "reward", "held out", "age", "size"], *map(_row, found)], left=2))


def scale(run: Run, engines: Annotated[int, typer.Argument(help="How many it shall have.")]) -> None:
    """Change the number of engines of a run.

    They must be in processes that Kitae starts: engine.kind is not native, and there is no engine.urls.
    """
    view = look(run)
    config = view.config
    if not isinstance(config, RLConfig):
        raise ConfigError(f"kitae scale needs a run that samples, got {config.method.kind!r}")
    if config.engine.kind == "native" or config.engine.urls:
        got = "engine.urls" if config.engine.urls else "engine.kind = 'native'"
        raise ConfigError(f"kitae scale needs engines in processes that Kitae starts, {run.name} has {got}")
    if view.is_finished:
        raise StoreError(f"kitae scale needs a run that goes on, {run.name} is finished")
    ask_for(run, engines)
    when = "now" if view.status == "running" else f"when it goes on: kitae resume {run}"
    print(f"{run.name} shall have {engines} engines, {when}")


def compare(folders: Runs) -> None:
    """Compare settings and results of runs."""
    if len(folders) < 2:
        raise StoreError(f"kitae compare takes two runs or more, got {len(folders)}")
    found = [look(folder) for folder in folders]
    settings = [run.config.flat() for run in found]
    keys = dict.fromkeys(key for s in settings for key in s)  # kinds of run have different ones
    names = [key for key in keys if any(s.get(key) != settings[0].get(key) for s in settings)]
    rows = [["", *(run.folder.name for run in found)]]
    rows += [[key, *(_setting(s.get(key)) for s in settings)] for key in names if key not in ("run.name", "run.dir")]
    if len(rows) == 1:
        rows.append(["settings", *("the same" for _ in found)])
    paired, reasons = _paired(found)
    for title, cell in _RESULTS.items():
        rows.append([title, *map(cell, found)])
        if title == _AFTER:
            rows += _suites(found) + paired
    print(table(rows))
    for reason in reasons:
        print(reason)


def _paired(found: Sequence[RunView]) -> tuple[list[list[str]], list[str]]:
    """Against the first run, on the held-out prompts of both: the rows of it, and why there is no difference."""
    from kitae.evaluation.held_out import pair

    first, *others = found
    pairs = [pair(first.folder, other.folder) for other in others]
    reasons = [f"not paired with {first.folder.name}: {p.reason}" for p in pairs if p.difference is None]
    if len(reasons) == len(pairs):
        return [], reasons
    rows = [[f"paired with {first.folder.name}", "–"], ["  p", "–"], ["  prompts of both", "–"]]
    for p in pairs:
        cells = ["–"] * len(rows)
        if p.difference is not None:
            i = p.difference.interval
            chance = "<0.001" if p.difference.p < 0.001 else f"{p.difference.p:.3f}"
            cells = [f"{i.mean:+.3f} [{i.low:+.3f}, {i.high:+.3f}]", chance, str(p.difference.problems)]
        rows = [[*row, cell] for row, cell in zip(rows, cells, strict=True)]
    return rows, reasons


def _suites(found: Sequence[RunView]) -> list[list[str]]:
    """Before and after, of each other suite that one of the runs was evaluated on."""
    names = dict.fromkeys(name for run in found for name in run.suites)
    return [
        [f"{name} {when}", *(_estimate(run.suites.get(name, []), which) for run in found)]
        for name in names
        for when, which in (("before", 0), ("after", -1))
    ]


def clean(
    folders: Runs,
    weights_only: Annotated[
        bool,
        typer.Option(
            "--weights-only", help="Remove all checkpoints: the trained model stays, but the run cannot be resumed."
        ),
    ] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="Also remove the records of single tokens.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove; without it, only say what would go.")] = False,
) -> None:
    """Free disk that runs take.

    Removes all checkpoints but the last, and what writes that were cut off have left behind.
    """
    found = [look(folder) for folder in folders]
    plans = [(run, _superfluous(run, weights_only, tokens)) for run in found]  # all are looked at before one is touched
    freed = 0
    for run, paths in plans:
        sizes = {path: size_of(path) for path in paths}
        freed += sum(sizes.values())
        what = f"{as_size(sum(sizes.values()))} of {as_size(run.size)} can go" if paths else "nothing to remove"
        print(f"{run.folder}: {what}")
        for path, size in sizes.items():
            print(f"  {path.relative_to(run.folder)}  {as_size(size)}")
        if paths:
            print(f"  {_consequence(run, weights_only, paths)}")
        if yes:
            _remove(run, paths, weights_only)
    if yes:
        print(f"{as_size(freed)} freed")
    elif freed:
        option = (" --weights-only" if weights_only else "") + (" --tokens" if tokens else "")
        print(f"nothing was removed yet; do it with: kitae clean {' '.join(map(str, folders))}{option} --yes")


def _row(run: RunView) -> list[str]:
    name, size = run.folder.name, as_size(run.size)
    age = as_time(max(0.0, time.time() - run.changed))
    try:
        reward = "–" if not run.steps or run.steps[-1].get("reward") is None else f"{run.steps[-1]['reward']:.3f}"
        return [name, run.status, f"{run.step}/{run.config.training.steps}", reward, _held_out(run), age, size]
    except KitaeError:  # settings of another version, say: the others are listed all the same
        return [name, "unreadable", "–", "–", "–", age, size]


def _held_out(run: RunView) -> str:
    averages = [f"{row['avg']:.3f}" for row in run.evaluations]
    return " → ".join(averages if len(averages) < 2 else (averages[0], averages[-1])) or "–"


def _setting(value: Any) -> str:
    return "–" if value is None else str(value)


def _evaluation(which: int) -> Callable[[RunView], str]:
    return lambda run: _estimate(run.evaluations, which)


def _estimate(rows: Sequence[dict[str, Any]], which: int) -> str:
    """Of the first evaluation, or of the last if it is another."""
    if len(rows) < (1 if which == 0 else 2):
        return "–"
    row = rows[which]
    return f"{row['avg']:.3f} [{row['avg_low']:.3f}, {row['avg_high']:.3f}]"


def _usual(key: str, form: str) -> Callable[[RunView], str]:
    def cell(run: RunView) -> str:
        values = [row[key] for row in run.steps if row.get(key)]
        return form.format(median(values)) if values else "–"

    return cell


def _last_reward(run: RunView) -> str:
    values = [row["reward"] for row in run.steps[-_LAST:] if row.get("reward") is not None]
    return f"{sum(values) / len(values):.3f}" if values else "–"


_RESULTS: dict[str, Callable[[RunView], str]] = {
    "status": lambda run: run.status,
    "steps": lambda run: f"{run.step}/{run.config.training.steps}",
    f"reward, last {_LAST} steps": _last_reward,
    "held out before": _evaluation(0),
    _AFTER: _evaluation(-1),
    "length": _usual("length", "{:.1f}"),
    "s/step": _usual("step_seconds", "{:.1f}"),
    "gen tok/s": _usual("generate_tokens_per_second", "{:,.0f}"),
    "train tok/s": _usual("train_tokens_per_second", "{:,.0f}"),
    "size": lambda run: as_size(run.size),
}


def _superfluous(run: RunView, weights_only: bool, tokens: bool) -> list[Path]:
    if run.status == "running":
        raise StoreError(f"{run.folder} is running; wait for it or stop it first")
    if weights_only and not (run.status == "finished" and run.has_model):
        raise StoreError(
            f"{run.folder} is {run.status}, so its checkpoints are all there is of what it learnt; finish it with: "
            f"kitae resume {run.folder}"
        )
    names = run.checkpoints if weights_only else run.checkpoints[:-1]
    records = [run.folder / "tokens"] if tokens and (run.folder / "tokens").is_dir() else []
    leftovers = [path for path in run.leftovers() if path.parent not in records]
    return [*(run.folder / "checkpoints" / name for name in names), *leftovers, *records]


def _consequence(run: RunView, weights_only: bool, paths: Sequence[Path]) -> str:
    if paths == [run.folder / "tokens"]:
        return "then nobody can look at single tokens of past steps; nothing else goes"
    if weights_only:
        return f"then it can be evaluated and started from (model.path={run.folder}), but not resumed"
    if not run.checkpoints:
        return "what a killed process had begun to write; nothing else goes"
    last = f"then it goes on from {run.checkpoints[-1]} only"
    return last if isinstance(run.config, StageConfig) else f"{last}; a replay of earlier steps begins at the first one"


def _remove(run: RunView, paths: Sequence[Path], weights_only: bool) -> None:
    """Older checkpoints go only if the last one is sound."""
    from kitae.store.checkpoints import Checkpoints
    from kitae.store.run_folder import lock

    with lock(run.folder):
        if not weights_only and run.checkpoints:
            Checkpoints(run.folder / "checkpoints", keep=1).load()
        for path in paths:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


_WIDTH = 100
_MARGIN = 9


def diagnose(
    run: Run,
    as_json: Annotated[bool, typer.Option("--json", help="The findings as JSON, and nothing else.")] = False,
) -> None:
    """Say what is wrong with a run, and what to change.

    Of a run that is going on, finished, stopped or crashed; docs/diagnosis.md has the rules.
    """
    found = diagnosis.diagnose(run)
    if as_json:
        print(json.dumps([asdict(finding) for finding in found], indent=2, ensure_ascii=False))
        return
    print(f"{run}: {_standing(look(run))}")
    if not found:
        print(f"nothing is wrong, by {len(diagnosis.RULES)} rules (docs/diagnosis.md)")
    for finding in found:
        print(f"\n{finding.severity:<{_MARGIN}}{finding.title} ({finding.rule})")
        for text in (finding.evidence, f"→ {finding.advice}"):
            lines = textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)  # paths are copied
            print(textwrap.indent("\n".join(lines), " " * _MARGIN))


def _standing(view: RunView) -> str:
    try:
        return f"{view.status}, step {view.step} of {view.config.training.steps}"
    except KitaeError:  # settings of another version
        return f"{view.status}, step {view.step}"


def replay(
    run: Run,
    step: Annotated[int | None, typer.Option(min=1, help="The step to compute again; default: the last.")] = None,
) -> None:
    """Compute a past step again and compare.

    From the journal and the checkpoint before it; the exit status is 0 if all numbers are the same, else 1.
    """
    from kitae.store.run_summary import look

    wanted = look(run).step if step is None else step
    if wanted == 0:
        raise StoreError(f"{run} has no finished step to replay")
    from kitae.run.recompute_step import replay as compute

    found = compute(run, wanted, print)
    rows = [["", "logged", "again", "difference"]]
    rows += [[n, f"{then:.8g}", f"{now:.8g}", f"{abs(then - now):.3g}"] for n, (then, now) in found.numbers.items()]
    print(table(rows))
    same = found.difference == 0
    print(f"{'same' if same else 'differs'}: step {wanted}, from the checkpoint of step {found.checkpoint}, "
          f"largest difference {found.difference:.3g}")  # fmt: skip
    if not same:
        raise SystemExit(1)


def report(
    run: Run,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The HTML file to write; default: RUN/report.html.")
    ] = None,
) -> None:
    """Write a run into one HTML file, to send to somebody.

    Results, curves, answers, settings, diagnosis; of running and crashed runs too. It needs no network and no scripts.
    """
    from kitae.ui.report_file import make_report

    made = make_report(run, output or run / "report.html")
    print(f"{made}  ({as_size(made.stat().st_size)}; opens in any browser, without a network)")


def plot(
    run: Run,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The PNG to write; default: RUN/plot.png.")
    ] = None,
) -> None:
    """Draw the curves of a run as a PNG."""
    from kitae.observe.plots import plot_run

    try:
        print(plot_run(run, output))
    except ImportError as error:
        raise ConfigError(str(error)) from None
