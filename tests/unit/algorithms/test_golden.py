"""What every preset makes of one fixed batch does not change unnoticed, and no two of them are the same method."""

import itertools
import json
from typing import Any

import numpy as np
import pytest
from golden import FILE, golden_row

from kitae.algorithms.presets import PRESETS

GOLDEN: dict[str, Any] = json.loads(FILE.read_text())
ALIKE = {("gspo", "gspo-token")}  # equal gradients, as long as advantages and weights are equal on all tokens
EVERY_TOKEN = [f"{g}/{i}" for g in range(5) for i in range(4)]


def vector(row: dict[str, Any]) -> dict[str, list[float]]:
    return {key: row["gradient"].get(key, []) for key in EVERY_TOKEN}


def test_the_table_has_every_preset() -> None:
    assert list(GOLDEN) == list(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_is_what_it_was(preset: str) -> None:
    now, then = golden_row(preset), GOLDEN[preset]
    assert now["loss"] == pytest.approx(then["loss"], abs=2e-5)
    assert now["dropped"] == then["dropped"]
    assert now["gradient"].keys() == then["gradient"].keys()
    for key, gradient in then["gradient"].items():
        assert now["gradient"][key] == pytest.approx(gradient, abs=2e-5), key


@pytest.mark.thorough(keep=40)
@pytest.mark.parametrize(("one", "other"), [*itertools.combinations(PRESETS, 2)])
def test_presets_differ(one: str, other: str) -> None:
    a, b = vector(GOLDEN[one]), vector(GOLDEN[other])
    if any(len(a[key]) != len(b[key]) for key in EVERY_TOKEN):
        return  # they train on different samples
    gap = max(np.abs(np.subtract(a[key], b[key])).max(initial=0.0) for key in EVERY_TOKEN)
    if (one, other) in ALIKE:
        assert gap < 2e-6
        return
    assert gap > 1e-4, f"{one} and {other} are the same on this batch"
