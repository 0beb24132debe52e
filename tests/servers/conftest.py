"""A real `kitae serve` on a free port, and other people's clients, each run by the interpreter of its own environment.

`make test-servers` makes the environments. A test whose environment is absent is skipped, and says so.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parent.parent / ".venv-servers"
MODEL = "smollm2-135m"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.servers)


@pytest.fixture(scope="session")
def serve() -> Iterator[Callable[..., str]]:
    """`serve("smollm2-135m", "--queue", "8")` gives the address of a server with these arguments, started once."""
    running: dict[tuple[str, ...], tuple[subprocess.Popen[str], str]] = {}

    def start(*arguments: str) -> str:
        if arguments not in running:
            command = [
                sys.executable,
                "-c",
                "from kitae.cli.main import run; run()",
                "serve",
                *arguments,
                "--port",
                "0",
            ]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found is not None, f"kitae serve {' '.join(arguments)} did not start"
            running[arguments] = process, found[0]
        return running[arguments][1]

    yield start
    for process, _ in running.values():
        process.terminate()
        process.communicate(timeout=60)


@pytest.fixture(scope="session")
def address(serve: Callable[..., str]) -> str:
    """Of SmolLM2 in fp32, so that the company of a request changes nothing that a test can see."""
    return serve(MODEL, "model.dtype=float32")


@pytest.fixture(scope="session")
def run_client() -> Callable[..., Any]:
    """`run_client("openai-3", "chat.py", address)`: what the script prints last, which must be JSON."""

    def run(environment: str, script: str, *arguments: str, timeout: float = 600) -> Any:
        interpreter = ENVIRONMENTS / environment / "bin" / "python"
        if not interpreter.exists():
            pytest.skip(f"there is no {interpreter}: make test-servers makes it")
        told = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "OPENAI_"))}
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(
            [str(interpreter), str(HERE / "clients" / script), *arguments],
            capture_output=True,
            check=False,
            text=True,
            timeout=timeout,
            env={**told, **offline},
        )
        assert done.returncode == 0, f"{script} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return json.loads(done.stdout.strip().splitlines()[-1])

    return run
