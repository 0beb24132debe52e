import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kitae.errors import StoreError
from kitae.evaluation.statistics import interval_of
from kitae.observe.plots import load_pyplot, plot_run
from kitae.store.run_folder import Metrics


def fabricate(folder: Path, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        Metrics(folder / "metrics.jsonl").append(row)


def steps(count: int) -> list[dict[str, Any]]:
    return [
        {"kind": "step", "step": i, "reward": i / count, "length": 5.0, "entropy": 1.0, "logp_gap": 1e-4}
        for i in range(1, count + 1)
    ]


def evaluation(step: int, low: float, avg: float, high: float) -> dict[str, Any]:
    return {"kind": "eval", "step": step, "avg": avg, "avg_low": low, "avg_high": high}


def size_of(png: Path) -> tuple[int, int]:
    content = png.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def test_a_run_with_evaluations(tmp_path: Path) -> None:
    fabricate(tmp_path, [evaluation(0, 0.4, 0.5, 0.6), *steps(10), evaluation(10, 0.9, 0.95, 1.0)])
    target = plot_run(tmp_path)
    assert target == tmp_path / "plot.png"
    width, height = size_of(target)
    assert width > 500 and height > 300


def test_a_run_of_one_step_without_evaluations_or_updates(tmp_path: Path) -> None:
    fabricate(tmp_path, [{"kind": "step", "step": 1, "reward": float("nan")}])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(steps(1)[0])[:20])  # cut off by a crash
    assert size_of(plot_run(tmp_path, tmp_path / "other.png"))
    assert not (tmp_path / "plot.png").exists()


@pytest.mark.thorough
def test_there_is_a_curve_for_what_was_measured_and_no_half_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    pyplot = load_pyplot()
    monkeypatch.setattr(pyplot, "close", drawn.append)
    rows = [{**row, "grad_norm": 2.0, "groups": 3, "groups_dropped": 1, "groups_with_signal": 2} for row in steps(2)]
    for kl in ({}, {"kl_k3": 0.1}):
        (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
        fabricate(tmp_path, [{**row, **kl} for row in rows])
        plot_run(tmp_path)
    for figure, names in zip(drawn, ([], ["KL to the reference (nats per token)"]), strict=True):
        axes = {axis.get_title(): axis for axis in figure.axes if axis.get_visible()}
        always = ["reward", "response length (tokens)", "entropy (nats per token)", "share of groups with signal"]
        assert list(axes) == [*always, "gradient norm", "log-prob gap, engine against trainer", *names]
        (line,) = axes["share of groups with signal"].get_lines()
        assert line.get_ydata().tolist() == [0.5, 0.5]
        assert all(tick == round(tick) for axis in axes.values() for tick in axis.get_xticks())
    monkeypatch.undo()
    for figure in drawn:
        pyplot.close(figure)


def test_an_evaluation_that_nobody_could_judge(tmp_path: Path) -> None:
    nan = float("nan")
    fabricate(tmp_path, [evaluation(0, nan, nan, nan), *steps(2)])
    assert size_of(plot_run(tmp_path))


def test_other_suites_have_lines_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = load_pyplot()
    drawn: list[Any] = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    rows = [evaluation(0, 0.1, 0.2, 0.3), {**evaluation(0, 0.3, 0.4, 0.5), "suite": "svamp"}]
    fabricate(tmp_path, [*rows, *steps(2), {**evaluation(2, 0.6, 0.7, 0.8), "suite": "svamp"}])
    plot_run(tmp_path)
    monkeypatch.undo()
    (legend,) = [axis.get_legend() for axis in drawn[0].axes if axis.get_legend()]
    assert [text.get_text() for text in legend.get_texts()] == ["training reward", "held out", "svamp"]
    lines = {c.get_label(): c.lines[0].get_ydata().tolist() for c in drawn[0].axes[0].containers}
    assert lines == {"held out": [0.2], "svamp": [0.4, 0.7]}
    pyplot.close(drawn[0])


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(("size", "correct"), [(3, False), (4, True)])
def test_a_perfect_or_hopeless_model_can_be_drawn(tmp_path: Path, size: int, correct: bool) -> None:
    """Where all answers agree a bound of the interval is the mean itself, and must not miss it by rounding."""
    found = interval_of(np.full(size, correct, dtype=np.float32))
    fabricate(tmp_path, [*steps(2), evaluation(2, found.low, found.mean, found.high)])
    assert size_of(plot_run(tmp_path))


@pytest.mark.parametrize("rows", [[], [evaluation(0, 0.1, 0.2, 0.3)]])
def test_nothing_to_draw(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    fabricate(tmp_path, rows)
    with pytest.raises(StoreError, match="has no finished step to draw"):
        plot_run(tmp_path)
    assert not (tmp_path / "plot.png").exists()
