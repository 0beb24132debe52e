"""`kitae show`: filters, JSON and the pager."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from written_runs import HOSTILE, WrittenRun

from kitae.cli import show as showing
from kitae.cli.show import Asked, pager
from kitae.errors import StoreError
from kitae.ui.queries import RolloutFilter, rollouts

Shown = Callable[..., list[tuple[int, int]]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Groups 0 to 2 of step 1, 3 to 5 of step 2; sample 3 of each is cut off, sample 2 of group 1 was not judged."""
    made = WrittenRun(tmp_path).step([[0.0, 0.5], [0.25, 0.5, None], [1.0]])
    return made.step([[1.0, 0.0, 0.5, 0.75], [0.0], [0.5]], text=f"Second {HOSTILE}").finish()


@pytest.fixture
def shown(run: Path, capsys: pytest.CaptureFixture[str]) -> Shown:
    """Group and sample of what is shown, by the JSON of it."""

    def call(one_per_prompt: bool = False, limit: int | None = None, **wanted: object) -> list[tuple[int, int]]:
        showing.show_samples(run, Asked(RolloutFilter(**wanted), one_per_prompt, limit), as_json=True)  # type: ignore[arg-type]
        found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return [(one["group"], one["sample"]) for one in found]

    return call


def test_filters(shown: Shown) -> None:
    last = [(3, 0), (3, 1), (3, 2), (3, 3), (4, 0), (5, 0)]
    assert shown() == shown(step=2) == last
    assert shown(step=1) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert shown(reward_min=0.75) == [(3, 0), (3, 3), (2, 0)]
    assert shown(reward_min=0.2, reward_max=0.5, step=1) == [(0, 1), (1, 0), (1, 1)]
    assert shown(finish="length") == [(3, 3)]
    assert shown(length_min=5) == [(3, 2), (3, 3), (1, 2)] and shown(length_max=3, step=1) == [(0, 0), (1, 0), (2, 0)]
    assert shown(verdict="error") == [(1, 2)]
    assert sorted(shown(text="second")) == last and shown(text="nowhere") == []
    assert shown(text="%") == [] == shown(text="_")
    assert shown(prompt="reverse/1") == [(4, 0), (1, 0), (1, 1), (1, 2)] and shown(prompt="reverse") == []


def test_orders_and_limits(shown: Shown) -> None:
    assert shown(order="best", limit=3) == [(3, 0), (2, 0), (3, 3)]
    assert shown(order="worst", one_per_prompt=True)[:2] == [(4, 0), (3, 1)]
    assert shown(order="longest", limit=2) == [(3, 3), (3, 2)]
    assert shown(order="oldest")[0] == (0, 0)
    with pytest.raises(
        StoreError, match="order must be one of newest, oldest, best, worst, longest, shortest, got 'x'"
    ):
        shown(order="x")


def test_it_is_the_filter_of_the_window(shown: Shown, run: Path) -> None:
    for wanted in ({"text": "answer"}, {"reward_max": 0.5, "order": "longest"}, {"prompt": "reverse/0"}):
        page = rollouts(run, RolloutFilter(**wanted))  # type: ignore[arg-type]
        assert shown(**wanted) == [(row.group, row.sample) for row in page.rows] != []


def test_json_has_all_of_a_sample(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    showing.show_samples(run, Asked(RolloutFilter(step=2), limit=1), as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["text"] == f"Second {HOSTILE}" and found["messages"][0]["text"] == "Reverse 3"
    assert (found["value"], found["components"], found["length"], found["fate"]) == (1.0, {"exact": 1.0}, 3, "trained")
    assert found["advantage"] > 0 and found["reference"] == "answer 3" and found["prompt_id"] == "reverse/0"


def test_nothing_found_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    showing.show_samples(run, Asked(RolloutFilter(text="nowhere")), as_json=False)
    assert capsys.readouterr().out == "no sample passes these filters\n"
    with pytest.raises(StoreError, match="step 7 has no samples; the last step with samples is 2"):
        showing.show_samples(run, Asked(RolloutFilter(step=7, reward_min=0.5)), as_json=False)


def test_plain_output_has_a_few(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = WrittenRun(tmp_path).step([[0.0, 1.0]] * 6).finish()
    showing.show_samples(run, Asked(RolloutFilter()), as_json=False)
    said = capsys.readouterr().out
    assert said.count("answer: ") == 8 and "8 of 12 samples; --limit shows more" in said and "\x1b" not in said
    assert all(len(line) <= 80 for line in said.splitlines())


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(("program", "expected"), [("head -n 3", 3), ("sed -n p", 120), ("cat", 8)])
def test_a_terminal_gets_a_pager_and_may_leave_it(tmp_path: Path, program: str, expected: int) -> None:
    """On a real terminal: all of it with a reader that stays, no more than it wants with one that leaves; `cat` is no
    pager, so that gets a few samples, plainly."""
    run = WrittenRun(tmp_path).step([[0.0, 1.0]] * 60).finish()
    command = [sys.executable, "-c", "import sys; from kitae.cli.main import run; run()", "show", str(run)]
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PAGER": program, "COLUMNS": "80", "TERM": "xterm"}
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, env=environment, text=True) as process:
        os.close(theirs)
        said = _all(ours)
        assert process.wait(60) == 0 and process.stderr is not None and process.stderr.read() == ""
    assert (len(said.splitlines()) if "head" in program else said.count("answer: ")) == expected


def _all(terminal: int) -> str:
    found = b""
    try:
        while piece := os.read(terminal, 65536):
            found += piece
    except OSError:  # Linux says so when the other side is closed
        pass
    os.close(terminal)
    return found.decode()


def test_which_pager(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pager() is None, "nobody sits here"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for wanted, expected in (
        ("head -n 3", ["head", "-n", "3"]),
        ("", None),
        ("cat", None),
        ("no-such-program", None),
        ('a "quotation', None),
    ):
        monkeypatch.setenv("PAGER", wanted)
        assert pager() == expected, wanted


STEERS = "red \x1b[31m \x1b]0;title\x07 over\rwritten \u202eback\u2069 \x9b2J end"


@pytest.mark.parametrize("options", [(), ("--json",)])
@pytest.mark.parametrize("on_terminal", [False, True])
def test_what_a_model_says_cannot_steer_the_terminal(
    tmp_path: Path, options: tuple[str, ...], on_terminal: bool
) -> None:
    """In a pipe and on a terminal; Kitae's own colours remain there."""
    run = WrittenRun(tmp_path).step([[0.0, 1.0]], text=STEERS).finish()
    command = [sys.executable, "-c", "import sys; from kitae.cli.main import run; run()", "show", str(run), *options]
    environment = {**os.environ, "PAGER": "cat", "COLUMNS": "200", "TERM": "xterm"}
    if on_terminal:
        ours, theirs = pty.openpty()
        with subprocess.Popen(command, stdout=theirs, env=environment):
            os.close(theirs)
            said = _all(ours)
        assert options or "\x1b[" in said, "colours of the frame"
    else:
        said = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
        assert "\x1b" not in said
    assert "\\u001b[31m" in said and "\\u202e" in said and "end" in said
    assert not any(
        sign in said for sign in ("\x1b[31m \x1b]", "\x1b]0;", "\x07", "over\rwritten", "\u202e", "\u2069", "\x9b")
    )
    if options:
        assert json.loads(said.splitlines()[0])["text"] == STEERS
