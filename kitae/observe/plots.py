"""Curves of a run as a PNG."""

from pathlib import Path
from typing import Any

from kitae.errors import StoreError
from kitae.store.run_folder import Metrics

CURVES = {
    "length": "response length (tokens)",
    "entropy": "entropy (nats per token)",
    "signal": "share of groups with signal",
    "grad_norm": "gradient norm",
    "logp_gap": "log-prob gap, engine against trainer",
    "kl_k3": "KL to the reference (nats per token)",
    "teacher_kl": "KL to the teacher (nats per token)",
    "teacher_divergence": "divergence from the teacher (nats per token)",
}


def plot_run(run: Path, output: Path | None = None) -> Path:
    """Plot the reward together with held-out scores, and the other curves of a run, over steps."""
    metrics = Metrics(run / "metrics.jsonl")
    steps, evals = metrics.rows("step"), metrics.rows("eval")
    if not steps:
        what = "" if run.is_dir() else ": there is no such folder"
        raise StoreError(f"{run} has no finished step to draw{what}")
    pyplot = load_pyplot()
    curves = {key: values for key in CURVES if (values := values_of(key, steps))}
    columns = (len(curves) + 2) // 2
    figure, axes = pyplot.subplots(2, columns, figsize=(4.2 * columns, 6), constrained_layout=True, squeeze=False)
    x = [row["step"] for row in steps]
    reward, *others = axes.flat
    draw_main(reward, steps, evals)
    for axis, (key, values) in zip(others, curves.items(), strict=False):
        axis.plot(x, values, ".-")
        axis.set_title(CURVES[key])
        if key == "signal":
            axis.set_ylim(-0.02, 1.02)
    for axis in axes.flat:
        axis.set_visible(axis.has_data())
        axis.set_xlabel("step")
        axis.xaxis.get_major_locator().set_params(integer=True)  # steps are integers
        axis.grid(alpha=0.3)
    figure.suptitle(run.resolve().name)
    return save_figure(figure, output or run / "plot.png")


def draw_main(axis: Any, steps: list[dict[str, Any]], evals: list[dict[str, Any]]) -> None:
    """The reward, or what a stage has in its place, with the scores on what is held out."""
    main = main_metric(steps)
    values = [_number(row[main]) for row in steps]
    axis.plot([row["step"] for row in steps], values, ".-", label=f"training {main}", color="tab:blue")
    _draw_evaluations(axis, evals)
    axis.set_title(main)


def save_figure(figure: Any, target: Path) -> Path:
    try:
        figure.savefig(target, dpi=110)
    except (OSError, ValueError) as error:  # no such folder, or no such format
        raise StoreError(f"cannot write {target}: {error}") from error
    finally:
        load_pyplot().close(figure)
    return target


def _draw_evaluations(axis: Any, rows: list[dict[str, Any]]) -> None:
    """Draw a line for the run's own task, and one for each other suite."""
    judged = [row for row in rows if row["avg"] is not None]  # null means that no answer could be judged
    for name in sorted({row.get("suite", "") for row in judged}):
        found = [row for row in judged if row.get("suite", "") == name]
        at, mean = [row["step"] for row in found], [row["avg"] for row in found]
        error = [[row["avg"] - row["avg_low"] for row in found], [row["avg_high"] - row["avg"] for row in found]]
        look = {"fmt": "s--", "label": name} if name else {"fmt": "o-", "label": "held out", "color": "tab:orange"}
        axis.errorbar(at, mean, error, capsize=3, **look)
    if judged:
        axis.legend(loc="lower right")


def load_pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ImportError("plots need matplotlib: pip install 'kitae[plots]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def main_metric(steps: list[dict[str, Any]]) -> str:
    """The metric that is drawn together with the scores on held-out prompts."""
    return next((name for name in ("reward", "accuracy") if name in steps[0]), "loss")


def values_of(key: str, steps: list[dict[str, Any]]) -> list[float]:
    """The values of a metric for each step, NaN if a step lacks it; empty if all do. "signal": the share of groups
    whose rewards differ."""
    found = [_signal(row) if key == "signal" else row.get(key) for row in steps]
    return [_number(value) for value in found] if any(value is not None for value in found) else []


def _signal(row: dict[str, Any]) -> float | None:
    groups = row.get("groups", 0) + row.get("groups_dropped", 0)
    return row["groups_with_signal"] / groups if groups and "groups_with_signal" in row else None


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
