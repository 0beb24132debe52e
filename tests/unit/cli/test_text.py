"""Tables as text, on screens of any width."""

import pytest

from kitae.chains.chain_report import HEADER, StageLine, cells
from kitae.cli.text import table

ROWS = [["stage", "status", "rows", "time"], ["01-sft", "finished", "1,024", "12 s"], ["02-rl", "begun", "–", "–"]]


def test_a_table_that_fits_is_one() -> None:
    assert (
        table(ROWS, left=2, width=80)
        == table(ROWS, left=2)
        == ("stage   status     rows  time\n01-sft  finished  1,024  12 s\n02-rl   begun         –     –")
    )


def test_what_has_no_room_comes_below() -> None:
    assert table(ROWS, left=2, width=22) == (
        "stage   status\n01-sft  finished\n02-rl   begun\n\n"
        "stage    rows  time\n01-sft  1,024  12 s\n02-rl       –     –"
    )


@pytest.mark.parametrize("width", [80, 60])
def test_a_chain_fits_the_screen(width: int) -> None:
    line = StageLine(
        "02-preferences", "distil-file", "finished", 1, measure="divergence", before=12.345, after=1.234, rows=123_456,
        steps=12_345, seconds=123_456.0, tokens=123_456_789, peak_gb=123.4, score=(0.123, 0.111, 0.222), output="x",
    )  # fmt: skip
    text = table([list(HEADER), cells(line)], left=4, width=width)
    assert all(len(each) <= width for each in text.splitlines())
    assert all(cell in text for cell in (*HEADER, *cells(line)))
