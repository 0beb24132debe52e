"""Whatever happens to a run, every prompt is trained on once, dropped with a reason, or still pending: 200 trials."""

from pathlib import Path

import pytest
from faults import KINDS, trial

QUICK = 10  # one of each kind


@pytest.mark.parametrize(
    "seed", [*range(QUICK), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(QUICK, 200))]
)
def test_the_ledger_balances_after(seed: int, tmp_path: Path) -> None:
    trial(seed, tmp_path)


def test_every_kind_of_fault_is_tried() -> None:
    assert {KINDS[seed % len(KINDS)] for seed in range(QUICK)} == set(KINDS)
