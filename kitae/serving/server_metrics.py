"""Metrics of the server in the text format of Prometheus.

kitae_requests_total{path="/v1/chat/completions",status="200"} 17
kitae_engine_generated_tokens_total 4096
"""

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from kitae.engines.base import EngineStats
from kitae.serving.api_keys import Account
from kitae.serving.base import Answer
from kitae.serving.refusals import AdmissionControl

_GAUGES = ("version", "running", "waiting")
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16_384, 65_536, 262_144)
_HISTOGRAMS: dict[str, Sequence[float]] = {
    "queue_seconds": _SECONDS,  # from its arrival until a request is read, and admitted to the engine
    "time_to_first_token_seconds": _SECONDS,  # from there
    "time_per_token_seconds": (0.001, *_SECONDS),  # of those after the first
    "answer_seconds": _SECONDS,  # all tokens of an answer
    "prompt_tokens": _TOKENS,
    "answer_tokens": _TOKENS,
}
"""Each is kept for each key, by its name."""


class Histogram:
    """How many values were at most so large: `Histogram((0.1, 1)).add(0.5)`."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def rows(self, name: str, key: str) -> list[str]:
        found, total = [], 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            found.append(f"kitae_{name}_bucket{_labels(key=key, le=bound)} {total}")
        return [
            *found,
            f"kitae_{name}_sum{_labels(key=key)} {self._sum!r}",
            f"kitae_{name}_count{_labels(key=key)} {total}",
        ]


class Counters:
    """`counters.count("/v1/completions", 200, 0.7)`; stats: the counters of the engine, if there is one."""

    def __init__(
        self,
        admission: AdmissionControl,
        stats: Callable[[], EngineStats] | None = None,
        accounts: Sequence[Account] = (),
    ) -> None:
        self._admission, self._stats, self._accounts = admission, stats, accounts
        self._histograms: defaultdict[str, dict[str, Histogram]] = defaultdict(dict)
        self._of_key: Counter[tuple[str, int]] = Counter()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._gone: Counter[str] = Counter()
        self._began = time.time()

    def count(self, path: str, status: int, seconds: float, account: Account | None = None) -> None:
        self._requests[path, status] += 1
        if account is not None:
            self._of_key[account.name, status] += 1
        self._seconds[path] += seconds

    def gone(self, path: str) -> None:
        """Count a client that closed its connection before the answer."""
        self._gone[path] += 1

    def answered(self, account: Account | None, waited: float, answers: Sequence[Answer], prompts: int) -> None:
        """Note answers to one request. waited: before the engine had it. prompts: tokens of its prompts, each once."""
        key = account.name if account is not None else ""
        sampled = [len(answer.sampled.tokens) for answer in answers]
        if account is not None:
            account.spend(prompts + sum(sampled))
        self._add(key, "queue_seconds", waited)
        self._add(key, "prompt_tokens", prompts)
        for answer, tokens in zip(answers, sampled, strict=True):
            self._add(key, "answer_tokens", tokens)
            if (timing := answer.timing) is not None:
                self._add(key, "time_to_first_token_seconds", timing.first)
                self._add(key, "answer_seconds", timing.last)
                if tokens > 1:
                    self._add(key, "time_per_token_seconds", (timing.last - timing.first) / (tokens - 1))

    def _add(self, key: str, name: str, value: float) -> None:
        known = self._histograms[name]
        if key not in known:
            known[key] = Histogram(_HISTOGRAMS[name])
        known[key].add(value)

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
        lines += _family(
            "key_requests_total", "counter", {_labels(key=k, status=s): n for (k, s), n in self._of_key.items()}
        )
        lines += _family("key_refused_total", "counter", {_labels(key=a.name): a.refused for a in self._accounts})
        lines += _family("key_in_flight", "gauge", {_labels(key=a.name): a.in_flight for a in self._accounts})
        for name, by_key in self._histograms.items():
            lines.append(f"# TYPE kitae_{name} histogram")
            lines += [row for key, histogram in sorted(by_key.items()) for row in histogram.rows(name, key)]
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
