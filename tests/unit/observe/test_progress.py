"""What a run shows: plain lines in a file, a live table on a terminal."""

import io
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from kitae.config.recipe import parse_config
from kitae.config.root import RLConfig
from kitae.observe.progress import LiveProgress, Progress, _cell, make_progress, peak_memory_gb
from kitae.observe.step_report import StepReport

ROW = {
    "kind": "step",
    "step": 2,
    "reward": 0.53125,
    "length": 7.25,
    "entropy": 0.4321,
    "logp_gap": 0.00017,
    "groups_with_signal": 6,
    "generate_tokens_per_second": 12345.6,
    "train_tokens_per_second": 6789.0,
    "step_seconds": 3.0,
}
EVAL = {"kind": "eval", "step": 0, "avg": 0.5, "avg_low": 0.4, "avg_high": 0.6, "prompts": 128}


def reported(row: dict[str, Any]) -> StepReport:
    """A report that makes this row, whatever it is."""
    return cast(StepReport, SimpleNamespace(row=lambda: row))


@pytest.fixture
def config() -> RLConfig:
    return parse_config({"data": {"task": "reverse"}, "training": {"steps": 12}})


def everything(progress: Progress) -> None:
    """What a run does to its observer."""
    with progress:
        progress.status("loading")
        progress.evaluated(EVAL)
        progress.status("step 1: 3/64 rollouts")
        progress.step(reported(ROW))
        progress.note("prompt [x/y] was skipped: [/red]")
        progress.step(reported({"kind": "step", "step": 3, "reward": float("nan"), "step_seconds": 1.0}))
        progress.finished(Path("runs/r-001"))


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_plain_lines(config: RLConfig, capsys: pytest.CaptureFixture[str]) -> None:
    everything(Progress(config, Path("runs/r-001")))
    assert capsys.readouterr().out.splitlines() == [
        "grpo on reverse with smollm2-135m; run folder runs/r-001",
        "held-out accuracy at step 0: 0.500 [0.400, 0.600] on 128 prompts",
        "step 2/12  reward 0.531  length 7.2  entropy 0.432  gap 0.0002  signal 6  gen tok/s 12,346  "
        "train tok/s 6,789  s/step 3.0  ETA 30 s",
        "prompt [x/y] was skipped: [/red]",
        "step 3/12  reward nan  length –  entropy –  gap –  signal –  gen tok/s –  train tok/s –  s/step 1.0  ETA 18 s",
    ]


def test_partial_credit_is_a_score_and_other_suites_have_a_name(
    config: RLConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress(config, Path("runs/r-001"))
    progress.evaluated({**EVAL, "partial": True})
    progress.evaluated({**EVAL, "partial": False, "suite": "svamp"})
    progress.evaluated({**EVAL, "partial": True, "suite": "svamp", "avg": float("nan")})
    assert capsys.readouterr().out.splitlines() == [
        "held-out score at step 0: 0.500 [0.400, 0.600] on 128 prompts",
        "svamp accuracy at step 0: 0.500 [0.400, 0.600] on 128 prompts",
        "svamp score at step 0: not known: all errors, on 128 prompts",
    ]


UNUSUAL = {
    **ROW,
    "generate_tokens_per_second": 0.0,
    "train_tokens_per_second": 0.0,
    "errors": 3,
    "error_share": 3 / 64,
    "first_error": "ValueError: no number\nTraceback",
    "updates": 0.0,
    "staleness": 0.5,
    "staleness_max": 1,
}


def test_what_is_out_of_the_ordinary_is_on_the_line(config: RLConfig, capsys: pytest.CaptureFixture[str]) -> None:
    logged: list[str] = []
    progress = Progress(config, Path("runs/r-001"), logged.append)
    progress.step(reported(UNUSUAL))
    progress.step(reported({**UNUSUAL, "step": 3, "updates": 1.0, "staleness": 0.0, "staleness_max": 0}))
    first, why, second = capsys.readouterr().out.splitlines()
    assert first.endswith(
        "gen tok/s –  train tok/s –  s/step 3.0  ETA 30 s  errors 3 of 64  no update  staleness 0.50 (at most 1)"
    )
    assert why == "not judged: ValueError: no number (kitae show runs/r-001 --errors)"
    assert second.endswith("errors 3 of 64")
    assert logged == [first, why, second]


def test_the_live_table_has_remarks_where_there_are_any_and_logs_lines(config: RLConfig) -> None:
    logged: list[str] = []
    progress = LiveProgress(config, Path("runs/r-001"), logged.append)
    output = io.StringIO()
    progress.console = Console(file=output, width=200)
    progress.step(reported(ROW))
    progress.console.print(progress._draw())
    assert "remarks" not in output.getvalue()
    progress.step(reported({**UNUSUAL, "step": 3}))
    progress.console.print(progress._draw())
    assert "remarks" in output.getvalue() and "errors 3 of 64, no update" in output.getvalue()
    assert [line.split("  ")[0] for line in logged] == [
        "step 2/12",
        "step 3/12",
        "not judged: ValueError: no number (kitae show runs/r-001 --errors)",
    ]


def test_eta_is_in_minutes_when_long_and_forgets_slow_beginnings(config: RLConfig) -> None:
    progress = Progress(config, Path("r"))
    assert progress._eta({"step": 0, "step_seconds": 100.0}) == "20 min"
    for _ in range(10):
        eta = progress._eta({"step": 2, "step_seconds": 1.0})
    assert eta == "10 s"


@pytest.mark.parametrize("terminal", [True, False])
def test_live_table(config: RLConfig, terminal: bool) -> None:
    progress = LiveProgress(config, Path("runs/r-001"))
    output = io.StringIO()
    progress.console = Console(file=output, force_terminal=terminal, width=120)
    progress._live.console = progress.console
    everything(progress)
    text = output.getvalue()
    for part in ("grpo on reverse with smollm2-135m", "held-out accuracy", "gen tok/s", "0.531", "12,346", "done"):
        assert part in text
    assert "prompt [x/y] was skipped: [/red]" in text


def test_live_table_of_a_run_that_fails(config: RLConfig) -> None:
    progress = LiveProgress(config, Path("r"))
    output = io.StringIO()
    progress.console = progress._live.console = Console(file=output, width=120)
    with pytest.raises(RuntimeError, match="no"), progress:
        raise RuntimeError("no")
    assert "stopped" in output.getvalue()


def test_the_table_can_be_drawn_while_steps_arrive(config: RLConfig) -> None:
    """rich draws in a thread of its own."""
    progress = LiveProgress(config, Path("r"))
    problems: list[BaseException] = []
    stop = threading.Event()

    def draw() -> None:
        try:
            while not stop.is_set():
                progress._draw()
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=draw)
    thread.start()
    for step in range(3000):
        progress.step(reported({**ROW, "step": step}))
    stop.set()
    thread.join()
    assert problems == []


def test_a_terminal_gets_the_table_and_a_file_the_lines(config: RLConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, kind in ((Screen(), LiveProgress), (io.StringIO(), Progress)):
        monkeypatch.setattr("sys.stdout", stream)
        made: Any = make_progress(config, Path("r"), print)
        assert type(made) is kind


def test_peak_memory_is_plausible() -> None:
    assert 0.01 < peak_memory_gb() < 1000


KINDS: dict[str, dict[str, Any]] = {
    "rl": {"data": {"task": "reverse"}},
    "kl": {"data": {"task": "reverse"}, "algorithm": {"kl": {"coef": 0.01}, "reference": "frozen"}},
    "distil": {"data": {"task": "reverse"}, "method": {"kind": "distil", "teacher": "tiny"}},
    "sft": {"data": {"path": "chats.jsonl"}, "method": {"kind": "sft"}},
    "dpo": {"data": {"path": "pairs.jsonl"}, "method": {"kind": "dpo"}},
    "reward": {"data": {"path": "pairs.jsonl"}, "method": {"kind": "reward"}},
}
LONG = {
    **UNUSUAL,
    "step": 12_345,
    "length": 31_999.5,
    "loss": 12.3456,
    "accuracy": 0.987,
    "margin": -12.345,
    "grad_norm": 1234.5,
    "kl_k3": 0.1234,
    "teacher_kl": 0.1234,
    "generate_tokens_per_second": 123_456.0,
    "train_tokens_per_second": 123_456.0,
    "step_seconds": 1234.5,
    "engine_restarts": 2,
}


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("kind", KINDS)
def test_lines_fit_the_screen(
    kind: str, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing wraps; whole columns are left out, and the log has all of them."""
    monkeypatch.setenv("COLUMNS", str(width))
    logged: list[str] = []
    config = parse_config({**KINDS[kind], "training": {"steps": 20_000}})
    progress = Progress(config, Path("r"), logged.append)
    for row in (LONG, {**LONG, "errors": 0, "updates": 1.0, "staleness_max": 0, "engine_restarts": 0}):
        progress.step(reported(row))
    said = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("not judged")]
    assert all(len(line) <= width for line in said)
    main = "loss 12.3456" if config.method.kind in ("sft", "dpo", "reward") else "reward 0.531"
    lines = [line for line in said if line.startswith("step ")]
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("step 12345/20000  ") and main in line and "ETA " in line
    full = [line for line in logged if line.startswith("step ")]
    for part in ("errors 3 of 64", "no update", "staleness 0.50 (at most 1)", "engine restarts 2"):
        assert part in " ".join(" ".join(said).split()) and part in full[0]
    assert all(set(a.split("  ")) <= set(b.split("  ")) for a, b in zip(lines, full, strict=True))
    assert all(title in full[0] for title, _, _ in progress.columns)


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", [LONG, {**LONG, "errors": 0, "updates": 1.0, "staleness_max": 0, "engine_restarts": 0}])
def test_the_table_fits_the_screen(row: dict[str, Any], kind: str, width: int) -> None:
    progress = LiveProgress(parse_config({**KINDS[kind], "training": {"steps": 20_000}}), Path("r"))
    progress.console = Console(file=io.StringIO(), width=width)
    for step in range(3):
        progress.step(reported({**row, "step": 12_345 + step}))
    progress.status("step 12346: 1234 of 4096 rollouts, " + "and more to tell than there is room for " * 3)
    with progress.console.capture() as drawn:
        progress.console.print(progress._draw())
    head, *lines = drawn.get().splitlines()
    assert all(len(line) <= width for line in (head, *lines))
    titles = {title: key for title, key, _ in progress.columns}
    forms = {title: form for title, _, form in progress.columns}
    assert head.split()[0] == "step" and ("reward" in head or "loss" in head) and "ETA" in head
    rows = [line for line in lines if re.match(r" *\d+  ", line)]
    assert [line.split()[0] for line in rows] == ["12345", "12346", "12347"]
    shown = [cell for cell in re.split(r"  +", head.strip()) if cell not in ("ETA", "remarks")]
    assert set(shown) <= titles.keys() and len(shown) >= 3
    for line in rows:
        cells = re.split(r"  +", line.strip())
        assert "…" not in line
        assert cells[1 : len(shown)] == [_cell(row, titles[t], forms[t]) for t in shown[1:]]
    if row is LONG:
        assert "engine restarts 2" in " ".join(drawn.get().split())


@pytest.mark.thorough
def test_the_peak_is_that_of_this_process_and_not_of_its_parent() -> None:
    """`getrusage` counts what the parent had when it started the program."""
    code = "from kitae.observe.progress import peak_memory_gb; print(peak_memory_gb())"
    held = bytearray(b"x" * 2**30)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.01 < float(found.stdout) < 0.9
    assert peak_memory_gb() > 1 and len(held) == 2**30


def test_a_system_that_does_not_tell_the_peak(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tpython\n")
    for status in (tmp_path / "status", tmp_path / "nothing"):
        assert peak_memory_gb(status) > 0.01
