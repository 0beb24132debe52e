"""Curves of runs with tools and games: rewards, calls and held-out scores by step.

    python benchmarks/agent_curves.py runs/calculator-001 runs/calculator-002 runs/guess-001 …

Writes docs/agent_curves.csv, a line for each step of each run, and draws it as docs/agent_curves.png: a panel for each
recipe, a colour for each seed. Without runs, it draws the file that is there.
"""

import argparse
import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kitae.observe.plots import load_pyplot
from kitae.store.run_folder import Metrics

DOCS = Path(__file__).parent.parent / "docs"
COLUMNS = ("recipe", "seed", "step", "reward", "calls", "held_out")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--table", type=Path, default=DOCS / "agent_curves.csv")
    parser.add_argument("--picture", type=Path, default=DOCS / "agent_curves.png")
    arguments = parser.parse_args()
    if arguments.runs:
        write([line for run in arguments.runs for line in lines(run)], arguments.table)
    with arguments.table.open(encoding="utf-8") as file:
        draw(list(csv.DictReader(file)), arguments.picture)


def lines(run: Path) -> Iterator[dict[str, Any]]:
    """A line for each step; step 0 has the held-out score alone."""
    settings = json.loads((run / "config.json").read_text())["run"]
    metrics = Metrics(run / "metrics.jsonl")
    steps = {row["step"]: row for row in metrics.rows("step")}
    scores = {row["step"]: row["avg"] for row in metrics.rows("eval") if "suite" not in row}
    for step in sorted(steps.keys() | scores.keys()):
        row = steps.get(step, {})
        found = (row.get("reward"), row.get("calls"), scores.get(step))
        numbers = ("" if value is None else f"{value:.4g}" for value in found)
        yield dict(zip(COLUMNS, (settings["name"], settings["seed"], step, *numbers), strict=True))


def write(found: list[dict[str, Any]], table: Path) -> None:
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)


def draw(found: list[dict[str, str]], picture: Path) -> None:
    pyplot = load_pyplot()
    recipes = list(dict.fromkeys(line["recipe"] for line in found))
    figure, axes = pyplot.subplots(
        1, len(recipes), figsize=(4.6 * len(recipes), 3.8), constrained_layout=True, squeeze=False
    )
    for axis, recipe in zip(axes.flat, recipes, strict=True):
        of_recipe = [line for line in found if line["recipe"] == recipe]
        for n, seed in enumerate(dict.fromkeys(line["seed"] for line in of_recipe)):
            panel(axis, [line for line in of_recipe if line["seed"] == seed], f"C{n}", seed)
        axis.set_title(recipe)
        axis.set_xlabel("step")
        axis.set_ylim(-0.02, 1.1)
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right", fontsize=8)
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def panel(axis: Any, run: list[dict[str, str]], colour: str, seed: str) -> None:
    """Reward of samples thin, calls of an answer dotted where there are any, held-out scores with marks."""
    axis.plot(*_points(run, "reward"), color=colour, linewidth=0.8, alpha=0.6)
    calls = _points(run, "calls")
    if any(calls[1]):
        axis.plot(*calls, color=colour, linewidth=0.8, linestyle=":", label=f"calls an answer, seed {seed}")
    axis.plot(*_points(run, "held_out"), "o-", color=colour, label=f"held out, seed {seed}")


def _points(run: list[dict[str, str]], column: str) -> tuple[list[int], list[float]]:
    known = [line for line in run if line[column]]
    return [int(line["step"]) for line in known], [float(line[column]) for line in known]


if __name__ == "__main__":
    main()
