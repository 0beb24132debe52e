"""The real program on a real socket: who may ask, what it says, and how it ends."""

import asyncio
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from commands import Command
from harness import kitae
from served import client_of

from kitae.errors import ConfigError
from kitae.serving import start_server
from kitae.serving.api_keys import ApiKey, KeyRing
from kitae.serving.app import KeyGuard, make_app
from kitae.serving.refusals import AdmissionControl
from kitae.serving.server_metrics import Counters

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}


@contextmanager
def program(*arguments: str) -> Iterator[tuple[Command, str]]:
    """`kitae serve …` and its address; on a busy machine the last answers may take long."""
    patient = "from kitae.serving import running_server; running_server._LAST_WORDS = 100"
    process = kitae("serve", *arguments, "--port", "0", script=f"{patient}; from kitae.cli.main import run; run()")
    try:
        while "-d" not in (said := process.printed()):  # all of its greeting
            assert process.poll() is None, said
            time.sleep(0.01)
        found = re.search(r"http://\S+", said)
        assert found is not None, said
        yield process, found[0].removesuffix("/v1")
    finally:
        process.kill()
        process.ended(20)


def metric(address: str, name: str) -> float:
    found = re.search(rf"^kitae_{name}(?:{{.*}})? (\S+)$", httpx.get(f"{address}/metrics").text, re.M)
    return float(found[1]) if found else 0.0


def test_the_program_serves_aborts_and_ends(tiny_folder: Callable[[str], Path]) -> None:
    slowly = "model.plain=true"  # so that an answer under way is seen to be
    settings = str(tiny_folder("llama")), "model.dtype=float32", slowly, "--name", "small"
    with program(*settings) as (process, address):
        assert f"curl {address + CHAT} " in " ".join(process.printed().split())
        (model,) = httpx.get(f"{address}/v1/models").json()["data"]
        assert model["id"] == "small"
        # A client that leaves: the engine does not finish its answer.
        with httpx.stream("POST", address + CHAT, json={**HELLO, "n": 8, "ignore_eos": True, "stream": True}) as stream:
            assert next(stream.iter_lines()).startswith("data: ")
        for _ in range(500):
            if metric(address, "engine_running") == 0:
                break
        assert metric(address, "answers_under_way") == 0 and metric(address, "disconnects_total") == 1
        before = metric(address, "engine_generated_tokens_total")
        assert before < 8 * 400
        # Ctrl-C while an answer is under way: it ends, and then the program.
        body = HELLO | {"ignore_eos": True, "n": 4, "max_tokens": 200}
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(httpx.post, address + CHAT, json=body, timeout=60)
            while metric(address, "answers_under_way") < 4:
                assert not asked.done()
            process.send_signal(signal.SIGINT)
            answer = asked.result()
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 800)
        while process.poll() is None:
            time.sleep(0.01)
        assert process.returncode == 130 and "stopped" in process.printed()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nobody/knows/this"], "neither a folder, nor a hub id"),
        (["tiny", "--host", "0.0.0.0"], "a server that others can reach needs a key, got none for 0.0.0.0"),
        (["tiny", "--api-key-env", "KITAE_NO_SUCH"], "the key in $KITAE_NO_SUCH must be printable ASCII and not empty"),
        (["tiny", "training.steps=3"], "takes settings of model and engine, got 'training.steps=3'"),
        (["tiny", "engine.kv=3"], "unknown key engine.kv"),
        (["tiny", "--host", "192.0.2.1", "--api-key-env", "HOME"], "cannot listen on 192.0.2.1"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_loads(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kitae.cli.main import run

    monkeypatch.setattr(start_server, "load_policy", lambda *_: pytest.fail("a model was loaded"))
    monkeypatch.setattr(sys, "argv", ["kitae", "serve", *arguments])
    with pytest.raises(SystemExit) as stop:
        run()
    assert stop.value.code == 1 and complaint in capsys.readouterr().err


def app(host: str, key: str = "") -> Any:
    keys = KeyRing([ApiKey("team", key)] if key else [])
    return make_app([], Counters(AdmissionControl(1)), name="m", context=1, host=host, keys=keys)


def test_without_a_key_only_this_machine_is_answered_to() -> None:
    async def run() -> None:
        async with client_of(app("127.0.0.1")) as client:
            for name, status in (("localhost:8000", 200), ("[::1]", 200), ("evil.example", 421), ("", 421)):
                found = await client.get("/v1/models", headers={"host": name})
                assert found.status_code == status, name
        with pytest.raises(ConfigError, match="needs a key"):
            KeyGuard(app("127.0.0.1"), "192.168.1.5")

    asyncio.run(run())


def test_with_a_key_nothing_is_answered_without_it() -> None:
    async def run() -> None:
        async with client_of(app("0.0.0.0", "secret-1")) as client:
            for given, status in (
                ("Bearer secret-1", 200),
                ("bearer secret-1", 200),
                ("Bearer secret", 401),
                ("", 401),
            ):
                found = await client.get("/v1/models", headers={b"authorization": given.encode()})
                assert found.status_code == status, given
            refused = await client.get("/metrics", headers={"authorization": "Basic x"})
            assert refused.status_code == 401 and "Bearer KEY" in refused.json()["error"]["message"]
            assert "secret" not in json.dumps(refused.json())
            assert (await client.get("/health")).status_code == 200

    asyncio.run(run())
