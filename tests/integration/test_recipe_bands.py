"""The small recipes still do what is said of them: trained as they are, none ends worse than what was measured."""

from pathlib import Path

import pytest
from recipe_bands import falls_short

from kitae.api import train
from kitae.cli.recipes import measurements
from kitae.store.run_folder import Metrics

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("recipe", ["quickstart", "lora"])
def test_a_recipe_ends_where_it_did(recipe: str, tmp_path: Path) -> None:
    before = measurements(recipe)
    train(recipe, overrides=[f"run.dir={tmp_path}"])
    (metrics,) = tmp_path.glob("*/metrics.jsonl")
    last = Metrics(metrics).rows("eval")[-1]
    end = last.get("avg", last.get(before[0].score))
    assert not falls_short(before, end, before[0].prompts), f"{recipe} ended at {end}"
