"""Curves of a few long runs: held-out accuracy, reward, entropy, length and the gap between engine and trainer.

    python benchmarks/headline.py "on-policy, lr 2e-6=runs/gsm8k-001" "lr 4e-6=runs/gsm8k-002" …

Writes docs/gsm8k.csv, a line for every five steps of each run, and draws it as docs/gsm8k.png. Without runs, it draws
the file that is there.
"""

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kitae.observe.plots import load_pyplot
from kitae.store.run import Metrics

DOCS = Path(__file__).parent.parent / "docs"
PANELS = {
    "held_out": "held-out accuracy (greedy)",
    "reward": "reward of samples",
    "entropy": "entropy (nats a token)",
    "length": "length (tokens)",
    "logp_gap": "log-prob gap of engine and trainer",
}
BLOCK = 5  # steps that a line is the mean of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", help="label=folder")
    parser.add_argument("--table", type=Path, default=DOCS / "gsm8k.csv")
    parser.add_argument("--picture", type=Path, default=DOCS / "gsm8k.png")
    arguments = parser.parse_args()
    if arguments.runs:
        pairs = [text.rpartition("=")[::2] for text in arguments.runs]
        write([line for label, folder in pairs for line in lines(label, Path(folder))], arguments.table)
    with arguments.table.open(encoding="utf-8") as file:
        draw(list(csv.DictReader(file)), arguments.picture)


def lines(label: str, run: Path) -> Iterator[dict[str, Any]]:
    metrics = Metrics(run / "metrics.jsonl")
    scores = {row["step"]: row["avg"] for row in metrics.rows("eval") if "suite" not in row}
    steps = metrics.rows("step")
    yield {"run": label, "step": 0, "held_out": f"{scores[0]:.4f}"}
    for i in range(0, len(steps), BLOCK):
        block = steps[i : i + BLOCK]
        step, numbers = block[-1]["step"], [key for key in PANELS if key != "held_out"]
        means = {key: f"{np.mean([row[key] for row in block if key in row]):.4g}" for key in numbers}
        seconds = sum(row["step_seconds"] for row in steps[: i + BLOCK])
        held_out = f"{scores[step]:.4f}" if step in scores else ""
        yield {"run": label, "step": step, "seconds": f"{seconds:.0f}", **means, "held_out": held_out}


def write(found: list[dict[str, Any]], table: Path) -> None:
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ("run", "step", "seconds", *PANELS), lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)


def draw(found: list[dict[str, str]], picture: Path) -> None:
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(4.2 * len(PANELS), 3.6), constrained_layout=True)
    for axis, (key, title) in zip(axes, PANELS.items(), strict=True):
        for label in dict.fromkeys(line["run"] for line in found):
            known = [line for line in found if line["run"] == label and line[key]]
            axis.plot([int(line["step"]) for line in known], [float(line[key]) for line in known], label=label)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8, frameon=False)
    figure.savefig(picture, dpi=100)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
