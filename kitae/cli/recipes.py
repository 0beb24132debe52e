"""`kitae recipes`: the recipes that come with Kitae, and what they did when they were run, run by run.

The records are in kitae/recipes/measured.jsonl, one line a run; `benchmarks/recipe_curves.py` writes them from run
folders.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from kitae.config.locate import SHIPPED, shipped_chains, shipped_recipes, summary
from kitae.errors import ConfigError

FILE = SHIPPED / "measured.jsonl"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of a recipe as it is: `Measurement("sort", 1, "one NVIDIA H200", ((0, 0.15), (60, 0.98)), 46.1, 128)`.

    curve: (step, held-out score). seconds: of all steps, without the start of the program and evaluations. prompts:
    held-out ones. score: what the curve shows; of a loss, less is better.
    """

    recipe: str
    seed: int
    hardware: str
    curve: tuple[tuple[int, float], ...]
    seconds: float
    prompts: int
    score: str = "accuracy"
    commit: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(row: Mapping[str, Any]) -> "Measurement":
        return Measurement(**{**row, "curve": tuple((int(step), float(score)) for step, score in row["curve"])})

    @property
    def steps(self) -> int:
        return self.curve[-1][0]

    @property
    def start(self) -> float:
        return self.curve[0][1]

    @property
    def end(self) -> float:
        return self.curve[-1][1]


def measurements(recipe: str | None = None) -> list[Measurement]:
    """Of all recipes, or of one; by recipe, hardware and seed."""
    try:
        found = [Measurement.of(json.loads(line)) for line in FILE.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{FILE} must hold one measurement a line: {error}") from error
    return sorted((m for m in found if recipe in (None, m.recipe)), key=_order)


def write(found: Iterable[Measurement]) -> None:
    """Keep these; the runs of a recipe on the same hardware with the same seed take the place of earlier ones."""
    kept = {_order(m): m for m in (*measurements(), *found)} if FILE.exists() else {_order(m): m for m in found}
    lines = [json.dumps(asdict(kept[key])) for key in sorted(kept)]
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _order(m: Measurement) -> tuple[str, str, int]:
    return m.recipe, m.hardware, m.seed


def by_hardware(found: Iterable[Measurement]) -> list[list[Measurement]]:
    """The seeds of each recipe on each kind of hardware together."""
    return [list(runs) for _, runs in groupby(found, key=lambda m: (m.recipe, m.hardware))]


def told(runs: list[Measurement]) -> str:
    """In a line: `held-out accuracy 0.18, 0.15 → 0.95, 0.98 in 60 steps, 46 s on one NVIDIA H200 (seeds 0, 1)`."""
    digits = 3 if runs[0].score == "loss" else 2
    starts, ends = (", ".join(f"{x:.{digits}f}" for x in xs) for xs in ([m.start for m in runs], [m.end for m in runs]))
    seeds = f"seed{'s' * (len(runs) > 1)} {', '.join(str(m.seed) for m in runs)}"
    time = duration(sum(m.seconds for m in runs) / len(runs))
    return (
        f"held-out {runs[0].score} {starts} → {ends} in {runs[0].steps} steps, {time} on {runs[0].hardware} ({seeds})"
    )


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def recipes() -> None:
    """List the recipes that come with Kitae."""
    for recipe in shipped_recipes():
        print(f"{recipe.stem:18} {summary(recipe)}")
        for runs in by_hardware(measurements(recipe.stem)):
            print(f"{'':18} measured: {told(runs)}")
    print("\ntrain one with: kitae train NAME [section.key=value …]\n")
    for chain in shipped_chains():
        print(f"{chain.stem:18} {summary(chain)}")
    print("\nrun one with: kitae chain NAME")
