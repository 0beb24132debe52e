"""Tinker's own client against `kitae tinker`."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_the_official_client(run_client: Callable[..., Any], tmp_path: Path) -> None:
    command = [
        sys.executable, "-c", "from kitae.cli.main import run; run()", "tinker", "tiny", "--port", "0",
        "--folder", str(tmp_path), "model.device=cpu", "model.dtype=float32",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = re.search(r"http://\S+", process.stdout.readline())
        assert address is not None
        found = run_client("tinker", "tinker_official.py", address[0], "tiny")
    finally:
        process.kill()
        process.communicate()
    assert found["losses"][-1] < 0.7 * found["losses"][0]
    assert found["gap"] < 1e-5 and found["apart"] < 1e-5
    assert found["tokens"] == [6, 6] and found["prompt"] == 4 and found["top"] == [2] * 4
    assert all(found["kinds"].values()) and abs(found["custom"]) < 1e-6
    assert found["loaded"][0] == found["loaded"][1]
    assert found["saved"][0] == "weights/one"
    assert "RequestFailedError" in found["refused"] and "must be one of cross_entropy" in found["refused"]
