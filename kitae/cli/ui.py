"""`kitae ui`: runs in a browser."""

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from kitae.config.locate import find_run
from kitae.errors import ConfigError


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
