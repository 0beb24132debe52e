"""Damage anywhere in the folder of a run, or of its model, is never used in silence."""

import pytest
from damage import Trial


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000))
def test_nothing_damaged_is_used_in_silence(seed: int) -> None:
    Trial(seed)()
