"""Spans and shares."""

import time
from pathlib import Path

import pytest

from kitae.errors import StoreError
from kitae.observe.timeline import FILE, Timeline, busy_shares, draw, read


def row(part: str, start: float, end: float, step: int = 1) -> dict[str, object]:
    return {"part": part, "step": step, "start": start, "end": end}


def test_overlapping_spans_count_once() -> None:
    rows = [row("generate", 0, 4), row("generate", 2, 6), row("generate", 8, 9), row("train", 5, 10)]
    assert busy_shares(rows) == {"generate": pytest.approx(0.7), "train": pytest.approx(0.5)}
    assert busy_shares([]) == {}


def test_a_resumed_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first = Timeline(tmp_path)
    with first.span("train", 1):
        time.sleep(0.02)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"part": "tra\n')  # cut off by a crash
    second = Timeline(tmp_path)
    with second.span("sync", 2):
        time.sleep(0.01)
    one, two = read(tmp_path)
    assert one["end"] - one["start"] >= 0.02 and one["end"] <= two["start"] < two["end"]


def test_a_run_without_one(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="has no timeline"):
        draw(tmp_path)
