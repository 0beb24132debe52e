"""Methods side by side on the quickstart task: SmolLM2-135M, the same settings, several seeds each.

    python benchmarks/algorithm_study.py [--presets grpo,raft++] [--seeds 3] [--steps 20] [--folder runs/study]

Each run is `kitae train quickstart algorithm.preset=… run.seed=…`; runs that are finished already are not repeated.
Prints a table and writes docs/algorithm_study.png: reward, entropy and trained samples by step, mean over seeds, with
the range of the seeds shaded. Entropy is the mean of −log μ over all sampled tokens, from the journal: the metric
`entropy` is that of the tokens trained on, which methods choose differently. About two minutes a run on two cores;
nothing here is a measurement of speed.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from findings import sampled_entropy

ROOT = Path(__file__).parent.parent
DEFAULT = "grpo,reinforce++,raft++,reinforce-rej,reinforce,reinforce-drop-wrong,reinforce-drop-correct"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default=DEFAULT)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("runs/study"))
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "algorithm_study.png")
    arguments = parser.parse_args()
    presets = arguments.presets.split(",")
    found: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in presets}
    for seed in range(arguments.seeds):
        for name in presets:
            settings = [f"algorithm.preset={name}"]
            found[name].append(run(name, settings, seed, arguments.steps, arguments.folder))
    print_table(found)
    plot(found, arguments.picture)


def run(label: str, choices: list[str], seed: int, steps: int, folder: Path) -> list[dict[str, Any]]:
    """The metrics of one run of the quickstart with these settings."""
    name = f"{label.replace('+', 'p')}-{seed}"
    if not (finished := _finished(folder, name, steps)):
        settings = [
            *choices, f"run.seed={seed}", f"training.steps={steps}", f"run.name={name}",
            f"run.dir={folder}", "checkpoint.every=1000",
        ]  # fmt: skip
        print(f"training {label}, seed {seed}", file=sys.stderr)
        program = [sys.executable, "-c", "from kitae.cli.main import run; run()", "train", "quickstart"]
        subprocess.run([*program, *settings], check=True, stdout=subprocess.DEVNULL)
        finished = _finished(folder, name, steps)
    return finished


def _finished(folder: Path, name: str, steps: int) -> list[dict[str, Any]]:
    """The metrics of the newest complete run of that name; none: empty."""
    for path in sorted(folder.glob(f"{name}-[0-9][0-9][0-9]/metrics.jsonl"), reverse=True):
        rows = _rows(path)
        if rows and (rows[-1]["kind"], rows[-1]["step"]) == ("eval", steps):
            return _with_entropy(rows, path.parent)
    return []


def _with_entropy(rows: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    sampled = sampled_entropy(folder)
    return [{**r, "sampled_entropy": sampled[r["step"]]} if r["kind"] == "step" else r for r in rows]


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_of(rows: list[dict[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows if row["kind"] == "step"]


def print_table(found: dict[str, list[list[dict[str, Any]]]]) -> None:
    columns = ("method", "before", "after", "reward, steps 6–10", "last 5", "entropy, step 5", "step 10", "last 5",
               "samples trained")  # fmt: skip
    print("| " + " | ".join(columns) + " |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, runs in found.items():
        evals = np.array([[r["avg"] for r in rows if r["kind"] == "eval"] for rows in runs])
        reward = np.array([steps_of(rows, "reward") for rows in runs])
        entropy = np.array([steps_of(rows, "sampled_entropy") for rows in runs])
        trained = np.array([steps_of(rows, "samples_trained") for rows in runs])
        cells = [
            _range(evals[:, 0]), _range(evals[:, -1]), _range(reward[:, 5:10].mean(1)), _range(reward[:, -5:].mean(1)),
            _range(entropy[:, 4]), _range(entropy[:, 9]), _range(entropy[:, -5:].mean(1)),
            f"{trained.sum(1).mean():.0f}",
        ]  # fmt: skip
        print(f"| {name} | {' | '.join(cells)} |")


def _range(values: Any) -> str:
    """Mean over seeds, with the smallest and the largest."""
    return f"{np.mean(values):.3f} ({np.min(values):.3f}–{np.max(values):.3f})"


def plot(found: dict[str, list[list[dict[str, Any]]]], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = (("reward", "mean reward of the samples"), ("sampled_entropy", "entropy of all sampled tokens (nats)"),
              ("samples_trained", "samples trained, of 64"))  # fmt: skip
    figure, axes = plt.subplots(1, len(panels), figsize=(15, 4.6))
    for axis, (key, label) in zip(axes, panels, strict=True):
        for name, runs in found.items():
            values = np.array([steps_of(rows, key) for rows in runs])
            steps = np.arange(1, values.shape[1] + 1)
            (line,) = axis.plot(steps, values.mean(0), label=name, linewidth=1.8)
            axis.fill_between(steps, values.min(0), values.max(0), color=line.get_color(), alpha=0.12, linewidth=0)
        axis.set_xlabel("step")
        axis.set_title(label, fontsize=11)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=8, loc="lower right", frameon=False)
    figure.suptitle("SmolLM2-135M, quickstart task: mean and range over seeds", fontsize=12)
    figure.tight_layout()
    figure.savefig(picture, dpi=130)
    print(f"wrote {picture}", file=sys.stderr)


if __name__ == "__main__":
    main()
