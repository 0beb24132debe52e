"""Hold a process of a run in the middle of what it does, so that a test can kill it, or another, just then.

    test                                       a post of the run
    writes `arm`: {"point": "update", …}       `after`: only once the metrics of the run have so many lines
                                               reaches the point, takes `arm`, writes `reached`: its pid, and waits
    kills whom it likes, writes `go-<pid>`     goes on, if it lives

There may be a second order beside it, `pause`, which is told by `paused`.

Posts have it by `hooked/sitecustomize.py`; workers of verifiers by the score function below, which is what such a run
checks answers with. The program itself knows nothing of all this. Nothing is imported here that takes long: it runs in
every process that Python starts.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = "KITAE_TEST_HOLD"  # the variable that says where the files are
LIMIT = 120.0  # seconds that a process is held, at most

POINTS: dict[str, tuple[tuple[str, str], ...]] = {
    "start": (
        ("kitae.trainer.parallel.rank_process", "_join"),
        ("kitae.engines.process.engine_main", "EngineWorker.__init__"),
        ("kitae.verifiers.pool_process", "VerifierWorker.__init__"),
    ),
    "generate": (("kitae.engines.native.engine", "NativeEngine._append"),),
    "learn": (("kitae.trainer.trainable_model", "TrainableModel.forward_backward"),),
    "update": (("kitae.trainer.collective_ops", "Distributed.norm"),),
    "publish": (("kitae.models.whole", "whole"),),
    "fetch": (("kitae.weights.receiver", "PullReceiver._load"), ("stand_in", "StandIn._load")),
    "save": (("kitae.trainer.parallel.rank_process", "Rank._end_save"),),
}
"""Where a process can be held, beside "score": functions, before they are called."""

PASSED = {"generate": 4, "publish": 2}
"""Calls that go by before one is held: so it is in the middle of an answer, or of a version."""

_rank: int | None = None  # of this process
_calls: Counter[str] = Counter()


def install() -> None:
    """Have every function of `POINTS` held that is imported from now on."""
    if FOLDER in os.environ:
        sys.meta_path.insert(0, _Finder())


def digits(response: str, reference: Any, context: Mapping[str, Any]) -> float:
    """The score function of the toy recipe."""
    hold("score")
    if response == str(reference):
        return 1.0
    return sum(c.isdigit() for c in response) / len(response) if response else 0.0


def hold(point: str) -> None:
    """Wait here, if it is wanted."""
    folder = Path(os.environ.get(FOLDER, os.devnull))
    for name, answer in (("arm", "reached"), ("pause", "paused")):
        _obey(point, folder, name, answer)


def _obey(point: str, folder: Path, name: str, answer: str) -> None:
    try:
        order = json.loads((folder / name).read_text())
    except OSError:
        return
    if order["point"] != point or order["rank"] not in (None, _rank) or order["duty"] not in ("", *sys.argv[1:2]):
        return
    if order["after"] and lines(folder / order["metrics"]) < order["after"]:
        return
    _calls[point] += 1
    if _calls[point] <= PASSED.get(point, 0):
        return
    _calls.clear()
    try:
        (folder / name).rename(folder / f"taken-{os.getpid()}")
    except OSError:  # another was first
        return
    here, go = (folder / f"{name}-{os.getpid()}" for name in ("here", "go"))
    here.write_text(str(os.getpid()))  # not into what was taken: others may be reading that order
    here.rename(folder / answer)
    deadline = time.monotonic() + LIMIT
    while not go.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    go.unlink(missing_ok=True)


def lines(path: Path) -> int:
    try:
        return path.read_text().count("\n")
    except OSError:
        return 0


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        here = [(point, where) for point, places in POINTS.items() for module, where in places if module == name]
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if here else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_wrap(module: ModuleType) -> None:
            load(module)
            for point, where in here:
                _wrap(module, where, point)

        spec.loader.exec_module = load_and_wrap  # type: ignore[method-assign]
        return spec


def _wrap(module: ModuleType, where: str, point: str) -> None:
    *owners, name = where.split(".")
    owner: Any = getattr(module, owners[0]) if owners else module
    setattr(owner, name, _held(getattr(owner, name), point))


def _held(function: Callable[..., Any], point: str) -> Callable[..., Any]:
    def call(*arguments: Any, **settings: Any) -> Any:
        if function.__name__ == "_join":
            _enlist(arguments[0]["rank"])
        hold(point)
        return function(*arguments, **settings)

    return call


def _enlist(rank: int) -> None:
    """Let the test know which process a rank is."""
    global _rank
    _rank = rank
    (Path(os.environ[FOLDER]) / f"rank-{rank}").write_text(str(os.getpid()))
