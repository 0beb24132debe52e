"""What shipped recipes did, as it is kept and told."""

from pathlib import Path

import pytest
from recipe_bands import falls_short

from kitae.cli import recipes
from kitae.cli.recipes import Measurement, by_hardware, measurements, told, write
from kitae.config.locate import shipped_recipes
from kitae.errors import ConfigError


def run(recipe: str = "sort", seed: int = 0, end: float = 0.95, hardware: str = "one GPU", **more: str) -> Measurement:
    return Measurement(recipe, seed, hardware, ((0, 0.15), (60, end)), seconds=46.4, prompts=128, **more)


def test_what_is_shipped_is_of_shipped_recipes_and_has_a_beginning_and_an_end() -> None:
    found = measurements()
    assert found and {m.recipe for m in found} <= {path.stem for path in shipped_recipes()}
    for m in found:
        steps = [step for step, _ in m.curve]
        assert steps[0] == 0 and steps == sorted(set(steps)) and m.steps > 0, m
        assert m.seconds > 0 and m.hardware and m.commit and m.versions["torch"], m


def test_a_newer_run_takes_the_place_of_an_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "FILE", tmp_path / "measured.jsonl")
    write([run(seed=1), run(seed=0), run("lora")])
    write([run(seed=1, end=0.98), run(seed=1, hardware="2 CPU cores")])
    assert measurements("lora") == [run("lora")]
    assert measurements("sort") == [run(seed=1, hardware="2 CPU cores"), run(), run(seed=1, end=0.98)]
    assert [len(runs) for runs in by_hardware(measurements())] == [1, 1, 2]


def test_a_damaged_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "FILE", tmp_path / "measured.jsonl")
    (tmp_path / "measured.jsonl").write_text('{"recipe": "sort"}\n')
    with pytest.raises(ConfigError, match=r"measured\.jsonl must hold one measurement a line"):
        measurements()


def test_seeds_are_told_in_a_line() -> None:
    assert told([run(), run(seed=2, end=0.984)]) == (
        "held-out accuracy 0.15, 0.15 → 0.95, 0.98 in 60 steps, 46 s on one GPU (seeds 0, 2)"
    )
    assert "loss 0.150 → 0.005 in" in told([run(end=0.005, score="loss")])


@pytest.mark.parametrize(("end", "short"), [(1.0, False), (0.96, False), (0.926, False), (0.92, True), (0.0, True)])
def test_an_accuracy_may_scatter_as_its_prompts_do(end: float, short: bool) -> None:
    assert falls_short([run(end=0.96), run(end=0.98)], end, prompts=128) == short


@pytest.mark.parametrize(("end", "short"), [(0.001, False), (0.009, False), (0.02, True)])
def test_a_loss_may_be_twice_the_largest(end: float, short: bool) -> None:
    assert falls_short([run(end=0.005, score="loss")], end, prompts=64) == short


def test_where_all_were_right_a_few_may_be_wrong() -> None:
    assert not falls_short([run(end=1.0)], 0.99, prompts=128)
    assert falls_short([run(end=1.0)], 0.95, prompts=128)
