"""The numbers of a run over HTTP."""

import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from pydantic import ValidationError

from kitae.observe.config import ObserveConfig
from kitae.observe.prometheus import MetricsServer
from kitae.observe.step_report import StepReport


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    found = MetricsServer(Path("runs/toy-001"), "127.0.0.1", 0)
    yield found
    found.close()


def get(server: MetricsServer, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return str(answer.read().decode())


def test_the_last_numbers(server: MetricsServer) -> None:
    assert get(server) == ""
    for step, reward in ((1, 0.25), (2, 0.5)):
        row = {"kind": "step", "step": step, "reward": reward, "reward/format": 1, "loss": None, "first_error": "x"}
        server.step(cast(StepReport, SimpleNamespace(step=step, row=lambda row=row: row)))
    server.evaluated({"kind": "eval", "step": 2, "avg": 0.75, "pass@1": 0.75})
    server.found("lr-too-high")
    label = '{run="toy-001"}'
    assert get(server, "/metrics?a=b").splitlines() == [
        *("# TYPE kitae_eval_avg gauge", f"kitae_eval_avg{label} 0.75"),
        *("# TYPE kitae_eval_pass_1 gauge", f"kitae_eval_pass_1{label} 0.75"),
        *("# TYPE kitae_eval_step gauge", f"kitae_eval_step{label} 2.0"),
        *("# TYPE kitae_reward gauge", f"kitae_reward{label} 0.5"),
        *("# TYPE kitae_reward_format gauge", f"kitae_reward_format{label} 1.0"),
        *("# TYPE kitae_step gauge", f"kitae_step{label} 2.0"),
        *("# TYPE kitae_finding gauge", 'kitae_finding{run="toy-001",rule="lr-too-high"} 1'),
    ]


def test_nothing_else_is_there(server: MetricsServer) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404") as refused:
        get(server, "/etc/passwd")
    refused.value.close()


def test_a_port_that_is_taken(server: MetricsServer) -> None:
    with pytest.raises(OSError, match="in use"):
        MetricsServer(Path("runs/toy-002"), "127.0.0.1", server.port)


def test_a_key_keeps_others_out() -> None:
    server = MetricsServer(Path("runs/toy-001"), "127.0.0.1", 0, key="s3cret")
    try:
        url = f"http://127.0.0.1:{server.port}/metrics"
        for said in ("", "Bearer", "Bearer s3cret2", "s3cret"):
            wrong = {"Authorization": said} if said else {}
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(urllib.request.Request(url, headers=wrong), timeout=10)
        right = urllib.request.Request(url, headers={"Authorization": "Bearer s3cret"})
        assert urllib.request.urlopen(right, timeout=10).status == 200
    finally:
        server.close()


def test_a_server_for_others_has_a_key() -> None:
    with pytest.raises(ValidationError, match="metrics_key_env"):
        ObserveConfig(metrics_port=9000, metrics_host="0.0.0.0")
    ObserveConfig(metrics_port=9000, metrics_host="0.0.0.0", metrics_key_env="KEY")
