"""Does running ahead cost learning? The quickstart task at several bounds of staleness, with and without corrections.

    python benchmarks/staleness_study.py [--seeds 3] [--steps 20] [--bounds 0,1,4] [--folder runs/staleness]

Each run is `kitae train quickstart pipeline.max_staleness=… run.seed=…`; runs that are finished already are not
repeated. Without corrections is `algorithm.correction=none`. Prints a table and writes docs/staleness_study.png: reward
by step, mean over seeds, with the range of the seeds shaded. About two minutes a run on two cores; nothing here is a
measurement of speed.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from algorithm_study import ROOT, run, steps_of

Runs = list[list[dict[str, Any]]]  # by seed, the rows of metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--bounds", default="0,1,4")
    parser.add_argument("--folder", type=Path, default=Path("runs/staleness"))
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "staleness_study.png")
    parser.add_argument("settings", nargs="*", help="further settings for every run: training.lr=5e-5")
    arguments = parser.parse_args()
    variants = {}
    for bound in map(int, arguments.bounds.split(",")):
        variants[f"k={bound}"] = [f"pipeline.max_staleness={bound}"]
        if bound:
            variants[f"k={bound}, uncorrected"] = [f"pipeline.max_staleness={bound}", "algorithm.correction=none"]
    found: dict[str, Runs] = {label: [] for label in variants}
    for seed in range(arguments.seeds):
        for label, settings in variants.items():
            name = label.replace("=", "").replace(", ", "-")
            rows = run(name, [*settings, *arguments.settings], seed, arguments.steps, arguments.folder)
            found[label].append(rows)
    print_table(found)
    plot(found, arguments.picture)


def print_table(found: dict[str, Runs]) -> None:
    print("| bound | held-out before | after | reward, second quarter | last quarter | staleness | largest |")
    print("|---|---|---|---|---|---|---|")
    for label, runs in found.items():
        evals = np.array([[r["avg"] for r in rows if r["kind"] == "eval"] for rows in runs])
        reward = np.array([steps_of(rows, "reward") for rows in runs])
        quarter = reward.shape[1] // 4
        age = np.mean([steps_of(rows, "staleness") for rows in runs])
        oldest = max(max(steps_of(rows, "staleness_max")) for rows in runs)
        cells = (evals[:, 0], evals[:, -1], reward[:, quarter : 2 * quarter].mean(1), reward[:, -quarter:].mean(1))
        shown = " | ".join(f"{c.mean():.3f} ({c.min():.3f}–{c.max():.3f})" for c in cells)
        print(f"| {label} | {shown} | {age:.2f} | {oldest} |")


def plot(found: dict[str, Runs], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.6))
    colours: dict[str, Any] = {}
    for label, runs in found.items():
        values = np.array([steps_of(rows, "reward") for rows in runs])
        steps = np.arange(1, values.shape[1] + 1)
        bound, _, plain = label.partition(", ")
        (line,) = axis.plot(
            steps, values.mean(0), "--" if plain else "-", label=label, linewidth=1.8, color=colours.get(bound)
        )
        colours[bound] = line.get_color()
        axis.fill_between(steps, values.min(0), values.max(0), color=line.get_color(), alpha=0.1, linewidth=0)
    axis.set_xlabel("step")
    axis.set_ylabel("mean reward of the samples")
    axis.set_title("SmolLM2-135M, quickstart task: mean and range over seeds", fontsize=11)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, loc="lower right", frameon=False)
    figure.tight_layout()
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    main()
