"""How full the memory is."""

from pathlib import Path

import pytest

from kitae.observe.machine import memory_share


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
