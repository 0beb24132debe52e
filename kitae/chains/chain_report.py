"""What came of a chain: a table of its stages, and how its models do, as JSON, as Markdown and as a curve."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kitae.chains.chain_file import ChainPlan, ChainStage
from kitae.chains.chain_folder import Evaluations, Stages, is_finished
from kitae.store.disk import write_whole
from kitae.store.run_folder import is_run
from kitae.store.run_summary import look

Status = Literal["finished", "begun", "to come"]


@dataclass(frozen=True, slots=True)
class StageLine:
    """A stage in the report: `StageLine("02-learn", "sft", "finished", round=1, steps=8, measure="loss", …)`.

    before, after: its own measure on what it holds out. score: of its model by the yardstick of the chain, with the
    interval. seconds: of steps, each counted once however often the stage was stopped; for sampling, of the process
    that finished it. tokens: trained and sampled.
    """

    label: str
    kind: str
    status: Status
    round: int
    steps: int | None = None
    measure: str = ""
    before: float | None = None
    after: float | None = None
    rows: int | None = None
    seconds: float | None = None
    tokens: float | None = None
    peak_gb: float | None = None
    score: tuple[float, float, float] | None = None
    output: str = ""


def lines_of(chain: ChainPlan, stages: Stages, evaluations: Evaluations) -> list[StageLine]:
    return [_line(chain, stage, stages, evaluations) for stage in chain.stages]


def write_report(chain: ChainPlan, stages: Stages, evaluations: Evaluations) -> None:
    """report.json and report.md in the folder of the chain."""
    lines = lines_of(chain, stages, evaluations)
    start = evaluations.get(0)
    values = {
        "name": chain.name,
        "model": chain.first_model,
        "start": start,
        "stages": [{key: getattr(line, key) for key in line.__slots__} for line in lines],
        "final_model": final_model(chain, lines),
    }
    write_whole(chain.folder / "report.json", json.dumps(values, indent=1))
    write_whole(chain.folder / "report.md", as_markdown(chain, lines, start))


def final_model(chain: ChainPlan, lines: Sequence[StageLine]) -> str | None:
    """The last one that was trained."""
    both = zip(chain.stages, lines, strict=True)
    trained = [line.output for stage, line in both if line.status == "finished" and stage.trains]
    return trained[-1] if trained else None


HEADER = ("stage", "kind", "status", "own measure", "rows", "steps", "time", "tokens", "peak GB", "held-out score")


def cells(line: StageLine) -> list[str]:
    own = "–"
    if line.before is not None and line.after is not None:
        own = f"{line.measure} {line.before:.3f} → {line.after:.3f}"
    elif line.kind == "sample" and line.after is not None:
        own = f"mean score {line.after:.3f}"
    return [
        line.label,
        line.kind,
        line.status,
        own,
        _number(line.rows, "{:,}"),
        _number(line.steps, "{:,}"),
        _number(line.seconds, "{:.0f} s"),
        _number(line.tokens, "{:,.0f}"),
        _number(line.peak_gb, "{:.1f}"),
        _interval(line.score),
    ]


def as_markdown(chain: ChainPlan, lines: Sequence[StageLine], start: Mapping[str, Any] | None) -> str:
    rows = [HEADER, ["---"] * len(HEADER), *map(cells, lines)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    parts = [f"# {chain.name}\n", f"Starts from `{chain.first_model}`.", table, ""]
    if start is not None:
        parts.insert(2, f"Held-out score at the start: {_interval(_score(start))} on {start['prompts']:.0f} prompts.\n")
    if (model := final_model(chain, lines)) is not None:
        parts.append(f"The last trained model is `{model}`.\n")
    return "\n".join(parts)


def _line(chain: ChainPlan, stage: ChainStage, stages: Stages, evaluations: Evaluations) -> StageLine:
    entry = stages.get(stage.label)
    status: Status = "finished" if is_finished(stages, stage) else "begun" if entry is not None else "to come"
    found: dict[str, Any] = {"peak_gb": (entry or {}).get("peak_gb")}
    if stage.order is not None:
        found |= _of_sampling(entry or {}, str(chain.file(stage)))
    elif is_run(chain.run_folder(stage)):
        found |= _of_run(chain, stage)
    if (row := evaluations.get(stage.number)) is not None:
        found["score"] = _score(row)
    return StageLine(stage.label, stage.kind, status, stage.round, **found)


def _of_sampling(entry: Mapping[str, Any], file: str) -> dict[str, Any]:
    tally = entry.get("sampled", {})
    score, rows, tokens = (tally.get(key) for key in ("score", "rows", "tokens"))
    return {"after": score, "rows": rows, "tokens": tokens, "seconds": entry.get("seconds"), "output": file}


def _of_run(chain: ChainPlan, stage: ChainStage) -> dict[str, Any]:
    run = look(chain.run_folder(stage))
    by_step = {row["step"]: row["avg"] for row in run.evaluations}
    tokens = [row.get(key) or 0 for row in run.steps for key in ("train_tokens", "generated_tokens")]
    return {
        "steps": run.step,
        "measure": run.config.measure,
        "before": by_step.get(0),
        "after": by_step.get(run.step) if run.step else None,
        "seconds": sum(row["step_seconds"] for row in run.steps),
        "tokens": sum(tokens),
        "output": str(run.folder / "model"),
    }


def _score(row: Mapping[str, Any]) -> tuple[float, float, float] | None:
    """None: no answer could be judged."""
    return None if row["avg"] is None else (row["avg"], row["avg_low"], row["avg_high"])


def _interval(score: tuple[float, float, float] | None) -> str:
    return "–" if score is None else f"{score[0]:.3f} [{score[1]:.3f}, {score[2]:.3f}]"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def draw_curve(chain: ChainPlan, evaluations: Evaluations) -> None:
    """curve.png: the score of each model, where there are several, and matplotlib is there."""
    from kitae.observe.plots import load_pyplot

    scores = {after: score for after, row in sorted(evaluations.items()) if (score := _score(row)) is not None}
    if len(scores) < 2:
        return
    try:
        pyplot = load_pyplot()
    except ImportError:
        return
    names = {0: "start", **{stage.number: stage.label for stage in chain.stages}}
    mean = [m for m, _, _ in scores.values()]
    error = [[m - low for m, low, _ in scores.values()], [high - m for m, _, high in scores.values()]]
    figure, axis = pyplot.subplots(figsize=(6, 4), constrained_layout=True)
    axis.errorbar(range(len(scores)), mean, error, fmt="o-", capsize=3)
    axis.set_xticks(range(len(scores)), [names[after] for after in scores], rotation=20)
    axis.set_title(f"{chain.name}: held-out score")
    axis.grid(alpha=0.3)
    figure.savefig(chain.folder / "curve.png", dpi=110)
    pyplot.close(figure)
