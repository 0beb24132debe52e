"""`kitae ui`: runs in a browser."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from kitae.config.locate import find_run
from kitae.errors import ConfigError


def show(places: Sequence[Path], host: str, port: int, open_browser: bool) -> None:
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
