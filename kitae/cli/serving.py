"""`kitae serve`: a model behind an address that OpenAI's clients know."""

import asyncio
import importlib.util
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from kitae.config.locate import find_run
from kitae.config.recipe import model_settings
from kitae.errors import ConfigError, Interrupted

_SECTIONS = ("model", "engine")


def serve(
    target: str,
    overrides: Sequence[str],
    *,
    host: str,
    port: int,
    key_env: str | None,
    name: str | None,
    queue: int,
    tries: int,
    answer_anyway: bool,
) -> None:
    missing = [wanted for wanted in ("starlette", "uvicorn") if importlib.util.find_spec(wanted) is None]
    if missing:
        raise ConfigError(f"kitae serve needs {' and '.join(missing)}: pip install 'kitae[serve]'")
    for override in overrides:
        if override.partition(".")[0] not in _SECTIONS or override.startswith("model.path"):
            raise ConfigError(f"kitae serve takes settings of {' and '.join(_SECTIONS)}, got {override!r}")
    path = find_run(Path(target))
    config = model_settings(str(path) if path.exists() else target, overrides)
    from kitae.serving.handlers import AnswerPolicy
    from kitae.serving.start_server import ServerSettings
    from kitae.serving.start_server import serve as start

    settings = ServerSettings(
        name or Path(target).name if path.exists() else name or target,
        host,
        port,
        _key(key_env),
        queue,
        AnswerPolicy(tries, answer_anyway),
    )
    try:
        asyncio.run(start(config.model, config.engine, settings, lambda *place: _say(settings.name, key_env, *place)))
    except KeyboardInterrupt:  # before the server runs
        raise Interrupted("interrupted", signal.SIGINT) from None


def _key(variable: str | None) -> str:
    if variable is None:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key or not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"the key in ${variable} must be printable ASCII and not empty, got {'other' if key else 'none'}"
        )
    return key


def _say(name: str, key_env: str | None, address: str, path: str) -> None:
    body = (
        '{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello!"}]}'
        if path.endswith("score")
        else '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}'
    )
    key = f' -H "Authorization: Bearer ${key_env}"' if key_env else ""
    print(f"{name} at {address}/v1  (Ctrl-C ends)")
    print(f"    curl {address}{path} -H 'Content-Type: application/json'{key} -d '{body}'", flush=True)
