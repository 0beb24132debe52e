"""`kitae tinker`: a training server that Tinker's client knows."""

import asyncio
import importlib.util
import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from kitae.cli.arguments import Overrides
from kitae.config.locate import find_run
from kitae.config.recipe import model_settings
from kitae.errors import ConfigError, Interrupted

_SECTIONS = ("model", "engine")


def tinker(
    target: Annotated[
        str, typer.Argument(help="The base model: a folder, a hub id, a short name or a run.", metavar="MODEL")
    ],
    overrides: Overrides = None,
    host: Annotated[
        str, typer.Option(help="Where to listen; an address that others can reach needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8080,
    folder: Annotated[
        Path,
        typer.Option(help="Where sessions, requests and weights are kept; a server that is started there goes on."),
    ] = Path("runs/tinker"),
    name: Annotated[str | None, typer.Option(help="How clients call the base model; default: MODEL as given.")] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(help="The environment variable with the key that clients must send.", metavar="NAME"),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help='A key, "tml-…". Who shares the machine can see it: better --api-key-env.', metavar="KEY"),
    ] = None,
) -> None:
    """Serve a base model to train adapters on, for Tinker's client.

    Sessions, adapters, passes with every loss, updates, samples and saved weights; several clients at once.
    """
    missing = [wanted for wanted in ("starlette", "uvicorn") if importlib.util.find_spec(wanted) is None]
    if missing:
        raise ConfigError(f"kitae tinker needs {' and '.join(missing)}: pip install 'kitae[serve]'")
    for override in overrides or []:
        if override.partition(".")[0] not in _SECTIONS or override.startswith("model.path"):
            raise ConfigError(f"kitae tinker takes settings of {' and '.join(_SECTIONS)}, got {override!r}")
    path = find_run(Path(target))
    config = model_settings(str(path) if path.exists() else target, overrides or [])
    from kitae.serving.api_keys import ApiKey, check_keys
    from kitae.tinker.start_tinker import TinkerSettings, serve_tinker

    keys = [ApiKey("key", api_key)] if api_key is not None else []
    if api_key_env is not None:
        keys.append(ApiKey(f"${api_key_env}", os.environ.get(api_key_env, "").strip()))
    settings = TinkerSettings(name or target, folder, host, port, check_keys(keys))
    try:
        asyncio.run(serve_tinker(config.model, config.engine, settings, lambda at: _say(settings.name, at)))
    except KeyboardInterrupt:  # before the server runs
        raise Interrupted("interrupted", signal.SIGINT) from None


def _say(name: str, address: str) -> None:
    print(f"{name} at {address}  (Ctrl-C ends)")
    print(f'    TINKER_BASE_URL={address} TINKER_API_KEY=tml-any, base_model="{name}"', flush=True)
