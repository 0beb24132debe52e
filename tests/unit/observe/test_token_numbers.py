"""Records of single tokens: which samples, what is written, what is read back, and how much of it stays."""

from pathlib import Path

import numpy as np
import pytest

from kitae.errors import StoreError
from kitae.observe.token_numbers import FOLDER, TokenChoice, TokenFiles, read_tokens, recorded_steps, with_samples
from kitae.types import FloatArray, Sample, SampleKey


def sample(group: int, index: int, length: int = 3, chain: int = 0, trained: bool = True) -> Sample:
    mask = np.array([False] * 2 + [trained] * length)
    blank = np.zeros(len(mask), dtype=np.float32)
    columns = {"advantage": np.where(mask, np.float32(0.5), blank), "version": np.where(mask, np.float32(7), blank)}
    return Sample(group, index, np.arange(len(mask)), 2, mask, blank, columns, chain)


def record(length: int, start: float = 0.0, **others: FloatArray) -> dict[str, FloatArray]:
    values = (start - np.arange(length)).astype(np.float32)
    return {"logp": values, "ratio": np.ones(length, np.float32), "version": np.full(length, 7.0, np.float32)} | others


def complain(text: str) -> None:
    raise AssertionError(text)


def files(run: Path, limit_mb: float = 10.0) -> TokenFiles:
    return TokenFiles(run, limit_mb, complain)


STEP = [sample(g, i) for g in range(8) for i in range(8)]


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.001, 1), (0.05, 3), (0.5, 32), (1.0, 64)])
def test_a_share_of_the_samples(share: float, count: int) -> None:
    assert len(TokenChoice(share, 10_000, seed=0).among(3, STEP)) == count


def test_the_choice_depends_on_seed_and_step_alone() -> None:
    choice = TokenChoice(0.2, 10_000, seed=0)
    assert choice.among(3, STEP) == choice.among(3, STEP)
    assert choice.among(3, STEP) != choice.among(4, STEP)
    assert choice.among(3, STEP) != TokenChoice(0.2, 10_000, seed=1).among(3, STEP)


def test_no_more_tokens_than_allowed() -> None:
    chosen = TokenChoice(1.0, 20, seed=0).among(1, STEP)
    assert len(chosen) == 6  # of three tokens each
    assert TokenChoice(1.0, 2, seed=0).among(1, STEP) == frozenset()


def test_all_chains_of_a_rollout_or_none() -> None:
    both = [sample(0, 0), sample(0, 0, chain=1), sample(0, 0, chain=2, trained=False)]
    assert TokenChoice(0.1, 100, seed=0).among(1, both) == {(0, 0, 0), (0, 0, 1)}


def test_the_driver_adds_what_it_knows() -> None:
    found = with_samples({(0, 1, 0): record(3)}, [sample(0, 0), sample(0, 1)])
    assert list(found) == [(0, 1, 0)]
    np.testing.assert_array_equal(found[0, 1, 0]["advantage"], [0.5] * 3)
    np.testing.assert_array_equal(found[0, 1, 0]["version"], [7] * 3)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Chains one after the other; a ratio that fp16 cannot hold is the largest that it can, an infinity stays."""
    odd = np.array([1e9, np.inf, np.nan], np.float32)
    records: dict[SampleKey, dict[str, FloatArray]] = {
        (4, 1, 0): record(3, ratio=odd),
        (2, 0, 1): record(1, start=-5),
        (2, 0, 0): record(2),
    }
    files(tmp_path).write(12, records)
    found = read_tokens(tmp_path, 12)
    assert list(found) == [(2, 0), (4, 1)]
    assert found[2, 0]["logp"].tolist() == [0, -1, -5] and found[2, 0]["chain"].tolist() == [0, 0, 1]
    assert found[2, 0]["logp"].dtype == np.float16 and found[2, 0]["version"].tolist() == [7, 7, 7]
    np.testing.assert_array_equal(found[4, 1]["ratio"], np.array([65504, np.inf, np.nan], np.float16))
    assert "value" not in found[2, 0]


def test_equal_content_makes_equal_files(tmp_path: Path) -> None:
    path, records = tmp_path / FOLDER / "step-000003.npz", {(0, 0, 0): record(50)}
    files(tmp_path).write(3, records)
    first = path.read_bytes()
    files(tmp_path).write(3, records)
    assert path.read_bytes() == first and [p.name for p in path.parent.iterdir()] == [path.name]


def test_the_oldest_go_first(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(size=2000).astype(np.float32)
    for step in range(1, 8):
        files(tmp_path, limit_mb=0.03).write(step, {(0, 0, 0): record(2000, logp_old=noise)})
    kept = recorded_steps(tmp_path)
    assert kept[-1] == 7 and 1 < len(kept) < 7 and kept == list(range(kept[0], 8))
    assert sum(path.stat().st_size for path in (tmp_path / FOLDER).iterdir()) <= 30_000
    files(tmp_path, limit_mb=1e-6).write(8, {(0, 0, 0): record(2000)})
    assert recorded_steps(tmp_path) == [8]  # the newest stays, however large


def test_steps_that_are_given_up(tmp_path: Path) -> None:
    writer = files(tmp_path)
    writer.forget_after(0)  # of a run without any
    for step in (1, 2, 3):
        writer.write(step, {(0, 0, 0): record(2)})
    writer.forget_after(2)
    assert recorded_steps(tmp_path) == [1, 2]


def test_nothing_to_write(tmp_path: Path) -> None:
    files(tmp_path).write(1, {})
    assert not (tmp_path / FOLDER).exists()


def test_a_disk_that_refuses_is_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("in the way")
    said: list[str] = []
    writer = TokenFiles(tmp_path, 1.0, said.append)
    writer.write(1, {(0, 0, 0): record(2)})
    writer.write(2, {(0, 0, 0): record(2)})
    assert len(said) == 1 and said[0].startswith("no more tokens are recorded: ")


def test_reading_what_is_not_there(tmp_path: Path) -> None:
    files(tmp_path).write(2, {(0, 0, 0): record(2)})
    with pytest.raises(StoreError, match=r"has recorded \(2\), got 3"):
        read_tokens(tmp_path, 3)
    (tmp_path / FOLDER / "step-000004.npz").write_bytes(b"PK\x03\x04 half of it")
    with pytest.raises(StoreError, match="cannot be read"):
        read_tokens(tmp_path, 4)
