"""`GET /metrics` while a run goes on: its last numbers, in the text format of Prometheus.

    kitae_step{run="quickstart-001"} 7
    kitae_reward{run="quickstart-001"} 0.734375
    kitae_eval_avg{run="quickstart-001"} 0.515625
    kitae_finding{run="quickstart-001",rule="lr-too-high"} 1

The server listens on the loopback address; on another one a scraper needs a key.
"""

import hmac
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from kitae.observe.observer import Reported, Silent
from kitae.observe.trackers import numbers_of


class MetricsServer(Silent):
    """An observer that serves the metrics. Raises OSError if the port is taken. port 0: any free one.

    key: what a request must send as `Authorization: Bearer …`; "": nothing.
    """

    def __init__(self, run: Path, host: str, port: int, key: str = "") -> None:
        self._run = run.name
        self._values: dict[str, float] = {}
        self._rules: set[str] = set()
        self._lock = threading.Lock()
        page, expected = self.page, f"Bearer {key}".encode()

        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                if key and not hmac.compare_digest(self.headers.get("Authorization", "").encode(), expected):
                    self.send_error(401)
                    return
                found = self.path.partition("?")[0] == "/metrics"
                body = page().encode() if found else b"there is only /metrics\n"
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="kitae-metrics", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def step(self, report: Reported) -> None:
        self._set({"step": report.step, **numbers_of(report.row())})

    def evaluated(self, row: dict[str, Any]) -> None:
        self._set({f"eval_{name}": value for name, value in numbers_of(row).items()} | {"eval_step": row["step"]})

    def found(self, rule: str) -> None:
        with self._lock:
            self._rules.add(rule)

    def page(self) -> str:
        label = f'run="{_escaped(self._run)}"'
        with self._lock:
            lines = [
                f"# TYPE {name} gauge\n{name}{{{label}}} {value!r}\n" for name, value in sorted(self._values.items())
            ]
            rules = [f'kitae_finding{{{label},rule="{_escaped(rule)}"}} 1\n' for rule in sorted(self._rules)]
        return "".join([*lines, *(["# TYPE kitae_finding gauge\n"] if rules else []), *rules])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _set(self, values: Mapping[str, float]) -> None:
        with self._lock:
            self._values |= {_name(name): float(value) for name, value in values.items()}


def _name(metric: str) -> str:
    """`reward/format` → `kitae_reward_format`."""
    return "kitae_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
