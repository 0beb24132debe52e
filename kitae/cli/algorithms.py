"""`kitae algorithms`."""

import shutil
import sys
from typing import Annotated

import typer

from kitae.algorithms.catalogue import COLUMNS, arguments, choices, differences, master_table, settings
from kitae.algorithms.preferences import PREFERENCE_LOSSES
from kitae.algorithms.presets import PRESETS
from kitae.algorithms.stages import STAGES, Stage
from kitae.cli.text import table
from kitae.errors import ConfigError
from kitae.plugins import nearest


def algorithms(
    name: Annotated[
        str | None, typer.Argument(help="A method (its formula, source, trap and settings) or a stage (its choices).")
    ] = None,
) -> None:
    """List the algorithms, or explain one.

    Each is a choice for each of eight stages.
    """
    numbers = {stage.number.lower(): stage for stage in STAGES.values()}
    if name is None:
        _overview()
    elif name.lower() in PRESETS:
        _preset(name.lower())
    elif name.lower() == "dpo":
        _preferences()
    elif stage := STAGES.get(name.lower()) or numbers.get(name.lower()) or _stage_of(name):
        _stage(stage)
    else:
        raise ConfigError(
            f"no algorithm or stage {name!r}{nearest(name, [*PRESETS, *STAGES])}; algorithms are {', '.join(PRESETS)}; "
            f"stages are {', '.join(STAGES)}; dpo has the losses on preferences"
        )


def _stage_of(name: str) -> Stage | None:
    """The stage that has a choice or a setting of this name."""
    for stage in STAGES.values():
        settings = stage.base.known_keys()
        if name in stage.choices or name in settings:
            return stage
    return STAGES["kl"] if name in ("reference", "regulariser", "entropy") else None


def _overview() -> None:
    lines = table([COLUMNS, *master_table()], left=len(COLUMNS))
    needed = max(map(len, lines.splitlines())) + 2
    if sys.stdout.isatty() and shutil.get_terminal_size().columns < needed:
        for name, preset in PRESETS.items():
            print(f"{name.ljust(max(map(len, PRESETS)))}  {preset.title}")
        print(f"\nThe table of stages needs a terminal of {needed} columns, or: kitae algorithms | less -S")
    else:
        print(lines)
    print(f"\n{len(PRESETS)} methods. One of them:   kitae algorithms {next(iter(PRESETS))}")
    print(f"the choices of a stage:   kitae algorithms gate      (stages: {', '.join(STAGES)})")
    print("train with one:           kitae train quickstart algorithm.preset=dapo")
    print("losses on preferences:    kitae algorithms dpo")


def _preset(name: str) -> None:
    preset = PRESETS[name]
    print(f"{name}: {preset.title}\n")
    print(f"  formula   {preset.formula}")
    print(f"  source    {preset.source}")
    print(f"  trap      {preset.trap}\n")
    print("  settings that act (* differs from what presets start from):")
    for key, value in settings(name).items():
        mark = "*" if key in differences(name) else " "
        print(f"  {mark} {key:24} {value}")
    print(f"\n  use it    kitae train RECIPE algorithm.preset={name}")


def _stage(stage: Stage) -> None:
    print(f"{stage.number} {stage.key}: {stage.purpose}. A function of it: {arguments(stage)}\n")
    for name, text, options in choices(stage):
        print(f"  {name:20} {text}" + (f"  [{options}]" if options else ""))
    print(f"\n  your own: algorithm.{stage.key} = 'file.py:function' (docs/custom-algorithms.md)")


def _preferences() -> None:
    print("Losses on pairs of answers, for method.kind = 'dpo'. y⁺ is the chosen answer, y⁻ the rejected one;")
    print("h⁺ = log π(y⁺) − log π_ref(y⁺), h = h⁺ − h⁻, A = log π(y) / |y|.\n")
    for name, loss in PREFERENCE_LOSSES.items():
        values = ", ".join(f"{key} = {value:g}" for key, value in loss.defaults.items())
        print(f"  {name:14} {loss.formula}")
        print(f"  {'':14} {loss.title}; {loss.source}")
        print(f"  {'':14} {values}" + ("" if loss.reference else "; no reference") + "\n")
    print("  use one        kitae train RECIPE method.loss=ipo")
