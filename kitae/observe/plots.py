"""Curves of a run as a PNG."""

from pathlib import Path
from typing import Any

from kitae.errors import StoreError
from kitae.store.run import Metrics


def plot_run(run: Path, output: Path | None = None) -> Path:
    """Reward with held-out accuracy, length, entropy and the engine–trainer gap over steps."""
    metrics = Metrics(run / "metrics.jsonl")
    steps, evals = metrics.rows("step"), metrics.rows("eval")
    if not steps:
        raise StoreError(f"{run} has no finished step to draw")
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6), constrained_layout=True)
    x = [row["step"] for row in steps]
    reward, length, entropy, gap = axes.flat
    reward.plot(x, [_number(row["reward"]) for row in steps], ".-", label="training reward", color="tab:blue")
    evals = [row for row in evals if row["avg"] is not None]  # null: no answer could be judged
    if evals:
        at = [row["step"] for row in evals]
        mean = [row["avg"] for row in evals]
        error = [[row["avg"] - row["avg_low"] for row in evals], [row["avg_high"] - row["avg"] for row in evals]]
        reward.errorbar(at, mean, error, fmt="o-", label="held out", color="tab:orange", capsize=3)
        reward.legend(loc="lower right")
    reward.set_title("reward")
    _line(length, x, steps, "length", "response length (tokens)")
    _line(entropy, x, steps, "entropy", "entropy (nats per token)")
    _line(gap, x, steps, "logp_gap", "log-prob gap, engine against trainer")
    for axis in axes.flat:
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    figure.suptitle(run.name)
    target = output or run / "plot.png"
    try:
        figure.savefig(target, dpi=110)
    except (OSError, ValueError) as error:  # no such folder, or no such format
        raise StoreError(f"cannot write {target}: {error}") from error
    finally:
        pyplot.close(figure)
    return target


def load_pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ImportError("plots need matplotlib: pip install 'kitae[plots]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _line(axis: Any, x: list[int], rows: list[dict[str, Any]], key: str, title: str) -> None:
    axis.plot(x, [_number(row.get(key)) for row in rows], ".-")
    axis.set_title(title)


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
