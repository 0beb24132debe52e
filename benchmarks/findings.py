"""Claims of the literature, tried on a task that SmolLM2-135M learns in a minute on a GPU: sort three numbers.

    python benchmarks/findings.py --folder runs/f [--claims a,b] [--seeds 5] [--jobs 12] [--set training.lr=1e-5]
    python benchmarks/findings.py                        draw and tell what docs/findings.csv has

A claim is a few variants of `kitae train sort`, each with the same seeds, so that they see the same prompts. A run that
two claims want is made once. What a run told goes into its folder as `lines.json`, and its weights are removed: a
hundred of them would fill a disk. A run that has told is not repeated, and none whose lines the table has already.
Writes docs/findings.csv, a line for every five steps of each run, and from it a picture docs/findings_a.png and a table
for each claim: mean over seeds, and the difference to the first variant, seed by seed, with its 95 % interval
(Student's t).

Entropy is the mean of −log μ over all sampled tokens, from the journal: the metric `entropy` is that of the tokens that
are trained on, which methods choose differently.
"""

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kitae.models.upcycle import upcycle
from kitae.observe.plots import load_pyplot
from kitae.store.journal import Journal
from kitae.store.run import Metrics

DOCS = Path(__file__).parent.parent / "docs"
BASE = ("pipeline.refill=false", "eval.prompts=256", "eval.every=20", "checkpoint.every=1000", "training.steps=80")
NUMBERS = ("reward", "entropy", "grad_norm", "logp_gap", "kl_k1", "samples_trained", "routing_flips")
BLOCK = 5  # steps that a line of the table is the mean of
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}  # 97.5 % points, by number of seeds


@dataclass(frozen=True, slots=True)
class Claim:
    """Variants of one recipe, the first of which the others are compared with."""

    title: str
    variants: Mapping[str, Sequence[str]]
    common: Sequence[str] = ()


def presets(*names: str) -> dict[str, tuple[str, ...]]:
    return {name: (f"algorithm.preset={name}",) for name in names}


LONG = ("training.steps=160",)
REUSE = ("training.minibatches=4",)
STALE = ("pipeline.max_staleness=4",)
HARDER = ("eval.suites=['{folder}/harder.toml']",)
EIGHT = ("engine.cache_dtype=int8",)
FROZEN = ("algorithm.preset=grpo", "algorithm.reference=frozen", "algorithm.kl_coef=0.05")

CLAIMS = {
    "a": Claim("positives alone: fast early, less entropy, passed later", presets("grpo", "raft++"), LONG),
    "b": Claim(
        "dropping all-wrong groups is what helps, dividing by the deviation is not",
        presets(
            "reinforce", "reinforce-mean-zero", "reinforce-drop-correct", "reinforce-drop-wrong", "reinforce-rej",
            "reinforce-rej-std",
        ),
    ),
    "c": Claim(
        "trained on few prompts, whitening over the batch carries over to harder ones better",
        presets("grpo", "reinforce++", "reinforce++-baseline"),
        ("data.params.low=10", "data.params.high=16", "eval.prompts=20", *HARDER),
    ),
    "k": Claim(
        "k2 and k3 as a KL term",
        {"no KL": ("algorithm.preset=grpo",), **{name: (*FROZEN, f"algorithm.kl={name}") for name in ("k2", "k3")}},
    ),
    "d": Claim(
        "correcting the mismatch of engine and trainer prevents collapse",
        {
            "fp32, no correction": ("model.dtype=float32", "algorithm.preset=grpo", "algorithm.correction=none"),
            "8-bit cache, no correction": (*EIGHT, "algorithm.preset=grpo", "algorithm.correction=none"),
            "8-bit cache, tis": (*EIGHT, "algorithm.preset=grpo"),
            "8-bit cache, sequence mask": (*EIGHT, "algorithm.preset=sequence-mask"),
        },
        (*LONG, "training.lr=3e-5"),
    ),
    "e": Claim(
        "stale negatives break, stale positives do not, asymmetric gates repair",
        {
            "grpo": ("algorithm.preset=grpo",),
            "grpo, no correction": ("algorithm.preset=grpo", "algorithm.correction=none"),
            "raft++ (positives)": ("algorithm.preset=raft++",),
            **presets("stale-asymmetric", "decoupled-ppo"),
            "asymmetric, no floor": ("algorithm.preset=stale-asymmetric", "algorithm.weight_floor=0"),
        },
        STALE,
    ),
    "f": Claim(
        "clip-higher keeps entropy",
        {f"clip {high}": ("algorithm.preset=grpo", f"algorithm.clip_high={high}") for high in (0.2, 0.28, 0.4)},
        REUSE,
    ),
    "g": Claim(
        "bounded staleness costs nothing",
        {f"k = {k}": ("algorithm.preset=grpo", f"pipeline.max_staleness={k}") for k in (0, 1, 2, 4)},
        ("training.lr=1e-5", "training.steps=120"),
    ),
    "h": Claim(
        "ratios of sequences against ratios of tokens",
        presets("grpo", "gspo", "gspo-token", "cispo"),
        (*REUSE, "training.epochs=2"),
    ),
    "n": Claim(
        "less memory: moments of AdamW in 16 bits, keys and values in 8",
        {
            "fp32 moments": ("algorithm.preset=grpo",),
            "bf16 moments": ("algorithm.preset=grpo", "training.moments=bfloat16"),
            "8-bit cache": ("algorithm.preset=grpo", *EIGHT),
        },
    ),
    "m": Claim(
        "mixtures: replay of the routing is needed off-policy, ratios of sequences do without",
        {
            "grpo, no replay": ("algorithm.preset=grpo",),
            "grpo, R2": ("algorithm.preset=grpo", "algorithm.routing=old"),
            "grpo, R3": ("algorithm.preset=grpo", "algorithm.routing=engine"),
            "gspo, no replay": ("algorithm.preset=gspo",),
        },
        (*REUSE, "training.epochs=2", "training.lr=1e-5", "training.steps=60", "model.path={folder}/mixture"),
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="of the runs; without it, none is made or read")
    parser.add_argument("--claims", default=",".join(CLAIMS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--set", nargs="*", default=[], help="settings for all runs")
    parser.add_argument("--table", type=Path, default=DOCS / "findings.csv")
    parser.add_argument("--pictures", type=Path, default=DOCS)
    arguments = parser.parse_args()
    wanted = arguments.claims.split(",")
    if arguments.folder:
        make(wanted, arguments)
        collect(wanted, arguments)
    found = read(arguments.table)
    for letter in wanted:
        if any(key[0] == letter for key in found):
            runs = {label: found[letter, label] for label in CLAIMS[letter].variants if (letter, label) in found}
            tell(letter, runs)
            arguments.pictures.mkdir(parents=True, exist_ok=True)
            draw(letter, runs, arguments.pictures / f"findings_{letter}.png")


# Runs.


def settings_of(claim: Claim, label: str, arguments: argparse.Namespace) -> list[str]:
    """What a variant sets; later ones win."""
    chosen = (*BASE, *claim.common, *claim.variants[label], *arguments.set)
    return [text.format(folder=arguments.folder.absolute()) for text in chosen]


def place(claim: Claim, label: str, seed: int, arguments: argparse.Namespace) -> Path:
    """The folder of a run: claims that want the same run find the same one."""
    last = dict(text.partition("=")[::2] for text in settings_of(claim, label, arguments))
    short = {key.rpartition(".")[2]: value.rpartition("/")[2] for key, value in sorted(last.items()) if key not in DULL}
    name = "_".join(f"{key}={value}" for key, value in short.items())
    return arguments.folder / f"{''.join(c if c.isalnum() or c in '=._-' else '-' for c in name)}_{seed}"


DULL = {text.partition("=")[0] for text in BASE} - {"training.steps"} | {"eval.suites"}


def make(wanted: Iterable[str], arguments: argparse.Namespace) -> None:
    arguments.folder.mkdir(parents=True, exist_ok=True)
    (arguments.folder / "harder.toml").write_text(
        '[model]\npath = "smollm2-135m"\n[data]\ntask = "sort"\nparams = { count = 4 }\n[verifier]\nname = "exact"\n'
        "[sampling]\nmax_tokens = 16\n[eval]\nprompts = 256\n"
    )
    if "m" in wanted and not (arguments.folder / "mixture").exists():
        upcycle("smollm2-135m", arguments.folder / "mixture", experts=4, top_k=2, noise=0.05)
    known = {(line["claim"], line["variant"], int(line["seed"])) for line in read_lines(arguments.table)}
    todo: dict[Path, list[str]] = {}
    for seed in range(arguments.seeds):
        for letter in wanted:
            for label in CLAIMS[letter].variants:
                if (letter, label, seed) not in known:
                    folder = place(CLAIMS[letter], label, seed, arguments)
                    todo[folder] = [*settings_of(CLAIMS[letter], label, arguments), f"run.seed={seed}"]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(lambda item: run(*item), todo.items()))


def run(folder: Path, settings: Sequence[str]) -> None:
    """`run.dir` is the folder: it holds the one run."""
    if (folder / "lines.json").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    program = [sys.executable, "-c", "from kitae.cli.main import run; run()", "train", "sort"]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with (folder / "log").open("w") as log:
        done = subprocess.run(
            [*program, *settings, f"run.dir={folder}", "run.name=run"],
            check=False,
            stdout=log,
            stderr=log,
            env=environment,
        )
    if done.returncode:
        print(f"{folder.name}: failed, see {folder}/log", file=sys.stderr)
        return
    (folder / "lines.json").write_text(json.dumps(blocks(folder / "run-001")))
    for weights in ("model", "checkpoints"):
        shutil.rmtree(folder / "run-001" / weights)
    print(f"{folder.name}: done", file=sys.stderr)


# From runs to a table.


def collect(wanted: Iterable[str], arguments: argparse.Namespace) -> None:
    found: dict[tuple[str, str, int], list[dict[str, Any]]] = defaultdict(list)
    for line in read_lines(arguments.table):
        found[line["claim"], line["variant"], int(line["seed"])].append(line)
    for letter in wanted:
        for label in CLAIMS[letter].variants:
            for seed in range(arguments.seeds):
                told = place(CLAIMS[letter], label, seed, arguments) / "lines.json"
                if told.exists():
                    lines = json.loads(told.read_text())
                    found[letter, label, seed] = [
                        {"claim": letter, "variant": label, "seed": seed, **line} for line in lines
                    ]
    with arguments.table.open("w", encoding="utf-8", newline="") as file:
        columns = ("claim", "variant", "seed", "step", *NUMBERS, "held_out", "harder")
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(line for key in sorted(found) for line in found[key])


def blocks(run: Path) -> list[dict[str, Any]]:
    """A line for every BLOCK steps, with the mean of each number; held-out scores where they were measured."""
    metrics = Metrics(run / "metrics.jsonl")
    sampled = sampled_entropy(run)
    steps = [{**row, "entropy": sampled[row["step"]]} for row in metrics.rows("step") if row["step"] in sampled]
    scores: dict[str, dict[int, float]] = defaultdict(dict)
    for row in metrics.rows("eval"):
        scores["harder" if "suite" in row else "held_out"][row["step"]] = row["avg"]
    first = {"step": 0, **{name: f"{found[0]:.4g}" for name, found in scores.items() if 0 in found}}
    return [first, *(block(steps[i : i + BLOCK], scores) for i in range(0, len(steps), BLOCK))]


def block(steps: Sequence[dict[str, Any]], scores: Mapping[str, Mapping[int, float]]) -> dict[str, Any]:
    line: dict[str, Any] = {"step": steps[-1]["step"]}
    for name in NUMBERS:
        values = [row[name] for row in steps if row.get(name) is not None]
        line[name] = f"{np.mean(values):.4g}" if values else ""
    return line | {name: f"{found[line['step']]:.4g}" for name, found in scores.items() if line["step"] in found}


def sampled_entropy(run: Path) -> dict[int, float]:
    journal = Journal(run / "journal.sqlite", read_only=True)
    surprise: dict[int, list[float]] = defaultdict(list)
    for group, step, _, _ in journal.groups():
        for rollout in journal.rollouts(group):
            surprise[step].extend(-x for s in rollout.segments for x in s.logprobs)
    journal.close()
    return {step: float(np.mean(values)) for step, values in surprise.items() if values}


# From the table to pictures and words.

Runs = dict[int, list[dict[str, str]]]  # by seed, the lines of a run


def read_lines(table: Path) -> list[dict[str, str]]:
    if not table.exists():
        return []
    with table.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read(table: Path) -> dict[tuple[str, str], Runs]:
    found: dict[tuple[str, str], Runs] = defaultdict(lambda: defaultdict(list))
    for line in read_lines(table):
        found[line["claim"], line["variant"]][int(line["seed"])].append(line)
    return found


def points(run: Sequence[dict[str, str]], column: str) -> tuple[list[int], list[float]]:
    known = [line for line in run if line[column]]
    return [int(line["step"]) for line in known], [float(line[column]) for line in known]


def part(run: Sequence[dict[str, str]], column: str, start: float, stop: float) -> float:
    """The mean of a column over a part of the run: 0 to 0.25 is its first quarter."""
    values = points(run, column)[1]
    return float(np.mean(values[int(start * len(values)) : max(1, int(stop * len(values)))])) if values else np.nan


def last(run: Sequence[dict[str, str]], column: str) -> float:
    values = points(run, column)[1]
    return values[-1] if values else np.nan


MEASURES = {
    "reward, 1st half": lambda run: part(run, "reward", 0, 0.5),
    "reward, last quarter": lambda run: part(run, "reward", 0.75, 1),
    "held out, end": lambda run: last(run, "held_out"),
    "harder, end": lambda run: last(run, "harder"),
    "entropy, 2nd quarter": lambda run: part(run, "entropy", 0.25, 0.5),
    "entropy, last quarter": lambda run: part(run, "entropy", 0.75, 1),
    "largest gradient": lambda run: max(points(run, "grad_norm")[1], default=np.nan),
    "gap of log-probs, last quarter": lambda run: part(run, "logp_gap", 0.75, 1),
    "routing flips": lambda run: part(run, "routing_flips", 0, 1),
}


def tell(letter: str, variants: Mapping[str, Runs]) -> None:
    """A table: the mean over seeds and, for all but the first variant, the difference to it."""
    claim, first = CLAIMS[letter], next(iter(variants.values()))
    shown = [n for n, of in MEASURES.items() if not all(np.isnan(of(run)) for run in first.values())]
    print(f"\n({letter}) {claim.title}; {len(first)} seeds\n")
    print("| variant | " + " | ".join(shown) + " |")
    print("|---|" + "---|" * len(shown))
    for label, runs in variants.items():
        cells = [cell(MEASURES[name], runs, first if runs is not first else {}) for name in shown]
        print(f"| {label} | {' | '.join(cells)} |")


def cell(measure: Any, runs: Runs, base: Runs) -> str:
    mean = f"{np.mean([measure(run) for run in runs.values()]):.3f}"
    pairs = [measure(runs[seed]) - measure(base[seed]) for seed in runs if seed in base]
    if len(pairs) < 2:
        return mean
    half = STUDENT.get(len(pairs), 2.0) * np.std(pairs, ddof=1) / len(pairs) ** 0.5
    return f"{mean} ({np.mean(pairs):+.3f} ± {half:.3f})"


def draw(letter: str, variants: Mapping[str, Runs], picture: Path) -> None:
    pyplot = load_pyplot()
    panels = ["reward", "entropy", "held_out"]
    panels += ["harder"] if any(points(run, "harder")[1] for runs in variants.values() for run in runs.values()) else []
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.8 * len(panels), 3.8), constrained_layout=True)
    for axis, column in zip(axes, panels, strict=True):
        for label, runs in variants.items():
            curves = [points(run, column) for run in runs.values()]
            length = min(len(steps) for steps, _ in curves)
            values = np.array([numbers[:length] for _, numbers in curves])
            (line,) = axis.plot(curves[0][0][:length], values.mean(0), label=label, linewidth=1.8)
            axis.fill_between(
                curves[0][0][:length], values.min(0), values.max(0), color=line.get_color(), alpha=0.12, linewidth=0
            )
        axis.set_title({"held_out": "held-out accuracy", "entropy": "entropy of samples"}.get(column, column))
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8, frameon=False)
    figure.suptitle(f"{CLAIMS[letter].title}: mean and range over seeds")
    figure.savefig(picture, dpi=100)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
