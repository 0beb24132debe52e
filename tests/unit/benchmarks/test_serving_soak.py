"""Some seconds of the soak of the server; `benchmarks/serving_soak.py` itself runs for as long as one likes."""

import subprocess
import sys

import pytest
from benchmark_scripts import FOLDER


@pytest.mark.slow
def test_some_seconds_under_clients_that_behave_badly() -> None:
    arguments = ["--seconds", "4", "--connections", "150", "--concurrent", "20", "--pause", "0.2", "--growth", "200"]
    ran = subprocess.run(
        [sys.executable, str(FOLDER / "serving_soak.py"), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "lost 0; answered with 5xx 0" in ran.stdout and "| whole | answered |" in ran.stdout
