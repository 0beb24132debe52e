"""Named algorithms as tuples of choices, one per stage. Adding a method is adding a row here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    """`choices` fills the fields of `AlgorithmConfig` that the recipe leaves open."""

    title: str
    source: str
    choices: Mapping[str, Any]


_BASE: Mapping[str, Any] = {
    "overlong_buffer": 0,
    "filter": "zero-variance",
    "advantage": "group-zscore",
    "ratio": "token",
    "gate": "clip",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": 0.0,
    "correction": "tis",
    "correction_cap": 2.0,
    "aggregation": "token-mean",
    "constant_length": 0,
    "entropy_coef": 0.0,
}

PRESETS: Mapping[str, Preset] = {
    "grpo": Preset(
        "Group relative policy optimisation",
        "DeepSeekMath, arXiv 2402.03300",
        {**_BASE, "filter": "none", "aggregation": "seq-mean-token-mean"},
    ),
    "dr-grpo": Preset(
        "GRPO done right: no division by the group's spread, no length bias",
        "Understanding R1-Zero-like training, arXiv 2503.20783",
        {**_BASE, "filter": "none", "advantage": "group-centred", "aggregation": "constant-length"},
    ),
    "dapo": Preset(
        "Decoupled clip, groups without signal dropped, token-level loss (dynamic sampling: pipeline.refill)",
        "DAPO, arXiv 2503.14476",
        {**_BASE, "clip_high": 0.28},
    ),
}
