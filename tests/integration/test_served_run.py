"""A run on servers given by address, one of which does not tell the truth."""

import json
import socket
import sqlite3
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import finish, kitae

STAND_INS = Path(__file__).parents[1] / "stand_ins"
SERVE = f"""
import runpy, sys
sys.path.insert(0, {str(STAND_INS)!r})
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
"""


@pytest.fixture
def servers(tiny_folder: Callable[[str], Path]) -> Iterator[list[str]]:
    """The addresses of an honest one and of a liar."""
    running, urls = [], []
    for more in ([], ["--lies"]):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        words = ["--model", str(tiny_folder("llama")), "--port", str(port)]
        running.append(kitae(*words, *more, script=SERVE))
        urls.append(f"http://127.0.0.1:{port}")
    for url in urls:
        _wait_for(f"{url}/health")
    yield urls
    for program in running:
        program.kill()
        program.ended()


def _wait_for(url: str) -> None:
    for _ in range(240):
        try:
            urllib.request.urlopen(url).close()
            return
        except OSError:
            time.sleep(0.25)
    raise TimeoutError(url)


@pytest.mark.sentinel
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
        "pipeline.refill": 0,
        "verifier.max_error_share": 1.0,
        "training.steps": 3,
        "training.prompts_per_step": 4,
        "training.group_size": 2,
        "sampling.max_tokens": 8,
        "eval.prompts": 0,
        "run.dir": tmp_path,
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    finish(kitae("train", "arithmetic", *words))
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
