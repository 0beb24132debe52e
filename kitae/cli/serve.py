"""`kitae serve`, a model behind an address that OpenAI's clients know, and `kitae ui`, runs in a browser."""

import asyncio
import importlib.util
import os
import signal
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from kitae.cli.arguments import Overrides
from kitae.config.locate import find_run
from kitae.config.recipe import model_settings
from kitae.errors import ConfigError, Interrupted

_SECTIONS = ("model", "engine")


def serve(
    target: Annotated[
        str,
        typer.Argument(
            help="A model: a run, a folder, a hub id or a short name; or a reward model.", metavar="MODEL-OR-RUN"
        ),
    ],
    overrides: Overrides = None,
    host: Annotated[
        str, typer.Option(help="Where to listen; an address that others can reach needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    api_key_env: Annotated[
        str | None, typer.Option(help="The environment variable with the key that clients must send.", metavar="NAME")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="A TOML file with keys, their names and limits; see the page on serving.", metavar="FILE"),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="A key; may be given again. Who shares the machine can see it: better by file.", metavar="KEY"
        ),
    ] = None,
    in_flight: Annotated[int, typer.Option(min=0, help="Requests at the same time, for each key; 0: any number.")] = 0,
    requests_per_minute: Annotated[int, typer.Option(min=0, help="For each key; 0: any number.")] = 0,
    tokens_per_minute: Annotated[
        int, typer.Option(min=0, help="Of prompts and answers, for each key; 0: any number.")
    ] = 0,
    control_tokens: Annotated[
        str,
        typer.Option(
            help="Where special tokens that a request spells out are read as such: never, in completions, or always "
            "(in messages too).",
            metavar="never|completions|always",
        ),
    ] = "completions",
    name: Annotated[
        str | None, typer.Option(help="How clients call the model; default: the name of its run or folder.")
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            help="A LoRA adapter and how clients call the model with it; may be given again.", metavar="NAME=FOLDER"
        ),
    ] = None,
    queue: Annotated[
        int, typer.Option(min=1, help="Answers under way, waiting ones included; who comes then is told to try again.")
    ] = 512,
    tries: Annotated[
        int,
        typer.Option(min=1, help="How often an answer is sampled until it calls the tool that tool_choice asks for."),
    ] = 3,
    answer_anyway: Annotated[
        bool, typer.Option("--answer-anyway", help="If no try calls it, tell the last answer; default: refuse.")
    ] = False,
) -> None:
    """Serve a model or a reward model over an OpenAI-compatible API.

    Chats and completions, streamed or whole, with tools and log-probs; or the scores of a reward model.
    """
    missing = [wanted for wanted in ("starlette", "uvicorn") if importlib.util.find_spec(wanted) is None]
    if missing:
        raise ConfigError(f"kitae serve needs {' and '.join(missing)}: pip install 'kitae[serve]'")
    for override in overrides or []:
        if override.partition(".")[0] not in _SECTIONS or override.startswith("model.path"):
            raise ConfigError(f"kitae serve takes settings of {' and '.join(_SECTIONS)}, got {override!r}")
    path = find_run(Path(target))
    config = model_settings(str(path) if path.exists() else target, overrides or [])
    from kitae.serving.api_keys import ApiKey, KeyLimits, check_keys, read_keys
    from kitae.serving.handlers import AnswerPolicy
    from kitae.serving.prompt_reader import ControlTokens
    from kitae.serving.server_settings import ServerSettings
    from kitae.serving.start_server import serve as start

    if control_tokens not in get_args(ControlTokens):
        known = ", ".join(get_args(ControlTokens))
        raise ConfigError(f"--control-tokens must be one of {known}, got {control_tokens!r}")
    limits = KeyLimits(
        in_flight=in_flight, requests_per_minute=requests_per_minute, tokens_per_minute=tokens_per_minute
    )
    keys = [ApiKey(f"key-{i}", key, limits) for i, key in enumerate(api_key or [], 1)]
    keys += read_keys(api_key_file, limits) if api_key_file else []
    if api_key_env is not None:
        keys.append(ApiKey(f"${api_key_env}", os.environ.get(api_key_env, "").strip(), limits))
    settings = ServerSettings(
        name or Path(target).name if path.exists() else name or target,
        host,
        port,
        check_keys(keys),
        limits,
        queue,
        cast(ControlTokens, control_tokens),
        adapters=_adapters(adapter or []),
        answer_policy=AnswerPolicy(tries, answer_anyway),
    )
    variable = api_key_env or ("KEY" if keys else None)
    try:
        asyncio.run(start(config.model, config.engine, settings, lambda *place: _say(settings.name, variable, *place)))
    except KeyboardInterrupt:  # before the server runs
        raise Interrupted("interrupted", signal.SIGINT) from None


def _adapters(given: list[str]) -> dict[str, Path]:
    for one in given:
        name, _, folder = one.partition("=")
        if not name or not (Path(folder) / "adapter_config.json").is_file():
            raise ConfigError(f"--adapter must be NAME=FOLDER, and the folder an adapter of peft, got {one!r}")
    return {name: Path(folder) for name, _, folder in (one.partition("=") for one in given)}


def _say(name: str, key_env: str | None, address: str, path: str) -> None:
    body = (
        '{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello!"}]}'
        if path.endswith("score")
        else '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}'
    )
    key = f' -H "Authorization: Bearer ${key_env}"' if key_env else ""
    print(f"{name} at {address}/v1  (Ctrl-C ends)")
    print(f"    curl {address}{path} -H 'Content-Type: application/json'{key} -d '{body}'", flush=True)


def ui(
    places: Annotated[
        list[Path] | None,
        typer.Argument(help="Run folders, names of runs, or folders that hold runs; default: runs.", metavar="[RUN]…"),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Where to listen; an address that others can reach needs a token, which is printed.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 7007,
    open_browser: Annotated[bool, typer.Option("--open", help="Open a browser.")] = False,
) -> None:
    """Look at runs in a browser: curves, rollouts, timelines.

    Curves, rollouts token by token, timelines, comparisons; of running runs too. Reads and changes nothing.
    """
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"kitae ui needs {' and '.join(missing)}: pip install 'kitae[ui]'")
    from kitae.ui.ui_server import serve

    def ready(address: str) -> None:
        print(f"runs at {address}  (Ctrl-C ends)", flush=True)
        if open_browser:
            import webbrowser

            webbrowser.open(address)

    serve([find_run(place) for place in places or [Path("runs")]], host, port, ready)
