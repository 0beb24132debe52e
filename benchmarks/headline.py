"""Curves of a few long runs: held-out accuracy by wall time and by step, reward, entropy, length and the gap between
engine and trainer.

    python benchmarks/headline.py "Kitae=runs/gsm8k-001" "Kitae=runs/gsm8k-002" "TRL=trl" …

Runs with the same label are seeds of one setting: their mean is drawn, and their range around it. A folder with
`steps.jsonl` was written by `peers/trl_gsm8k.py`; its `scores.json` comes from `headline_scores.py`, which was given
the untrained model and the folder's weights. Wall time is that of steps: in a run, evaluations and checkpoints that
training waits for are part of it; in a peer, they are not. Of a chain, its last run is drawn, from the time on that the
stages before it took, with loading.

Writes docs/gsm8k.csv, a line for every five steps of each run (every step of a peer), and draws it as docs/gsm8k.png.
What the file has under other labels stays. Without runs, it draws the file that is there.
"""

import argparse
import csv
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kitae.observe.plots import load_pyplot
from kitae.store.run_folder import Metrics

DOCS = Path(__file__).parent.parent / "docs"
NUMBERS = ("held_out", "reward", "entropy", "length", "logp_gap")
PANELS = (  # what is drawn, against what
    ("held_out", "seconds", "held-out accuracy (greedy)"),
    ("held_out", "step", "held-out accuracy (greedy)"),
    ("reward", "step", "reward of samples"),
    ("entropy", "step", "entropy (nats a token)"),
    ("length", "step", "length (tokens)"),
    ("logp_gap", "step", "log-prob gap of engine and trainer"),
)
AXES = {"seconds": "wall time of steps (s)", "step": "step"}
BLOCK = 5  # steps that a line is the mean of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", help="label=folder")
    parser.add_argument("--table", type=Path, default=DOCS / "gsm8k.csv")
    parser.add_argument("--picture", type=Path, default=DOCS / "gsm8k.png")
    arguments = parser.parse_args()
    if arguments.runs:
        found = list(collect(arguments.runs))
        given = {line["run"] for line in found}
        known = read(arguments.table) if arguments.table.is_file() else []
        write([line for line in known if line["run"] not in given] + found, arguments.table)
    draw(read(arguments.table), arguments.picture)


def collect(runs: list[str]) -> Iterator[dict[str, Any]]:
    """The lines of all runs; those of one label are numbered from 0."""
    known: Counter[str] = Counter()
    for text in runs:
        label, _, folder = text.rpartition("=")
        path = Path(folder)
        for line in lines_of(path):
            yield {"run": label, "number": known[label], **line}
        known[label] += 1


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    if (path / "steps.jsonl").is_file():
        return peer_lines(path)
    if not (path / "chain.json").is_file():
        return run_lines(path)
    *before, last = json.loads((path / "chain.json").read_text("utf-8"))["stages"].items()
    return run_lines(path / f"{last[0]}-001", sum(found["seconds"] for _, found in before))


def run_lines(run: Path, began: float = 0.0) -> Iterator[dict[str, Any]]:
    metrics = Metrics(run / "metrics.jsonl")
    scores = {row["step"]: row["avg"] for row in metrics.rows("eval") if "suite" not in row}
    steps = metrics.rows("step")
    yield {"step": 0, "seconds": f"{began:.0f}", "held_out": f"{scores[0]:.4f}"}
    for i in range(0, len(steps), BLOCK):
        block = steps[i : i + BLOCK]
        step, numbers = block[-1]["step"], [key for key in NUMBERS if key != "held_out"]
        means = {key: f"{np.mean([row[key] for row in block if key in row]):.4g}" for key in numbers}
        seconds = began + sum(row["step_seconds"] for row in steps[: i + BLOCK])
        held_out = f"{scores[step]:.4f}" if step in scores else ""
        yield {"step": step, "seconds": f"{seconds:.0f}", **means, "held_out": held_out}


def peer_lines(folder: Path) -> Iterator[dict[str, Any]]:
    results = json.loads((folder / "scores.json").read_text("utf-8"))["results"]
    scores = {saved_step(row["model"]): f"{row['avg']:.4f}" for row in results}
    yield {"step": 0, "seconds": 0, "held_out": scores[0]}
    for text in (folder / "steps.jsonl").read_text("utf-8").splitlines():
        row = json.loads(text)
        line = {"step": row["step"], "seconds": f"{row['seconds']:.0f}", "held_out": scores.get(row["step"], "")}
        yield line | {key: f"{row[key]:.4g}" for key in ("reward", "length")}


def saved_step(model: str) -> int:
    """`trl/step-000016` → 16; a model that is no such folder is the untrained one, 0."""
    name, _, number = Path(model).name.partition("-")
    return int(number) if name == "step" else 0


def read(table: Path) -> list[dict[str, str]]:
    with table.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(found: list[dict[str, Any]], table: Path) -> None:
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ("run", "number", "step", "seconds", *NUMBERS), lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)


def draw(found: list[dict[str, str]], picture: Path) -> None:
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(2, 3, figsize=(13, 7), constrained_layout=True)
    for axis, (key, against, title) in zip(axes.flat, PANELS, strict=True):
        for index, label in enumerate(dict.fromkeys(line["run"] for line in found)):
            known = [line for line in found if line["run"] == label and line[key]]
            if not known:  # a peer does not tell everything
                continue
            x = curve(known, against).mean(axis=1)
            y = curve(known, key)
            axis.plot(x, y.mean(axis=1), label=label, color=f"C{index}")
            axis.fill_between(x, y.min(axis=1), y.max(axis=1), color=f"C{index}", alpha=0.2, linewidth=0)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(AXES[against])
        axis.grid(alpha=0.3)
    axes.flat[1].legend(fontsize=7, frameon=False, loc="lower right")
    figure.savefig(picture, dpi=100)
    pyplot.close(figure)


def curve(lines: list[dict[str, str]], key: str) -> NDArray[np.float64]:
    """Steps × seeds: the values at those steps that every seed has."""
    seeds = len({line["number"] for line in lines})
    at: dict[int, list[float]] = {}
    for line in lines:
        at.setdefault(int(line["step"]), []).append(float(line[key]))
    return np.array([at[step] for step in sorted(at) if len(at[step]) == seeds])


if __name__ == "__main__":
    main()
