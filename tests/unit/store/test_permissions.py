"""Who may read what a run writes."""

import os
from pathlib import Path

import pytest

from kitae.store.disk import private


@pytest.mark.parametrize(("shared", "modes"), [(False, (0o700, 0o600)), (True, (0o755, 0o644))])
def test_modes_of_what_is_made(tmp_path: Path, shared: bool, modes: tuple[int, int]) -> None:
    before = os.umask(0o022)
    try:
        with private(shared), private(shared):
            (tmp_path / "folder").mkdir()
            (tmp_path / "folder" / "file").write_text("x")
        assert tuple((tmp_path / name).stat().st_mode & 0o777 for name in ("folder", "folder/file")) == modes
        assert os.umask(0o022) == 0o022, "the process has its own again"
    finally:
        os.umask(before)
