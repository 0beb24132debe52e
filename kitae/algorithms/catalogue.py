"""The methods, stages and settings of algorithms as text: for `kitae algorithms` and docs/algorithms.md."""

from collections.abc import Iterator
from typing import Any

from kitae.algorithms.config import AlgorithmConfig
from kitae.algorithms.presets import PRESETS
from kitae.algorithms.stages import STAGES, Stage, keyword_settings

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
