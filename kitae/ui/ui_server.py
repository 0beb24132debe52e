"""The server of `kitae ui`: its addresses, their handlers, and the program around them. Notes on a run are written, and
nothing else.

The page learns of changes by server-sent events, which have the keys of the runs that have changed. It then requests
what it shows again.
"""

import asyncio
import json
import secrets
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.staticfiles import StaticFiles

from kitae.clients.addresses import address_of, is_loopback, listen
from kitae.data.data_files import clip
from kitae.errors import ConfigError, KitaeError
from kitae.serving.running_server import PatientServer, bounded
from kitae.store.run_summary import RunView
from kitae.ui import overview, prompt_history, queries, samples, schedule
from kitae.ui.guard import NOTES, Door, PageGuard
from kitae.ui.library import Library
from kitae.ui.notes import FILE, LONGEST, write_notes
from kitae.ui.queries import whole
from kitae.ui.records import as_json
from kitae.ui.tables import Tables
from kitae.workers.process_status import descriptors

STATIC = Path(__file__).parent / "static"
_COMPARED = range(2, 7)
_GRACE = 1  # seconds for open connections when the server is stopped
_FOREVER = "public, max-age=31536000, immutable"  # the name of an asset has a hash of its content

T = TypeVar("T")


class RunPages:
    """The handlers. Each takes a request and returns records, of which `_json` makes a response."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._tables = Tables()

    def routes(self) -> list[BaseRoute]:
        one = "/api/runs/{run}"
        return [
            Route("/", _page),
            Route("/api/runs", _json(self._runs)),
            Route("/api/live", self._live),
            Route("/api/compare", _json(self._compare)),
            Route(one, _json(self._run)),
            Route(f"{one}/series", _json(self._series)),
            Route(f"{one}/rollouts", _json(self._rollouts)),
            Route(f"{one}/groups/{{group}}", _json(self._group)),
            Route(f"{one}/groups/{{group}}/tokens/{{sample}}", _json(self._tokens)),
            Route(f"{one}/prompts", _json(self._prompts)),
            Route(f"{one}/errors", _json(lambda request: queries.errors(self._folder(request)))),
            Route(f"{one}/timeline", _json(self._timeline)),
            Route(f"{one}/console", _json(lambda request: overview.console(self._folder(request)))),
            Route(f"{one}{NOTES}", self._write_notes, methods=["POST"]),
            Route(f"{one}/diagnosis", _json(lambda request: overview.diagnosis(self._folder(request)))),
        ]

    def _folder(self, request: Request) -> Path:
        return self._library.find(request.path_params["run"])

    def _runs(self, request: Request) -> Any:
        found = [overview.summary(key, run, self._tables) for key, run in self._library.runs().items()]
        return sorted(found, key=lambda run: -run.changed)

    def _run(self, request: Request) -> Any:
        return overview.detail(request.path_params["run"], self._folder(request), self._tables)

    def _series(self, request: Request) -> Any:
        names = [name for name in request.query_params.get("names", "").split(",") if name]
        return self._tables.series(self._folder(request), names)

    def _rollouts(self, request: Request) -> Any:
        asked = request.query_params
        wanted = queries.RolloutFilter(
            step=_given(asked.get("step"), whole),
            reward_min=_given(asked.get("reward_min"), float),
            reward_max=_given(asked.get("reward_max"), float),
            length_min=_given(asked.get("length_min"), whole),
            length_max=_given(asked.get("length_max"), whole),
            finish=asked.get("finish", ""),
            verdict=asked.get("verdict", ""),
            status=asked.get("status", ""),
            fate=asked.get("fate", ""),
            prompt=asked.get("prompt", ""),
            text=asked.get("text", ""),
            order=asked.get("order", "newest"),
        )
        return queries.rollouts(self._folder(request), wanted, _given(asked.get("after"), queries.PageCursor.read))

    def _group(self, request: Request) -> Any:
        return samples.group(self._folder(request), _needed(request.path_params["group"]))

    def _tokens(self, request: Request) -> Any:
        group, sample = _needed(request.path_params["group"]), _needed(request.path_params["sample"])
        return samples.tokens(self._folder(request), group, sample)

    def _prompts(self, request: Request) -> Any:
        asked = request.query_params
        at = max(0, _given(asked.get("at"), whole) or 0)
        return prompt_history.history(self._folder(request), asked.get("kind", ""), at)

    def _timeline(self, request: Request) -> Any:
        asked = request.query_params
        steps = min(64, max(1, _given(asked.get("steps"), whole) or schedule.STEPS))
        return schedule.schedule(self._folder(request), _given(asked.get("last"), whole), steps)

    def _compare(self, request: Request) -> Any:
        keys = [key for key in request.query_params.get("runs", "").split(",") if key]
        if len(keys) not in _COMPARED:
            raise ConfigError(f"compare takes {_COMPARED.start} to {_COMPARED.stop - 1} runs, got {len(keys)}")
        return overview.compare([(key, self._library.find(key)) for key in keys], self._tables)

    async def _write_notes(self, request: Request) -> Response:
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > LONGEST:
                return Response(
                    as_json({"error": f"notes may have {LONGEST} bytes"}), 413, media_type="application/json"
                )
        answer = _json(lambda request: write_notes(self._folder(request), body))
        return await run_in_threadpool(answer, request)

    async def _live(self, request: Request) -> Response:
        return StreamingResponse(change_events(self._library), media_type="text/event-stream")


def _page(request: Request) -> Response:
    return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})


def _given(text: str | None, kind: Callable[[str], T]) -> T | None:
    if text is None or text == "":
        return None
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"a number is needed, got {clip(repr(text))}") from None


def _needed(text: str) -> int:
    found = _given(text, whole)
    assert found is not None  # a part of a path is never empty
    return found


def _json(answer: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """An endpoint that runs in a thread of its own. An error of Kitae becomes a JSON object with its message, and so
    does what cannot be read in the folder of a run."""

    def endpoint(request: Request) -> Response:
        try:
            body, status = answer(request), 200
        except (KitaeError, OSError, ValueError, sqlite3.Error) as error:
            body, status = {"error": str(error)}, 404
        return Response(as_json(body), status, media_type="application/json")

    return endpoint


class _Assets(StaticFiles):
    async def get_response(self, path: str, scope: Any) -> Response:
        response = await super().get_response(path, scope)
        response.headers["cache-control"] = _FOREVER
        return response


def make_app(library: Library, door: Door) -> Starlette:
    routes = RunPages(library).routes()
    app = Starlette(routes=routes, middleware=[Middleware(PageGuard, door=door)])
    app.mount("/assets", _Assets(directory=STATIC / "assets"))
    return app


def serve(places: Sequence[Path], host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve until Ctrl-C. `ready` is called with the address, including the token, when the server has its port."""
    library = Library(places)
    door = Door(host, "" if is_loopback(host) else secrets.token_urlsafe(24))
    taken = listen(host, port)
    ready(f"{address_of(taken, host)}/{f'?token={door.token}' if door.token else ''}")
    config = uvicorn.Config(
        make_app(library, door),
        http=bounded(descriptors() // 4),
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=_GRACE,
    )
    PatientServer(config).run(sockets=[taken])


_WATCHED = (
    "config.json",
    "journal.sqlite",
    "journal.sqlite-wal",
    "metrics.jsonl",
    "timeline.jsonl",
    "console.log",
    FILE,
)
_HEARTBEAT = 15.0  # seconds without a change after which a comment is sent, so that a dead connection is noticed

Stamp = tuple[tuple[int, int], ...]


class RunWatcher:
    """The state of all runs, for one client. `changed` returns the runs whose state differs from the last call."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._seen: dict[str, tuple[Stamp, str]] = {}
        self.changed()

    def changed(self) -> list[str]:
        """The keys of runs that are new, gone, were written to, or whose process has ended."""
        before, self._seen = self._seen, {}
        for key, folder in self._library.runs().items():
            self._seen[key] = self._look(folder, before.get(key))
        return sorted(key for key in before.keys() | self._seen.keys() if before.get(key) != self._seen.get(key))

    def _look(self, folder: Path, before: tuple[Stamp, str] | None) -> tuple[Stamp, str]:
        """The lock of a running run is checked each time, because a process that is killed writes nothing."""
        stamp = tuple(_stamp(folder / name) for name in _WATCHED)
        if before is not None and before[0] == stamp and before[1] != "running":
            return before
        return stamp, RunView(folder).status


def _stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_size


async def change_events(library: Library, every: float = 1.0) -> AsyncIterator[str]:
    """An endless stream of events: `data: {"runs": ["quickstart-001"]}`."""
    watcher = await asyncio.to_thread(RunWatcher, library)
    yield "retry: 2000\n\n"
    quiet = 0.0
    while True:
        await asyncio.sleep(every)
        quiet += every
        if keys := await asyncio.to_thread(watcher.changed):
            quiet = 0.0
            yield f"data: {json.dumps({'runs': keys})}\n\n"
        elif quiet >= _HEARTBEAT:
            quiet = 0.0
            yield ": still here\n\n"
