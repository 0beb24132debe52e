"""A run on servers given by address, one of which does not tell the truth."""

import json
import os
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
RUN = "from kitae.cli.main import run; run()"


@pytest.fixture
def servers(tiny_folder: Callable[[str], Path]) -> Iterator[list[str]]:
    """The addresses of an honest one and of a liar."""
    path = os.pathsep.join(map(str, (TESTS / "stand_ins", TESTS, TESTS.parent)))
    running, urls = [], []
    for more in ([], ["--lies"]):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_folder("llama")), "--port", str(port)]
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        running.append(subprocess.Popen([sys.executable, *words, *more], env=environment))
        urls.append(f"http://127.0.0.1:{port}")
    for url in urls:
        _wait_for(f"{url}/health")
    yield urls
    for program in running:
        program.kill()
        program.wait()


def _wait_for(url: str) -> None:
    for _ in range(240):
        try:
            urllib.request.urlopen(url).close()
            return
        except OSError:
            time.sleep(0.25)
    raise TimeoutError(url)


def test_a_server_that_lies_is_taken_out_of_a_run(
    servers: list[str], tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    honest, liar = servers
    settings = {
        "model.path": tiny_folder("llama"),
        "model.dtype": "float32",
        "engine.kind": "vllm",
        "engine.urls": json.dumps(servers),
        "engine.spot_check": 0.5,
        "algorithm.filter": "none",
        "pipeline.refill": "false",
        "verifier.max_error_share": 1.0,
        "training.steps": 3,
        "training.prompts_per_step": 4,
        "training.group_size": 2,
        "sampling.max_tokens": 8,
        "eval.prompts": 0,
        "run.dir": tmp_path,
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-c", RUN, "train", "arithmetic", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (folder,) = tmp_path.iterdir()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "spot_checked" in row]
    assert [row["step"] for row in rows] == [1, 2, 3] and all(row["spot_checked"] == 4 for row in rows)
    assert all(row["probe_gap"] < 1e-4 for row in rows)
    assert rows[0]["spot_refused"] == 4 and rows[0]["samples_trained"] == 4, (
        "what the honest one answered is trained on"
    )
    assert rows[-1]["spot_refused"] == 0 and rows[-1]["samples_trained"] == 8
    with sqlite3.connect(f"file:{folder / 'journal.sqlite'}?mode=ro", uri=True) as journal:
        events = [str(row) for row in journal.execute("select * from events")]
    refusals = [event for event in events if "engine refused" in event]
    assert refusals and all(liar in event and honest not in event for event in refusals)
