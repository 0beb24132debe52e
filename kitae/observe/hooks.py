"""Notify a command or a webhook of the events of a run, as JSON.

    {"event": "crash", "run": "runs/quickstart-001", "step": 7, "status": "crashed", "message": "EngineError: …", …}

A command receives it on standard input, and as KITAE_EVENT, KITAE_RUN and KITAE_MESSAGE; a webhook as the body of a
POST. Both have 30 seconds; then the command is killed, with all that it started. Nothing that they do stops
a run.
"""

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from kitae.errors import KitaeError, RemoteError
from kitae.observe.config import ObserveConfig
from kitae.observe.side_thread import Aside, Note

SECONDS = 30.0  # then a command or a call is given up
Event = Literal["finish", "crash", "diagnosis"]


class Hooks:
    """Calls the hooks in the settings, one after the other, in a separate thread."""

    def __init__(self, config: ObserveConfig, run: Path, note: Note) -> None:
        self._targets = {"finish": config.on_finish, "crash": config.on_crash, "diagnosis": config.on_diagnosis}
        self._run = run
        self._aside = Aside("hooks", note, most=100) if any(self._targets.values()) else None

    def notify(self, event: Event, message: str, **details: Any) -> None:
        target = self._targets[event]
        if target and self._aside is not None:
            content = {"event": event, "run": str(self._run), "message": message, **details}
            self._aside.do(lambda: call(target, content, SECONDS))

    def close(self) -> None:
        if self._aside is not None:
            self._aside.close(SECONDS + 5)


def call(target: str, content: Mapping[str, Any], seconds: float) -> None:
    """Call a command or webhook once. Raises if that fails."""
    if target.startswith(("http://", "https://")):
        _post(target, content, seconds)
    else:
        _command(target, content, seconds)


def _post(url: str, content: Mapping[str, Any], seconds: float) -> None:
    body = json.dumps(content).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            answer.read(1000)
    except (OSError, ValueError) as error:  # including error responses of the server
        raise RemoteError(f"the webhook {url} did not take {content['event']}: {error}") from error


def _command(command: str, content: Mapping[str, Any], seconds: float) -> None:
    names = {f"KITAE_{key.upper()}": str(content[key]) for key in ("event", "run", "message")}
    process = subprocess.Popen(
        command,
        shell=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, **names},
        start_new_session=True,
    )
    try:
        _, words = process.communicate(json.dumps(content).encode(), timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise KitaeError(f"the command {command!r} was killed after {seconds:g} s") from None
    if process.returncode:
        said = words.decode(errors="replace").strip().splitlines()[-1:]
        raise KitaeError(
            f"the command {command!r} ended with {process.returncode}{': ' if said else ''}{''.join(said)}"
        )
