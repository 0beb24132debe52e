"""Claims of the literature, tried on a task that SmolLM2-135M learns in a minute on a GPU: sort three numbers.

    python benchmarks/findings.py --folder runs/f [--claims a,b] [--seeds 5] [--jobs 12] [--set training.lr=1e-5]
    python benchmarks/findings.py                        draw and tell what docs/findings.csv has

A claim is a few variants of `kitae train sort`, each with the same seeds, so that they see the same prompts. A run that
two claims want is made once. What a run told goes into its folder as `lines.json`, and its weights are removed: a
hundred of them would fill a disk. A run that has told is not repeated, and none that the table has to its last score.
Writes docs/findings.csv, a line for every five steps of each run, and from it a picture docs/findings_a.png and a table
for each claim: mean over seeds, and the difference to the first variant, seed by seed, with its 95 % interval
(Student's t), bold where three seeds or more leave out 0. At last, how many intervals there are and what chance makes
of two runs with one seed.

Some runs have no held-out score at their last step. So there are two columns: `held out, step 60` is of the last step
that all runs of the claim have, and `held out, last` compares, seed by seed, the last step that both runs have.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from upcycle import upcycle

from kitae.observe.plots import load_pyplot
from kitae.store.journal import Journal
from kitae.store.run_folder import Metrics

DOCS = Path(__file__).parent.parent / "docs"
BASE = ("pipeline.refill=0", "eval.prompts=256", "eval.every=20", "checkpoint.every=1000", "training.steps=80")
NUMBERS = ("reward", "entropy", "grad_norm", "logp_gap", "kl_k1", "samples_trained", "routing_flips")
BLOCK = 5  # steps that a line of the table is the mean of
STUDENT = (0, 0, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""97.5 % points of Student's t, by number of seeds."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Variants of one recipe, the first of which the others are compared with.

    measures: what the claim speaks of, beside held-out accuracy. pairs: others to compare, the second taken from the
    first; "k: no KL" is a variant of claim k.
    """

    title: str
    variants: Mapping[str, Sequence[str]]
    common: Sequence[str] = ()
    measures: Sequence[str] = ("reward, 1st half", "reward, last quarter")
    pairs: Sequence[tuple[str, str]] = ()


def presets(*names: str) -> dict[str, tuple[str, ...]]:
    return {name: (f"algorithm.preset={name}",) for name in names}


LONG = ("training.steps=160",)
REUSE = ("training.minibatches=4",)
STALE = ("pipeline.max_staleness=4",)
HARDER = ("eval.suites=['{folder}/harder.toml']",)
EIGHT = ("engine.cache_dtype=int8",)
ENTROPY = ("reward, last quarter", "entropy, 2nd quarter", "entropy, last quarter")
FROZEN = ("algorithm.preset=grpo", "algorithm.reference=frozen", "algorithm.kl.coef=0.05")

CLAIMS = {
    "a": Claim(
        "positives alone: fast early, less entropy, passed later",
        presets("grpo", "raft++"),
        LONG,
        ("reward, 1st half", *ENTROPY),
    ),
    "b": Claim(
        "dropping all-wrong groups is what helps, dividing by the deviation is not",
        presets(
            "reinforce", "reinforce-mean-zero", "reinforce-drop-correct", "reinforce-drop-wrong", "reinforce-rej",
            "reinforce-rej-std",
        ),
        pairs=(
            ("reinforce-drop-wrong", "reinforce-drop-correct"),
            ("reinforce-mean-zero", "reinforce-rej"),
            ("reinforce-rej-std", "reinforce-rej"),
        ),
    ),
    "c": Claim(
        "trained on few prompts, whitening over the batch carries over to harder ones better",
        presets("grpo", "reinforce++", "reinforce++-baseline"),
        ("data.params.low=10", "data.params.high=16", "eval.prompts=20", *HARDER),
        ("reward, last quarter", "harder, step 60"),
    ),
    "k": Claim(
        "k2 and k3 as a KL term",
        {"no KL": ("algorithm.preset=grpo",), **{name: (*FROZEN, f"algorithm.kl={name}") for name in ("k2", "k3")}},
        measures=(*ENTROPY, "largest gradient"),
        pairs=(("k3", "k2"),),
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
        ("reward, last quarter", "largest gradient", "gap of log-probs, last quarter"),
        (
            ("8-bit cache, tis", "8-bit cache, no correction"),
            ("8-bit cache, sequence mask", "8-bit cache, no correction"),
        ),
    ),
    "e": Claim(
        "stale negatives break, stale positives do not, asymmetric gates repair",
        {
            "grpo": ("algorithm.preset=grpo",),
            "grpo, no correction": ("algorithm.preset=grpo", "algorithm.correction=none"),
            "raft++ (positives)": ("algorithm.preset=raft++",),
            **presets("stale-asymmetric", "decoupled-ppo"),
            "asymmetric, no floor": ("algorithm.preset=stale-asymmetric", "algorithm.gate.weight_floor=0"),
        },
        STALE,
        ("reward, last quarter", "entropy, last quarter", "gap of log-probs, last quarter"),
        (
            ("stale-asymmetric", "asymmetric, no floor"),
            ("raft++ (positives)", "asymmetric, no floor"),
            ("grpo", "k: no KL"),
            ("raft++ (positives)", "k: no KL"),
        ),
    ),
    "f": Claim(
        "clip-higher keeps entropy",
        {f"clip {high}": ("algorithm.preset=grpo", f"algorithm.gate.clip_high={high}") for high in (0.2, 0.28, 0.4)},
        REUSE,
        ENTROPY,
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
        (*ENTROPY, "largest gradient"),
    ),
    "n": Claim(
        "less memory: moments of AdamW in 16 bits, keys and values in 8",
        {
            "fp32 moments": ("algorithm.preset=grpo",),
            "bf16 moments": ("algorithm.preset=grpo", "training.moments=bfloat16"),
            "8-bit cache": ("algorithm.preset=grpo", *EIGHT),
        },
        measures=("reward, 1st half", "reward, last quarter", "gap of log-probs, last quarter"),
    ),
    "m": Claim(
        "mixtures: replay of the routing is needed off-policy, ratios of sequences do without",
        {
            "grpo, no replay": ("algorithm.preset=grpo",),
            "grpo, R2": ("algorithm.preset=grpo", "algorithm.experts.routing=old"),
            "grpo, R3": ("algorithm.preset=grpo", "algorithm.experts.routing=engine"),
            "gspo, no replay": ("algorithm.preset=gspo",),
        },
        (*REUSE, "training.epochs=2", "training.lr=1e-5", "training.steps=60", "model.path={folder}/mixture"),
        ("reward, last quarter", "largest gradient", "routing flips"),
        (("gspo, no replay", "grpo, R2"), ("gspo, no replay", "grpo, R3")),
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
    arguments.pictures.mkdir(parents=True, exist_ok=True)
    intervals: list[Interval] = []
    for letter in wanted:
        if any(key[0] == letter for key in found):
            runs = {label: found[letter, label] for label in CLAIMS[letter].variants if (letter, label) in found}
            intervals += tell(letter, runs, found)
            draw(letter, runs, arguments.pictures / f"findings_{letter}.png")
    tell_chance(intervals, found)


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
    folder: Path = arguments.folder
    return folder / f"{''.join(c if c.isalnum() or c in '=._-' else '-' for c in name)}_{seed}"


DULL = {text.partition("=")[0] for text in BASE} - {"training.steps"} | {"eval.suites"}


def make(wanted: Iterable[str], arguments: argparse.Namespace) -> None:
    arguments.folder.mkdir(parents=True, exist_ok=True)
    (arguments.folder / "harder.toml").write_text(
        '[model]\npath = "smollm2-135m"\n[data]\ntask = "sort"\nparams = { count = 4 }\n[verifier]\nname = "exact"\n'
        "[sampling]\nmax_tokens = 16\n"
    )
    if "m" in wanted and not (arguments.folder / "mixture").exists():
        upcycle("smollm2-135m", arguments.folder / "mixture", experts=4, top_k=2, noise=0.05)
    known = {(*key, seed) for key, runs in read(arguments.table).items() for seed in runs if runs[seed][-1]["held_out"]}
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

Lines = Sequence[Mapping[str, str]]  # of a run
Runs = Mapping[int, Lines]  # by seed
Table = Mapping[tuple[str, str], Runs]  # by claim and variant


def read_lines(table: Path) -> list[dict[str, str]]:
    if not table.exists():
        return []
    with table.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read(table: Path) -> Table:
    found: dict[tuple[str, str], dict[int, list[dict[str, str]]]] = defaultdict(lambda: defaultdict(list))
    for line in read_lines(table):
        found[line["claim"], line["variant"]][int(line["seed"])].append(line)
    return found


def points(run: Lines, column: str) -> tuple[list[int], list[float]]:
    known = [line for line in run if line[column]]
    return [int(line["step"]) for line in known], [float(line[column]) for line in known]


def part(run: Lines, column: str, start: float, stop: float) -> float:
    """The mean of a column over a part of the run: 0 to 0.25 is its first quarter."""
    values = points(run, column)[1]
    return float(np.mean(values[int(start * len(values)) : max(1, int(stop * len(values)))])) if values else np.nan


def at(run: Lines, column: str, step: int) -> float:
    return dict(zip(*points(run, column), strict=True))[step]


def shared_steps(runs: Iterable[Lines], column: str) -> list[int]:
    """The steps at which all the runs have a number."""
    return sorted(set.intersection(*(set(points(run, column)[0]) for run in runs)))


def last_difference(run: Lines, base: Lines) -> float:
    """Of held-out accuracy, at the last step that both have."""
    step = shared_steps((run, base), "held_out")[-1]
    return at(run, "held_out", step) - at(base, "held_out", step)


@dataclass(frozen=True, slots=True)
class Measure:
    """A number of a run, and how it is written. Without `of`, one of two runs: `last_difference`."""

    of: Callable[[Lines], float] | None
    digits: int = 3

    def difference(self, run: Lines, base: Lines) -> float:
        return last_difference(run, base) if self.of is None else self.of(run) - self.of(base)


MEASURES = {
    "reward, 1st half": Measure(lambda run: part(run, "reward", 0, 0.5)),
    "reward, last quarter": Measure(lambda run: part(run, "reward", 0.75, 1)),
    "harder, step 60": Measure(lambda run: at(run, "harder", 60)),
    "entropy, 2nd quarter": Measure(lambda run: part(run, "entropy", 0.25, 0.5), 4),
    "entropy, last quarter": Measure(lambda run: part(run, "entropy", 0.75, 1), 4),
    "largest gradient": Measure(lambda run: max(points(run, "grad_norm")[1]), 1),
    "gap of log-probs, last quarter": Measure(lambda run: part(run, "logp_gap", 0.75, 1), 4),
    "routing flips": Measure(lambda run: part(run, "routing_flips", 0, 1), 4),
}


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean of paired differences, 95 % sure to ± half: Interval(0.2, 0.1, 4) is 0.1 to 0.3, from four seeds."""

    mean: float
    half: float
    pairs: int

    @property
    def decided(self) -> bool:
        return self.pairs >= 3 and abs(self.mean) > self.half


def interval(differences: Sequence[float]) -> Interval | None:
    """None where there is nothing to tell: fewer than two pairs, or a number that the runs do not have."""
    count = len(differences)
    if count < 2 or np.isnan(differences).any():
        return None
    half = STUDENT[min(count, len(STUDENT) - 1)] * np.std(differences, ddof=1) / count**0.5
    return Interval(float(np.mean(differences)), float(half), count)


def measures_of(claim: Claim, variants: Mapping[str, Runs]) -> dict[str, Measure]:
    """What the claim names and, of held-out accuracy, the last step that all runs have, and the last of each pair."""
    runs = [run for seeds in variants.values() for run in seeds.values()]
    step, end = shared_steps(runs, "held_out")[-1], max(int(run[-1]["step"]) for run in runs)
    fixed = {f"held out, step {step}": Measure(lambda run: at(run, "held_out", step))}
    return {name: MEASURES[name] for name in claim.measures} | fixed | (
        {"held out, last": Measure(None)} if step < end else {}
    )  # fmt: skip


def tell(letter: str, variants: Mapping[str, Runs], found: Table) -> list[Interval]:
    """A table: the mean over seeds, for all but the first variant the difference to it, then the claim's own pairs."""
    claim, (first, *others) = CLAIMS[letter], variants
    measures, told = measures_of(claim, variants), list[Interval]()
    print(f"\n({letter}) {claim.title}\n")
    print("| variant | seeds | " + " | ".join(measures) + " |")
    print("|---|---|" + "---|" * len(measures))
    print(row(first, variants[first], {}, measures, told))
    for label in others:
        print(row(label, variants[label], variants[first], measures, told))
    for left, right in claim.pairs:
        one, other = (found[key_of(letter, name)] for name in (left, right))
        print(row(f"{left} − {right}", one, other, measures, told, means=False))
    return told


def key_of(letter: str, name: str) -> tuple[str, str]:
    other, colon, label = name.partition(": ")
    return (other, label) if colon else (letter, name)


def row(
    label: str, runs: Runs, base: Runs, measures: Mapping[str, Measure], told: list[Interval], *, means: bool = True
) -> str:
    """A line of a table. told: gets the intervals that it has."""
    seeds, cells = [seed for seed in runs if seed in base], []
    for measure in measures.values():
        found = interval([measure.difference(runs[seed], base[seed]) for seed in seeds])
        told.extend([found] if found else [])
        mean = [float(np.mean([measure.of(run) for run in runs.values()]))] if means and measure.of else []
        cells.append(cell(mean, found, measure.digits))
    count = f"{len(runs)}" if len(seeds) in (0, len(runs)) else f"{len(runs)}, {len(seeds)} paired"
    return f"| {label} | {count if means else len(seeds)} | {' | '.join(cells)} |"


def cell(mean: Sequence[float], found: Interval | None, digits: int) -> str:
    texts = [f"{value:.{digits}f}" for value in mean if not np.isnan(value)]
    if found:
        mark = "**" if found.decided else ""
        texts.append(f"{mark}{found.mean:+.{digits}f} ± {found.half:.{digits}f}{mark}".replace("-", "−"))
    return "; ".join(texts)


def tell_chance(intervals: Sequence[Interval], found: Table) -> None:
    """How many scores are missing, how many intervals leave out 0, and how far apart runs with one seed are.

    GRPO of claim a and of claim k differ in their number of steps alone.
    """
    runs = [run for seeds in found.values() for run in seeds.values()]
    print(f"\n{sum(not run[-1]['held_out'] for run in runs)} of {len(runs)} runs have no score at their last step")
    decided = sum(one.decided for one in intervals)
    print(f"{len(intervals)} intervals, {decided} of them without 0; chance alone: {0.05 * len(intervals):.0f}")
    twice = found.get(("a", "grpo"), {}), found.get(("k", "no KL"), {})
    for seed in sorted(twice[0].keys() & twice[1].keys()):
        one, other = twice[0][seed], twice[1][seed]
        steps = shared_steps((one, other), "held_out")
        apart = [f"{at(one, 'held_out', x) - at(other, 'held_out', x):+.3f} at {x}" for x in steps]
        print(f"same settings and seed {seed}, held out: {', '.join(apart)}")


PANELS = {"reward": "reward", "entropy": "entropy of samples (log)", "held_out": "held-out accuracy"}


def draw(letter: str, variants: Mapping[str, Runs], picture: Path) -> None:
    pyplot = load_pyplot()
    harder = any(points(run, "harder")[1] for runs in variants.values() for run in runs.values())
    panels = PANELS | ({"harder": "accuracy on harder prompts"} if harder else {})
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.2 * len(panels), 4.2), constrained_layout=True)
    for axis, (column, title) in zip(axes, panels.items(), strict=True):
        for label, runs in variants.items():
            draw_curve(axis, list(runs.values()), column, f"{label} ({len(runs)} seeds)")
        axis.set(title=title, xlabel="step", **({"yscale": "log"} if column == "entropy" else {"ylim": (-0.02, 1.02)}))
        if column == "entropy":
            axis.yaxis.set_major_locator(pyplot.LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("")
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    how = "mean and standard error; rings: single runs, where some have no score"
    figure.suptitle(f"Claim ({letter}): {CLAIMS[letter].title}\n{how}")
    figure.savefig(picture, dpi=100)
    pyplot.close(figure)


def draw_curve(axis: Any, runs: Sequence[Lines], column: str, label: str) -> None:
    """A line as far as all runs have numbers, then a ring for each that has: a mean over fewer is another mean."""
    steps = shared_steps(runs, column)
    values = np.array([[at(run, column, step) for step in steps] for run in runs])
    middle, error = values.mean(0), values.std(0, ddof=1) / len(runs) ** 0.5
    (line,) = axis.plot(steps, middle, label=label, linewidth=1.8)
    axis.fill_between(steps, middle - error, middle + error, color=line.get_color(), alpha=0.12, linewidth=0)
    rest = [point for run in runs for point in zip(*points(run, column), strict=True) if point[0] > steps[-1]]
    for step, value in rest:
        axis.plot(step, value, "o", color=line.get_color(), markersize=4, fillstyle="none")


if __name__ == "__main__":
    main()
