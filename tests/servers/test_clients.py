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
    }


def test_the_responses_api(address: str, run_client: Callable[..., Any]) -> None:
    found = run_client("openai-3", "responses_client.py", address)
    assert found["text"] == found["chat"] == found["deltas"] == found["helper"] == found["kept"] and found["text"]
    assert found["usage"] and found["longer"] and found["model"] == MODEL
    *events, last = found["events"]
    assert last in ("response.completed", "response.incomplete")
    names = ("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta")
    ends = ("output_text.done", "content_part.done", "output_item.done")
    assert events == [f"response.{name}" for name in (*names, *ends)]
    assert found["errors"] == {
        "previous": ["NotFoundError", "previous_response_id"],
        "tool": ["BadRequestError", "tools.0.type"],
    }


def test_anthropic(address: str, run_client: Callable[..., Any]) -> None:
    found = run_client("anthropic", "anthropic_client.py", address)
    assert found["text"] == found["streamed"] and found["text"] and found["same"] and found["counted"]
    assert found["model"] == MODEL and found["stop"] in ("end_turn", "max_tokens") and found["begun"] > 0
    block = [f"content_block_{name}" for name in ("start", "delta", "stop")]
    assert found["events"] == ["message_start", *block, "message_delta", "message_stop"]
    assert found["tools"] in ("end_turn", "max_tokens", "tool_use")
    assert found["errors"] == {
        "model": ["NotFoundError", "not_found_error"],
        "image": ["BadRequestError", "invalid_request_error"],
        "thinking": ["BadRequestError", "invalid_request_error"],
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
