"""Other people's clients get what they expect of such a server."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kitae.models.load import find_model

MODEL = "smollm2-135m"


@pytest.mark.parametrize("environment", ["openai-2", "openai-3"])
def test_openai(address: str, run_client: Callable[..., Any], environment: str) -> None:
    found = run_client(environment, "openai_client.py", address)
    assert found["version"].startswith(environment[-1]) and found["model"] == MODEL
    assert found["text"] == found["streamed"] == found["helper"] and found["text"]
    assert found["tokens"] == found["usage"]["completion_tokens"]
    assert found["usage"]["total_tokens"] == found["streamed_usage"]["total_tokens"]
    assert found["finish"] in ("stop", "length") and found["top"] == [2, 2, 2]
    assert found["completions"] == [0, 1, 2, 3]
    assert found["echo"][0] is None and len(found["echo"]) == 4 and found["echoed_ids"] == [504, 6376, 314]
    assert found["required"] in ("tool_calls", "unmet") and found["auto"] in ("stop", "length", "tool_calls")
    assert found["errors"] == {
        "unknown": "frobnicate",
        "schema": "response_format",
        "model": "model_not_found",
        "responses": "no_responses_api",
    }


def test_lm_eval_finds_the_numbers_of_its_own_backend(
    address: str, run_client: Callable[..., Any], tmp_path: Path
) -> None:
    found = run_client("lm-eval", "lm_eval_client.py", address, MODEL, str(find_model(MODEL)), str(tmp_path))
    assert found["asked"] == 24 and found["gap"] < 1e-3 and found["greedy"] and found["texts"]


def test_two_hundred_clients_at_once(address: str, run_client: Callable[..., Any]) -> None:
    found = run_client("openai-3", "many_clients.py", address, "200")
    assert found["answers"] == 200 and found["tokens"] == [16] and found["different"] == {}


def test_clients_that_are_sent_away_come_again(serve: Callable[..., str], run_client: Callable[..., Any]) -> None:
    found = run_client("openai-3", "many_clients.py", serve(MODEL, "--queue", "8"), "40")
    assert found["answers"] == 40 and found["tokens"] == [16]
