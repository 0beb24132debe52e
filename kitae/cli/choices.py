"""What there is to choose from: `kitae algorithms` and `kitae environments`; the tables of docs/algorithms.md."""

import shutil
import sys
from collections.abc import Iterator
from typing import Annotated, Any, get_args

import typer

from kitae.algorithms.config import AlgorithmConfig
from kitae.algorithms.preferences import PREFERENCE_LOSSES
from kitae.algorithms.presets import PRESETS
from kitae.algorithms.stages import STAGES, Stage, keyword_settings
from kitae.cli.text import table
from kitae.envs.environment_registry import WORLDS
from kitae.errors import ConfigError
from kitae.plugins import nearest
from kitae.section import Section

COLUMNS = ("method", "S1 reward", "S2 filter", "S3 advantage", "S4 ratio", "S5 gate", "S6 correction",
           "S7 aggregation", "S8 regulariser")  # fmt: skip


def master_table() -> list[tuple[str, ...]]:
    """One row for each preset, in the order of `COLUMNS`."""
    return [_master_row(name, AlgorithmConfig(preset=name)) for name in PRESETS]


def _master_row(name: str, c: AlgorithmConfig) -> tuple[str, ...]:
    kl = f"{c.kl.name} {c.kl.coef:g}" if c.kl.coef else ""
    shaped = ["±1"] if (c.shaping.setting("bias"), c.shaping.setting("scale")) == (-0.5, 2.0) else []
    shaped += [f"− {kl}"] if kl and c.kl.into == "reward" else []
    advantage = str(c.advantage.name) + (f", whitened by {c.advantage.whiten}" if c.advantage.whiten != "none" else "")
    ratio = "–" if c.ratio.name is None else c.ratio.name + (" / μ" if c.ratio.anchor == "behaviour" else "")
    regulariser = [kl] if kl and c.kl.into == "loss" else []
    regulariser += [f"entropy → {c.entropy.target:g}"] if c.entropy.target else []
    regulariser += [f"likelihood {c.sft.coef:g}"] if c.sft.coef else []
    return (
        name,
        ", ".join(shaped) or "–",
        _dash(c.filter.name),
        advantage,
        ratio,
        _with_numbers(c, STAGES["gate"]),
        _with_numbers(c, STAGES["correction"]),
        str(c.aggregation.name),
        ", ".join(regulariser) or "–",
    )


def _with_numbers(c: AlgorithmConfig, stage: Stage) -> str:
    """`clip (0.2, 0.28)`: values in the order of the function's signature; what is off is left out."""
    table, parts = c.choice(stage.key), []
    for name in stage.names(str(table.name)):
        numbers = [f"{value:g}" for key in keyword_settings(stage.choices[name]) if (value := table.setting(key))]
        parts.append(f"{name} ({', '.join(numbers)})" if numbers else name)
    return _dash(" + ".join(parts))


def _dash(value: str | None) -> str:
    return "–" if value in (None, "none") else str(value)


def choices(stage: Stage) -> Iterator[tuple[str, str, str]]:
    """`(name, what it computes, its settings with their defaults)` of the functions of a stage."""
    for name, function in stage.choices.items():
        text = " ".join((function.__doc__ or "").strip().split("\n\n")[0].split())
        parts = keyword_settings(function).items()
        settings = [key if p.default is p.empty else f"{key} = {_told(p.default)}" for key, p in parts]
        yield name, text, ", ".join(settings)


def arguments(stage: Stage) -> str:
    """What a function of the stage gets and returns."""
    return f"({', '.join(stage.arguments)}) → {stage.returns}"


def settings(name: str) -> dict[str, Any]:
    """What a preset resolves to, as `{"gate": "clip", "gate.clip_low": 0.2, …}`: only settings that act."""
    found = AlgorithmConfig(preset=name).leaves()
    return {key.removesuffix(".name"): value for key, value in found if value is not None and key != "preset"}


def differences(name: str) -> dict[str, Any]:
    """What a preset chooses beside the common choices: `{"filter": "zero-variance", "gate.clip_high": 0.28}`."""
    found: dict[str, Any] = {}
    for key, value in PRESETS[name].choices.items():
        table = value if isinstance(value, dict) else {"name": value}
        found |= {key if setting == "name" else f"{key}.{setting}": x for setting, x in table.items()}
    return found


def _told(default: object) -> str:
    if isinstance(default, bool):
        return "true" if default else "false"
    return "()" if default == () else f"{default:g}"


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


def environments() -> None:
    """List the environments, each with its params."""
    for name, world in WORLDS.items():
        print(f"{name:10} {_summary(world.__doc__)}")
        params: type[Section] | None = getattr(world, "params", None)
        for key, default, description in _described(params, "") if params else ():
            print(f"    {key:20} {default:12} {description}")
    print(f"{'file.py:Class':10} Your own: async start, step and close; it is made as Class(prompt, **env.params).")


def _summary(text: str | None) -> str:
    """The first sentence of a docstring."""
    return " ".join((text or "").split("\n\n")[0].split())


def _described(params: type[Section], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, info in params.model_fields.items():
        inside = [kind for kind in (info.annotation, *get_args(info.annotation)) if _is_section(kind)]
        if inside:
            yield from _described(inside[0], f"{prefix}{name}.")
        else:
            default = "needed" if info.is_required() else _shown(info.get_default(call_default_factory=True))
            yield f"{prefix}{name}", default, info.description or ""


def _is_section(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _shown(default: object) -> str:
    return str(default) if default not in ("", (), {}) else "-"
