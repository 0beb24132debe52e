"""Metrics of the server in the text format of Prometheus.

kitae_requests_total{path="/v1/chat/completions",status="200"} 17
kitae_engine_generated_tokens_total 4096
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict

from kitae.engines.base import EngineStats
from kitae.serving.admission import AdmissionControl

_GAUGES = ("version", "running", "waiting")


class Counters:
    """`counters.count("/v1/completions", 200, 0.7)`; stats: the counters of the engine, if there is one."""

    def __init__(self, admission: AdmissionControl, stats: Callable[[], EngineStats] | None = None) -> None:
        self._admission, self._stats = admission, stats
        self._requests: Counter[tuple[str, int]] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._gone: Counter[str] = Counter()
        self._began = time.time()

    def count(self, path: str, status: int, seconds: float) -> None:
        self._requests[path, status] += 1
        self._seconds[path] += seconds

    def gone(self, path: str) -> None:
        """Count a client that closed its connection before the answer."""
        self._gone[path] += 1

    def page(self) -> str:
        lines = [
            *_family(
                "requests_total", "counter", {_labels(path=p, status=s): n for (p, s), n in self._requests.items()}
            ),
            *_family("request_seconds_total", "counter", {_labels(path=p): n for p, n in self._seconds.items()}),
            *_family("disconnects_total", "counter", {_labels(path=p): n for p, n in self._gone.items()}),
            *_family("queue_refused_total", "counter", {"": self._admission.refused}),
            *_family("answers_under_way", "gauge", {"": self._admission.taken}),
            *_family("answers_most", "gauge", {"": self._admission.most}),
            *_family("start_time_seconds", "gauge", {"": self._began}),
        ]
        if self._stats is not None:
            for name, value in asdict(self._stats()).items():
                kind, end = ("gauge", "") if name in _GAUGES else ("counter", "_total")
                lines += _family(f"engine_{name}{end}", kind, {"": value})
        return "\n".join(lines) + "\n"


def _family(name: str, kind: str, values: Mapping[str, float]) -> list[str]:
    rows = [f"kitae_{name}{labels} {value!r}" for labels, value in sorted(values.items())]
    return [f"# TYPE kitae_{name} {kind}", *rows] if rows else []


def _labels(**labels: object) -> str:
    def escaped(value: object) -> str:
        return str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items()) + "}"
