"""What the shipped recipes do: keep the held-out scores of runs, and draw them.

    kitae train sort run.seed=0; kitae train sort run.seed=1 …
    python benchmarks/recipe_curves.py runs/sort-001 runs/sort-002 …

Each run must be a shipped recipe as it is: only the seed, the names of run and folder, when checkpoints are written,
and what `--free` names may differ: for copies of what the recipe has from the hub,
`--free model.path data.path data.eval_path data.hub eval.prompts`. Adds to kitae/recipes/measured.jsonl, from which
`kitae recipes`, the table in docs/recipes.md and the picture docs/recipe_curves.png are made. Without runs, it draws
what is there.
"""

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

from kitae.cli.recipes import Measurement, by_hardware, measurements, write
from kitae.config.locate import find_recipe
from kitae.config.recipe import load_config
from kitae.errors import ConfigError
from kitae.observe.plots import load_pyplot
from kitae.store.run_folder import Metrics

ROOT = Path(__file__).parent.parent
FREE = ("run.", "checkpoint.", "observe.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--recipe", help="of the runs; default: by their names")
    parser.add_argument("--hardware", help="where they ran; default: the GPU, or all cores")
    parser.add_argument("--free", nargs="*", default=[], help="settings that may differ from the recipe's")
    parser.add_argument("--commit", default=head(), help="of the code that made the runs")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "recipe_curves.png")
    arguments = parser.parse_args()
    if arguments.runs:
        write([measured(run, arguments) for run in arguments.runs])
    draw(by_hardware(measurements()), arguments.picture)


def head() -> str:
    found = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


def measured(run: Path, arguments: argparse.Namespace) -> Measurement:
    settings = json.loads((run / "config.json").read_text())
    machine = json.loads((run / "machine.json").read_text())
    name = arguments.recipe or settings["run"]["name"]
    shipped = load_config(find_recipe(name), [])
    require_as_shipped(shipped.model_dump(mode="json"), settings, run, arguments.free)
    metrics = Metrics(run / "metrics.jsonl")
    evals = [row for row in metrics.rows("eval") if "suite" not in row]
    curve = tuple((row["step"], round(row["avg"], 4)) for row in evals)
    seconds = round(sum(row["step_seconds"] for row in metrics.rows("step")), 1)
    return Measurement(
        name,
        settings["run"]["seed"],
        arguments.hardware or hardware(machine),
        curve,
        seconds,
        prompts=evals[0].get("examples") or settings["eval"]["prompts"],
        score=shipped.measure,
        commit=arguments.commit,
        versions={key: machine["versions"][key] for key in ("python", "torch", "transformers")},
    )


def require_as_shipped(recipe: dict[str, Any], settings: dict[str, Any], run: Path, also_free: list[str]) -> None:
    """Steps that the recipe leaves to its epochs are those of its data."""
    shipped, given = flat(recipe), flat(settings)
    free = (*FREE, *also_free, *(() if shipped["training.steps"] else ("training.steps",)))
    other = {k: v for k, v in given.items() if not k.startswith(free) and k in shipped and shipped[k] != v}
    if other:
        raise ConfigError(f"{run} must be the recipe as it is, got {other}")


def flat(settings: dict[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return found


def hardware(machine: dict[str, Any]) -> str:
    """`one NVIDIA H200`, or `4 CPU cores`."""
    return f"one {machine['gpus'][0]}" if machine["gpus"] else f"{machine['cores']} CPU cores"


def draw(found: list[list[Measurement]], picture: Path) -> None:
    pyplot = load_pyplot()
    columns = 4
    figure, axes = pyplot.subplots(
        -(-len(found) // columns), columns, figsize=(15, 3.2 * -(-len(found) // columns)), constrained_layout=True
    )
    for axis in axes.flat[len(found) :]:
        axis.axis("off")
    for axis, runs in zip(axes.flat, found, strict=False):
        for m in runs:
            axis.plot(*zip(*m.curve, strict=True), "o-", markersize=3, label=f"seed {m.seed}")
        axis.set_title(f"{runs[0].recipe}\n{runs[0].hardware}", fontsize=9)
        axis.set_xlabel("step", fontsize=8)
        axis.set_ylabel(f"held-out {runs[0].score}", fontsize=8)
        axis.set_ylim(*((-0.02, 1.04) if runs[0].score == "accuracy" else (0, None)))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, frameon=False)
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
