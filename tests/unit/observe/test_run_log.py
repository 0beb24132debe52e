"""RUN/console.log holds what the user saw."""

import logging
import warnings
from pathlib import Path

import pytest

from kitae.observe.run_log import Console


def test_everything_seen_is_in_the_file_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.say("before there is a folder")
    with console.attached(tmp_path):
        console.log("step 1/2")
        logging.getLogger("kitae").warning("no C++ compiler found: %s", "plain torch")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("old", DeprecationWarning, stacklevel=1)
        console.say("the end")
    logging.getLogger("kitae").info("nobody asked")
    lines = [line.partition("  ")[2] for line in (tmp_path / "console.log").read_text().splitlines()]
    assert lines[0].startswith("$ kitae")
    assert lines[1:4] == ["before there is a folder", "step 1/2", "warning: no C++ compiler found: plain torch"]
    assert "DeprecationWarning: old" in lines[4] and lines[-1] == "the end"
    seen = capsys.readouterr()
    assert seen.out.splitlines() == ["before there is a folder", "the end"]
    assert seen.err.startswith("warning: no C++ compiler found: plain torch")


def test_a_second_session_appends(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with Console().attached(tmp_path):
            Console().log("of nobody")
        console = Console()
        with console.attached(tmp_path):
            console.log(text)
    text = (tmp_path / "console.log").read_text()
    assert text.count("$ kitae") == 4 and text.index("first") < text.index("second") and "nobody" not in text


def test_a_folder_that_is_gone_ends_nothing(tmp_path: Path) -> None:
    console = Console()
    with console.attached(tmp_path / "gone"):
        console.log("x")
