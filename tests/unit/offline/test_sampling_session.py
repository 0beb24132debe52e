"""Sampling into a file with the tiny model: what is in it, and that being killed changes nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from kitae.config.recipe import override_config, parse_config
from kitae.config.root import RLConfig
from kitae.envs.rollouts import Episodes
from kitae.errors import ConfigChangedError, ConfigError, StoreError, VerifierError
from kitae.offline.answer_selection import Selection
from kitae.offline.sampling import PartialFile, SampleOrder, SampleWatcher
from kitae.run.sample_run import sample_file, sample_groups

SCORES = """
def even(response, reference, context):
    return float(len(response) % 2 == 0)

def broken(response, reference, context):
    if len(response) % 2:
        raise ValueError("odd")
    return 1.0
"""


@pytest.fixture
def config(tmp_path: Path) -> RLConfig:
    (tmp_path / "scores.py").write_text(SCORES)
    values = {
        "model": {"path": "tiny", "device": "cpu", "dtype": "float32"},
        "data": {"task": "arithmetic"},
        "verifier": {"name": f"{tmp_path / 'scores.py'}:even", "workers": 1, "check_gold": False},
        "sampling": {"max_tokens": 6},
        "engine": {"memory_gb": 0.05},
    }
    found = parse_config(values)
    assert isinstance(found, RLConfig)
    return found


def order(keep: Any = "all", prompts: int = 6, **more: Any) -> SampleOrder:
    return SampleOrder(prompts, 4, Selection(keep, truncated=True), **more)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.thorough
def test_a_file_has_the_rows_in_the_order_of_the_prompts(config: RLConfig, tmp_path: Path) -> None:
    output = tmp_path / "all.jsonl"
    tally = sample_file(config, order(), output)
    rows = rows_of(output)
    assert [row["id"] for row in rows] == [f"arithmetic/train/{i}" for i in range(6) for _ in range(4)]
    assert all(row["score"] == float(len(row["completion"]) % 2 == 0) == float(row["label"]) for row in rows)
    assert (tally.prompts, tally.answers, tally.rows, tally.errors) == (6, 24, 24, 0)
    assert tally.score == pytest.approx(sum(row["score"] for row in rows) / 24)
    left = {p.name for p in tmp_path.iterdir()} - {"__pycache__"}
    assert left == {"all.jsonl", "scores.py"}, "nothing is left beside it"
    groups = sample_groups(config, 6, 4)
    assert [r.text for g in groups for r in g.rollouts] == [row["completion"] for row in rows]
    later = tmp_path / "later.jsonl"
    sample_file(config, order(prompts=2, first=4), later)
    assert rows_of(later) == rows[16:]


class Killed(BaseException):
    pass


def test_one_that_was_killed_goes_on(config: RLConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    sample_file(config, order("pairs"), whole)
    sample = Episodes._sample
    sampled: list[str] = []

    async def crash(self: Episodes, episode: Any, journal: Any) -> Any:
        rollout = await sample(self, episode, journal)
        sampled.append(episode.id)
        if len(sampled) == 9:
            raise Killed
        return rollout

    with monkeypatch.context() as patch:
        patch.setattr(Episodes, "_sample", crash)
        with pytest.raises(Killed):
            sample_file(config, order("pairs"), broken)
    assert not broken.exists() and PartialFile.folder_of(broken).is_dir()
    first = set(sampled)

    async def count(self: Episodes, episode: Any, journal: Any) -> Any:
        sampled.append(episode.id)
        return await sample(self, episode, journal)

    sampled.clear()
    monkeypatch.setattr(Episodes, "_sample", count)
    sample_file(config, order("pairs"), broken)
    assert rows_of(broken) == rows_of(whole)
    assert len(sampled) < 24 and not first & set(sampled)  # what was journalled was not sampled again


def test_a_file_is_not_overwritten_and_keeps_its_settings(config: RLConfig, tmp_path: Path) -> None:
    output = tmp_path / "all.jsonl"
    PartialFile(output, config).close()
    other = override_config(config, ["sampling.temperature=0.5"])
    with pytest.raises(ConfigChangedError, match=r"sampling\.temperature: was 1\.0, is 0\.5"):
        sample_file(other, order(), output)
    for name, dtype in (("weights_dtype", "float8"), ("cache_dtype", "int8")):
        rounded = override_config(config, [f"engine.{name}={dtype}"])
        with pytest.raises(ConfigChangedError, match=rf"engine\.{name}: was 'model', is '{dtype}'"):
            sample_file(rounded, order(), output)
    sample_file(override_config(config, ["engine.max_batch=8"]), order(prompts=1), output)
    with pytest.raises(StoreError, match=r"all\.jsonl exists already"):
        sample_file(config, order(), output)
    with pytest.raises(StoreError, match="there is no folder"):
        sample_file(config, order(), tmp_path / "nowhere" / "x.jsonl")


def test_answers_that_cannot_be_judged_are_counted_and_too_many_are_refused(config: RLConfig, tmp_path: Path) -> None:
    broken = override_config(config, [f"verifier.name={tmp_path / 'scores.py'}:broken", "verifier.max_error_share=1"])
    tally = sample_file(broken, order(), tmp_path / "all.jsonl")
    rows = rows_of(tmp_path / "all.jsonl")
    assert 0 < tally.errors < 24 and len(rows) == 24 - tally.errors
    assert all(row["score"] == 1.0 for row in rows)
    assert tally.score == 1.0 and "odd" in tally.first_error
    strict = override_config(broken, ["verifier.max_error_share=0.01"])
    with pytest.raises(VerifierError, match=r"answers could not be judged, more than verifier\.max_error_share"):
        sample_file(strict, order(), tmp_path / "strict.jsonl")
    assert not (tmp_path / "strict.jsonl").exists()


def test_a_prompt_that_does_not_fit_is_counted(config: RLConfig, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    rows = [{"question": "short", "answer": "1"}, {"question": "long " * 3000, "answer": "1"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    notes: list[str] = []

    class Heard(SampleWatcher):
        def note(self, text: str) -> None:
            notes.append(text)

    own = override_config(config, [f"data.path={path}", "data.shuffle=false"])
    tally = sample_file(own, order(prompts=2), tmp_path / "all.jsonl", Heard())
    assert (tally.prompts, tally.impossible, tally.answers) == (2, 1, 4)
    assert any("questions.jsonl:2 cannot be asked" in note for note in notes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts": 0}, "prompts must be at least 1, got 0"),
        ({"first": -1}, "first must be at least 0, got -1"),
    ],
)
def test_orders_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        order(**settings)
    with pytest.raises(ConfigError, match="n must be at least 2 for keep = 'pairs', got 1"):
        SampleOrder(1, 1, Selection("pairs"))
