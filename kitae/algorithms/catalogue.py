"""What there is, as text: for `kitae algorithms` and docs/algorithms.md, which therefore cannot disagree."""

from collections.abc import Iterator
from typing import Any

from kitae.algorithms.config import AlgorithmConfig
from kitae.algorithms.presets import PRESETS
from kitae.algorithms.stages import STAGES, Stage, keyword_settings

COLUMNS = ("method", "S1 reward", "S2 filter", "S3 advantage", "S4 ratio", "S5 gate", "S6 correction",
           "S7 aggregation", "S8 regulariser")  # fmt: skip


def master_table() -> list[tuple[str, ...]]:
    """One row per preset, in the order of `COLUMNS`."""
    return [_master_row(name, AlgorithmConfig(preset=name)) for name in PRESETS]


def _master_row(name: str, c: AlgorithmConfig) -> tuple[str, ...]:
    kl = f"{c.kl} {c.kl_coef:g}" if c.kl_coef else ""
    shaped = ["±1"] if (c.reward_bias, c.reward_scale) == (-0.5, 2.0) else []
    shaped += [f"− {kl}"] if kl and c.kl_in == "reward" else []
    advantage = str(c.advantage) + (f", whitened by {c.whiten}" if c.whiten != "none" else "")
    ratio = "–" if c.ratio is None else c.ratio + (" / μ" if c.anchor == "behaviour" else "")
    regulariser = [kl] if kl and c.kl_in == "loss" else []
    regulariser += [f"entropy → {c.entropy_target:g}"] if c.entropy_target else []
    regulariser += [f"likelihood {c.sft_coef:g}"] if c.sft_coef else []
    return (
        name,
        ", ".join(shaped) or "–",
        _dash(c.filter),
        advantage,
        ratio,
        _with_numbers(c, STAGES["gate"]),
        _with_numbers(c, STAGES["correction"]),
        str(c.aggregation),
        ", ".join(regulariser) or "–",
    )


def _with_numbers(c: AlgorithmConfig, stage: Stage) -> str:
    """`clip (0.2, 0.28)`: values in the order of the function's signature; what is off is left out."""
    parts = []
    for name in stage.names(str(getattr(c, stage.key))):
        keys = keyword_settings(stage.choices[name])
        numbers = [f"{value:g}" for key in keys if (value := getattr(c, key))]
        parts.append(f"{name} ({', '.join(numbers)})" if numbers else name)
    return _dash(" + ".join(parts))


def _dash(value: str | None) -> str:
    return "–" if value in (None, "none") else str(value)


def choices(stage: Stage) -> Iterator[tuple[str, str, str]]:
    """`(name, what it computes, its settings)` of the functions of a stage."""
    for name, function in stage.choices.items():
        text = " ".join((function.__doc__ or "").strip().split("\n\n")[0].split())
        yield name, text, ", ".join(keyword_settings(function))


def arguments(stage: Stage) -> str:
    """What a function of the stage gets and returns."""
    return f"({', '.join(stage.arguments)}) → {stage.returns}"


def settings(name: str) -> dict[str, Any]:
    """What a preset resolves to: only settings that act."""
    dumped = AlgorithmConfig(preset=name).model_dump()
    return {key: value for key, value in dumped.items() if value is not None and key not in ("preset", "params")}
