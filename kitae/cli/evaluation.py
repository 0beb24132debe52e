"""`kitae eval` and `kitae suites`."""

import json
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitae.cli.text import table
from kitae.config.load import load_config, override_config, parse_config
from kitae.config.locate import find_recipe, find_run, shipped_recipes
from kitae.config.root import RLConfig, reinforcement
from kitae.errors import ConfigError, Interrupted, StoreError

if TYPE_CHECKING:
    from kitae.evaluation.session import Entrant, EvaluationReport, EvaluationWatcher
    from kitae.evaluation.suites import Suite

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_OVERRIDE = re.compile(r"[\w.]*=")
_ASKING = ("eval", "model", "engine", "run")
"""Sections that say how models are asked, whatever they are asked."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command line says: `Wanted(["quickstart", "runs/quickstart-001"], ["eval.prompts=32"], …)`."""

    targets: Sequence[str]
    overrides: Sequence[str]
    model: str | None = None
    suites: str | None = None
    data: str | None = None


def evaluate(
    arguments: Sequence[str],
    model: str | None,
    suites: str | None,
    data: Path | None,
    output: Path,
    markdown: Path | None,
    answers: Path | None,
    as_json: bool,
) -> None:
    overrides = [a for a in arguments if _OVERRIDE.match(a) and not Path(a).exists()]
    targets = [a for a in arguments if a not in overrides]
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
    from kitae.evaluation.session import EvaluationSettings, evaluate_models

    settings = EvaluationSettings(base.eval, base.engine, base.run.seed)
    with _watching() as watcher:
        try:
            report = evaluate_models(entrants, asked, settings, output, watcher)
        except KeyboardInterrupt:
            raise Interrupted("interrupted; the same command goes on from here", signal.SIGINT) from None
    if markdown is not None:
        _write(markdown, _page(report))
    if answers is not None:
        _write(answers, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in _answers(report)))
    if as_json:
        print(json.dumps(report.as_json()))
    else:
        _print(report)


def suites() -> None:
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
    from kitae.models.load import trained_model
    from kitae.store.run import is_run, read_config

    if len(wanted.targets) > 1 and (wanted.model or any(o.startswith("model.path") for o in wanted.overrides)):
        raise ConfigError(f"--model and model.path replace the model of one target, got {len(wanted.targets)} targets")
    folder = find_run(Path(target))
    other = [f"model.path={wanted.model}"] if wanted.model else []
    if is_run(folder):
        config = read_config(folder)
        if not isinstance(config, RLConfig):  # it learnt from examples, so it has no task
            return None
        trained = [f"model.path={trained_model(folder)}", "model.lora_rank=0"] if wanted.model is None else other
        return override_config(config, [*trained, *wanted.overrides])
    if _is_model(target):
        return None
    return reinforcement(load_config(find_recipe(target), [*other, *wanted.overrides]), "kitae eval")


def _is_model(target: str) -> bool:
    from kitae.models.load import SMOLLM2

    path = Path(target).expanduser()
    if target in (SMOLLM2, "tiny") or (path / "config.json").is_file():
        return True
    return bool(_HUB_ID.fullmatch(target)) and path.suffix != ".toml" and not path.parent.exists()


def _base(wanted: Wanted, configs: Sequence[RLConfig | None]) -> RLConfig:
    """The settings that all models are asked with: those of the first run or recipe, or else the usual ones."""
    first = next((config for config in configs if config is not None), None)
    if first is None:
        first = _without_recipe(wanted)
    if first.eval.prompts == 0:
        raise ConfigError("eval.prompts must be at least 1 for an evaluation, got 0")
    if any(configs):
        from kitae.stages.start import check

        check(first)
    return first


def _without_recipe(wanted: Wanted) -> RLConfig:
    """Settings for models alone: the data is that of the first suite, and only how to ask can be set."""
    from kitae.evaluation.suites import find_suites

    names = _names(wanted.suites)
    if not names:
        raise ConfigError(
            f"a model alone has no task: name suites with --suites (kitae suites lists them), got {wanted.targets[0]!r}"
        )
    files = [name for name in names if Path(name).suffix in (".jsonl", ".json", ".parquet")]
    other = [o for o in wanted.overrides if o.partition(".")[0] not in _ASKING]
    if not files and other:
        raise ConfigError(
            f"without a recipe and a file of your own, settings are those of {', '.join(_ASKING)}, got {other[0]!r}"
        )
    if files:
        data: dict[str, Any] = {"path": files[0]}
    else:
        data = find_suites(names[:1], wanted.data, None)[0].data.model_dump(exclude_unset=True)
    values = {"data": data, "model": {"path": wanted.model or wanted.targets[0]}}
    return override_config(reinforcement(parse_config(values), "kitae eval"), wanted.overrides)


def _suites(wanted: Wanted, base: RLConfig, *, own: bool) -> "list[Suite]":
    """With their numbers of problems: as set, and else all of those that are named here."""
    from kitae.evaluation.suites import OWN, find_suites

    names = _names(wanted.suites) or [OWN, *base.eval.suites]
    if OWN in names and not own:
        raise ConfigError(f"suite {OWN!r} is the task of a run or recipe, got models alone")
    found = find_suites(names, wanted.data or base.eval.data, base)
    is_set = wanted.suites is None or any(o.startswith("eval.prompts=") for o in wanted.overrides)
    return [
        replace(suite, count=base.eval.prompts if is_set or name == OWN else None)
        for name, suite in zip(_expanded(names), found, strict=True)
    ]


def _expanded(names: Sequence[str]) -> list[str]:
    from kitae.evaluation.suites import PUZZLES

    return [each for name in names for each in (PUZZLES if name == "puzzles" else (name,))]


def _names(text: str | None) -> list[str]:
    """Separated by commas; the name of a shipped recipe stands for its file, where no suite is called so."""
    from kitae.data.tasks import TASKS
    from kitae.evaluation.suites import KNOWN

    recipes = {path.stem: str(path) for path in shipped_recipes() if path.stem not in KNOWN and path.stem not in TASKS}
    return [recipes.get(name, name) for part in (text or "").split(",") if (name := part.strip())]


def _entrant(wanted: Wanted, target: str, config: RLConfig | None, base: RLConfig) -> "Entrant":
    from kitae.evaluation.session import Entrant
    from kitae.store.run import is_run

    folder = find_run(Path(target))
    if config is None:
        path = wanted.model or target
        return Entrant(path, base.model.model_copy(update={"path": path, "lora_rank": 0}))
    return Entrant(folder.resolve().name if is_run(folder) and not wanted.model else config.model.path, config.model)


@contextmanager
def _watching() -> "Iterator[EvaluationWatcher]":
    """Shows on the error output how far it is: in place on a terminal, else a line for each suite."""
    from rich.console import Console

    from kitae.evaluation.measure import Evaluation
    from kitae.evaluation.session import EvaluationWatcher

    console = Console(stderr=True)
    with console.status("preparing") as status:

        class OnScreen(EvaluationWatcher):
            def __init__(self) -> None:
                self._done: dict[str, str] = {}

            def note(self, text: str) -> None:
                console.print(text, markup=False, highlight=False)

            def asked(self, model: str, suite: str, done: int, total: int) -> None:
                self._done[suite] = f"{suite} {done}/{total}"
                status.update(f"asking {model}: {', '.join(self._done.values())}")

            def evaluated(self, model: str, suite: str, found: Evaluation) -> None:
                self._done.clear()
                if not sys.stderr.isatty():
                    self.note(f"{model} on {suite}: {found.avg} on {found.judged} of {found.prompts} problems")

        yield OnScreen()


def _print(report: "EvaluationReport") -> None:
    from kitae.evaluation.table import left_columns, notes, results

    lines = results(report)
    print(table(lines, left=left_columns(lines[0])))
    print()
    print("\n".join(notes(report)))


def _page(report: "EvaluationReport") -> str:
    from kitae.evaluation.table import as_markdown

    return as_markdown(report)


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
                    "answer": rollout.text,
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
