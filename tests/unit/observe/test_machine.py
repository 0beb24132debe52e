"""The record of a run's machine, and how full its memory is."""

import os
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from kitae.observe.machine import FILE, machine_of, memory_share, note_machine, this_machine


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert machine_of(tmp_path) is None
    note_machine(tmp_path)
    found = machine_of(tmp_path)
    assert found == this_machine() and found is not None
    assert found.versions["kitae"] == version("kitae") and found.versions["torch"] == version("torch")
    assert found.cores == len(os.sched_getaffinity(0)) and found.memory_gb > 0.1
    for text in ("", "[]", '{"gpus": 1}', '{"gpus": [], "new": 1}'):
        (tmp_path / FILE).write_text(text)
        assert machine_of(tmp_path) is None, text


def test_hardware_in_a_line() -> None:
    found = replace(this_machine(), processor="Xeon", cores=16, memory_gb=127.6, gpus=("H200", "H200", "T4"))
    assert found.hardware == "2 × H200 · T4 · Xeon, 16 cores · 128 GB"


def group(folder: Path, limit: str, used: int, cache: int) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")
    return folder


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:  1000 kB\nMemFree:  100 kB\nMemAvailable:  600 kB\nHugePages_Total:  0\n")
    return path


def test_this_machine() -> None:
    share = memory_share()
    assert share is not None and 0 < share < 1


def test_the_fuller_of_machine_and_container(machine: Path, tmp_path: Path) -> None:
    assert memory_share(machine, tmp_path / "none") == pytest.approx(0.4)
    assert memory_share(machine, group(tmp_path, "1000", 900, 100)) == pytest.approx(0.8)
    assert memory_share(machine, group(tmp_path, "max", 900, 100)) == pytest.approx(0.4)


def test_a_system_that_does_not_say(tmp_path: Path) -> None:
    assert memory_share(tmp_path / "none", tmp_path / "none") is None
