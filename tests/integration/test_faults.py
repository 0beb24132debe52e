"""Whatever happens to a run, every prompt is trained on once, dropped or skipped with a reason, or still pending."""

from pathlib import Path

import pytest
from faults import KINDS, Trial

QUICK = len(KINDS)  # one of each kind


@pytest.mark.sentinel
@pytest.mark.parametrize(
    "seed", [*range(QUICK), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(QUICK, 200))]
)
def test_nothing_is_lost_after(seed: int, tmp_path: Path) -> None:
    Trial(seed, tmp_path)()


def test_every_kind_of_fault_is_tried() -> None:
    assert {KINDS[seed % len(KINDS)] for seed in range(QUICK)} == set(KINDS)
