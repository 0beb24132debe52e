"""One trial: a run that something happens to, resumed until it is finished. Everything follows from the seed.

    PYTHONPATH=tests python tests/integration/faults.py [--trials 1000] [--first 0] [--jobs 2] [--folder DIR]

All kinds of faults in turn, and a table. A trial runs the command line in a forked process (the imports are done once,
in multiprocessing's fork server). The fault strikes at the n-th call of some function of the run, drawn from the seed:
before or after it. Settings are drawn from the seed too (`fault_plans`): staleness, refills, overdue and mastered
groups, LoRA, methods with a reference, a critic or a greedy baseline, verifiers that are slow or fail now and then,
evaluations, placements; and what sort of run it is: with agents, with a teacher, on a cluster, or on a file.
At the end the ledger must balance, no rollout may have been lost on the way, every step and evaluation must be there
once, and where the docs promise it, the numbers must be those of a run that was not interrupted. No process is left.
"""

import argparse
import asyncio
import contextlib
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from fault_plans import PROMPTS, SAMPLES, SORTS, Plan
from harness import assert_same_metrics, rows
from safetensors.torch import load_file
from warm_starts import POSTS, VERIFIERS, Server, context

KINDS = (
    "kill the run",
    "interrupt the run",
    "interrupt it twice",
    "cut the power",
    "kill a verifier",
    "verifier outage",
    "fail in the trainer",
    "full disk",
    "clock jump",
    "freeze the run",
    "kill the engine",
    "corrupt an update",
    "delay an update",
    "kill in a corrupt update",
    "kill a rank",
    "kill the teacher",
    "kill an agent",
)
MARKS = {
    "kill a verifier": "kitae.verifiers.child_main",
    "kill the engine": "engine_main",
    "kill a rank": "_rank",
    "kill the teacher": "kitae.trainer.teacher.teacher_main",
    "kill an agent": "captured_agent.py",
}
"""What is in the command of who is killed."""


STARTED: dict[int, str] = {}
"""The processes that the run has started by now, with their commands."""


def _points(sort: str, steps: int) -> list[tuple[Any, str, int]]:
    """Functions of a run at which a fault may strike, with about how often they are called."""
    from kitae.offline.loop import OfflineLoop
    from kitae.rl import evaluations
    from kitae.rl.weight_sync import WeightSync
    from kitae.store.checkpoints import Checkpoints
    from kitae.store.journal import Journal
    from kitae.store.run_folder import Metrics, RunStore
    from kitae.trainer import training_worker
    from kitae.trainer.learner import Learner
    from kitae.trainer.training_worker import Worker

    points: list[tuple[Any, str, int]] = [
        (Checkpoints, "save", 2),
        (Checkpoints, "_commit", 2),
        (RunStore, "begin", 1),
        (Metrics, "append", steps),
    ]
    if sort != "spread":  # there it is done in other processes
        points += [
            (Worker, "forward_backward", steps),
            (Worker, "optim_step", steps),
            (Worker, "save", 2),
            (training_worker, "export_policy", 1),
        ]
    if sort == "offline":
        return [*points, (OfflineLoop, "_learn", steps), (OfflineLoop, "save", 2), (OfflineLoop, "evaluate", 2)]
    return [
        *points,
        (Journal, "add_prompt", steps * PROMPTS),
        (Journal, "add_rollout", steps * PROMPTS * SAMPLES),
        (Journal, "update_score", steps * PROMPTS * SAMPLES),
        (Journal, "add_fates", steps),
        (Journal, "skip_slot", 1),
        (Journal, "sync", 2),
        (Learner, "learn", steps),
        (Learner, "save", 2),
        (WeightSync, "hand_over", steps),
        (Checkpoints, "forget_after", 1),
        (evaluations, "evaluate", 2),
    ]


def strike(kind: str, rng: random.Random, sort: str, steps: int, folder: Path) -> None:
    """Arrange for the fault, in the process of the run."""
    if kind == "full disk":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limit = rng.choice([20_000, 60_000, 200_000, 1_000_000])
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    elif kind == "clock jump":
        jumps, real = rng.choice([-1e6, 1e6]), time.time
        time.time = lambda: real() + (jumps if rng.random() < 0.5 else 0.0)
    elif kind == "delay an update":
        _around(
            "kitae.engines.process.process_engine:ProcessEngine",
            "update_weights",
            rng.randint(0, steps),
            _delay(rng.random()),
        )
    elif kind in ("corrupt an update", "kill in a corrupt update"):
        soon = (lambda: _kill("kill the engine", rng)) if kind == "kill in a corrupt update" else None
        change = _corrupt(rng.random() * 0.2, soon)
        _around("kitae.weights.shared_memory:MemoryPublisher", "publish", rng.randint(1, steps), change)
    else:
        if kind == "cut the power":
            _remember_what_lasts(folder)
        owner, method, calls = rng.choice(_points(sort, steps))
        _at(owner, method, rng.randint(1, calls), rng.random() < 0.5, lambda: _now(kind, folder, rng))


def _now(kind: str, folder: Path, rng: random.Random) -> None:
    me = os.getpid()
    if kind in ("kill the run", "cut the power"):
        os.kill(me, signal.SIGKILL)
    elif kind == "interrupt the run":
        os.kill(me, signal.SIGINT)
    elif kind == "interrupt it twice":
        subprocess.Popen(["sh", "-c", f"kill -INT {me}; sleep 0.3; kill -INT {me}"])
    elif kind == "verifier outage":
        (folder / "outage").touch()
    elif kind == "fail in the trainer":
        raise MemoryError("a fault for the test")
    elif kind == "freeze the run":
        subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {me}"])
        os.kill(me, signal.SIGSTOP)
    else:
        _kill(kind, rng)


def _kill(kind: str, rng: random.Random) -> None:
    """The youngest process of one of those that do such work, if there is any now."""
    mark = MARKS[kind]
    found = [pid for pid, command in STARTED.items() if mark in command and os.path.exists(f"/proc/{pid}")]
    found = found or [pid for pid in _descendants(os.getpid()) if mark in _command(pid)]
    if found:
        chosen = rng.choice(found)
        with contextlib.suppress(ProcessLookupError):
            os.kill([chosen, *_descendants(chosen)][-1], signal.SIGKILL)


def _remember_what_lasts(folder: Path) -> None:
    """Whatever is flushed survives the cut: note the sizes."""
    from kitae.store import journal, run_folder

    lock = threading.Lock()

    def noting(flush: Callable[[Path], None]) -> Callable[[Path], None]:
        def flush_and_note(path: Path) -> None:
            flush(path)
            if path.is_file():
                with lock, (folder / "lasting.txt").open("a") as file:
                    print(path.name, path.stat().st_size, _generation(path), file=file)

        return flush_and_note

    journal.flush, run_folder.flush = noting(journal.flush), noting(run_folder.flush)


def _generation(path: Path) -> str:
    """Of a write-ahead log: it changes when the log begins anew, which the database does only after a flush."""
    return path.read_bytes()[16:24].hex() or "-" if path.name.endswith("-wal") else "-"


def cut_the_power(run: Path, folder: Path, rng: random.Random) -> None:
    """Of what was written and not flushed, lose some; never what was flushed."""
    lasting: dict[str, tuple[int, str]] = {}
    if (folder / "lasting.txt").exists():
        for line in (folder / "lasting.txt").read_text().splitlines():
            name, size, generation = line.split()
            lasting[name] = int(size), generation
    for name in ("journal.sqlite-wal", "metrics.jsonl", "timeline.jsonl"):
        path = run / name
        if not path.exists():
            continue
        size, generation = lasting.get(name, (0, "-"))
        least = size if generation == _generation(path) else 0
        content = path.read_bytes()
        path.write_bytes(content[: rng.randint(min(least, len(content)), len(content))])
    (run / "journal.sqlite-shm").unlink(missing_ok=True)


def _at(owner: Any, method: str, count: int, after: bool, act: Callable[[], None]) -> None:
    """`act` before or after the count-th call."""
    original, lock, calls = getattr(owner, method), threading.Lock(), 0

    def is_it() -> bool:
        nonlocal calls
        with lock:
            calls += 1
            return calls == count

    def call(*arguments: Any, **settings: Any) -> Any:
        struck = is_it()
        if struck and not after:
            act()
        result = original(*arguments, **settings)
        if struck and after:
            act()
        return result

    async def wait(*arguments: Any, **settings: Any) -> Any:
        struck = is_it()
        if struck and not after:
            act()
        result = await original(*arguments, **settings)
        if struck and after:
            act()
        return result

    setattr(owner, method, wait if asyncio.iscoroutinefunction(original) else call)


def _around(where: str, method: str, count: int, change: Callable[..., Any]) -> None:
    """`change(original, …)` in place of the count-th call."""
    module, _, name = where.partition(":")
    owner = getattr(__import__(module, fromlist=[name]), name)
    original, calls = getattr(owner, method), 0

    def call(*arguments: Any, **settings: Any) -> Any:
        nonlocal calls
        calls += 1
        return (change if calls == count + 1 else _plainly)(original, *arguments, **settings)

    setattr(owner, method, call)


def _plainly(original: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    return original(*arguments, **settings)


def _delay(seconds: float) -> Callable[..., Any]:
    async def late(original: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        await asyncio.sleep(seconds)
        return await original(*arguments, **settings)

    return late


def _corrupt(seconds: float, then: Callable[[], None] | None) -> Callable[..., Any]:
    """One byte of what was written is another one, and so much later something else happens too."""

    def publish(original: Callable[..., Any], publisher: Any, *arguments: Any, **settings: Any) -> Any:
        manifest = original(publisher, *arguments, **settings)
        image, delta = publisher.descriptors
        where, offset = (delta, manifest.parts[0].offset) if manifest.parts else (image, manifest.entries[0].offset)
        os.pwrite(where, bytes([os.pread(where, 1, offset)[0] ^ 0x40]), offset)
        if then is not None:
            threading.Timer(seconds, then).start()
        return manifest

    return publish


def _descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *_descendants(child)]
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _birth(pid: int) -> str:
    """When a process began, which tells it from another one of the same number; "" if it has ended."""
    try:
        state, *found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state == "Z" else found[18]


def _child(folder: str, arguments: list[str], kind: str | None, seed: str, sort: str, steps: int) -> None:
    """The process of a run: `kitae` with these arguments, and perhaps a fault."""
    import torch

    from kitae.cli.main import run

    log = os.open(Path(folder) / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    warm = Server.forked().instead_of(asyncio.create_subprocess_exec, POSTS + VERIFIERS)
    asyncio.create_subprocess_exec = _noting(warm, Path(folder))  # type: ignore[assignment]
    if kind:
        strike(kind, random.Random(seed), sort, steps, Path(folder))
    sys.modules["matplotlib"] = None  # type: ignore[assignment]  # no picture at the end: it takes longer than the run
    sys.argv = ["kitae", *arguments]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _noting(start: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    async def start_and_note(*command: str, **options: Any) -> Any:
        process = await start(*command, **options)
        STARTED[process.pid] = words = " ".join(map(str, command))
        with (folder / "started.txt").open("a") as file:
            print(process.pid, _birth(process.pid), " ".join(words.split()), file=file)
        return process

    return start_and_note


class Trial:
    """One run in a folder of its own, and what happened to it."""

    def __init__(self, seed: int, folder: Path, kind: str | None = None) -> None:
        self.seed, self.folder = seed, folder
        self.kind = kind or KINDS[seed % len(KINDS)]
        self.plan = Plan.draw(seed, self.kind, folder)
        self.run = folder / "toy-001"
        self.rng = random.Random(f"trial {seed}")

    def __call__(self) -> str:
        """Run it, resume it until it is finished, check it; how the first process ended."""
        ended = ""
        known: dict[tuple[int, int], Any] = {}
        for attempt in range(8):
            faulty = attempt == 0 or (attempt == 1 and self.rng.random() < 0.5)
            code = self._start(attempt, self.kind if faulty else None)
            ended = ended or _ending(code)
            self.plan.outage.unlink(missing_ok=True)
            if self.kind == "cut the power" and code == -signal.SIGKILL:
                cut_the_power(self.run, self.folder, self.rng)
            elif not self._resumable():
                known = {}
            else:
                now = self._rollouts()
                assert all(now.get(key) == tokens for key, tokens in known.items()), self._say("a rollout is lost")
                known = now
            if code == 0 and (self.run / "model").exists():
                break
        else:
            raise AssertionError(self._say("does not finish"))
        self._check(self.plan.steps)
        if self.plan.repeats is not None:
            self._compare(self.plan.repeats)
        if self.plan.extended:
            steps = self.plan.steps + self.plan.extended
            assert self._run(["resume", str(self.run), f"training.steps={steps}"], None, "") == 0, self._say("extend")
            self._check(steps)
        return ended

    def _start(self, attempt: int, kind: str | None) -> int:
        if self._resumable():
            arguments = ["resume", str(self.run), *self.plan.later]
        else:
            shutil.rmtree(self.run, ignore_errors=True)
            arguments = ["train", str(self.plan.recipe), f"run.dir={self.folder}", *self.plan.settings]
        return self._run(arguments, kind, f"{self.seed}/{attempt}")

    def _run(self, arguments: list[str], kind: str | None, seed: str) -> int:
        values = (str(self.folder), arguments, kind, seed, self.plan.sort, self.plan.steps)
        process = context().Process(target=_child, args=values)
        process.start()
        process.join(LIMIT)
        if process.exitcode is None:
            process.kill()
            raise AssertionError(self._say("hangs"))
        return process.exitcode

    def _resumable(self) -> bool:
        """Not if it was killed while its folder was made."""
        return (self.run / "config.json").exists() and (self.run / "config.json").stat().st_size > 0

    def _rollouts(self) -> dict[tuple[int, int], Any]:
        from kitae.errors import StoreError
        from kitae.store.journal import Journal

        try:
            journal = Journal(self.run / "journal.sqlite", read_only=True)
        except StoreError:  # it had not been made
            return {}
        try:
            groups = range(journal.issued()[0])
            return {(r.group, r.index): r.segments for group in groups for r in journal.rollouts(group)}
        except sqlite3.OperationalError:
            return {}
        finally:
            journal.close()

    def _check(self, steps: int) -> None:
        from kitae.evaluation.held_out import evaluation_due

        config: Any = self.plan.config(self.folder, steps)
        if self.plan.sort != "offline":
            self._check_ledger(config, steps)
        found = rows(self.run)
        assert [r["step"] for r in found if r["kind"] == "step"] == list(range(1, steps + 1)), self._say("steps")
        due = {step for step in range(steps + 1) if evaluation_due(config, step, steps)}
        if self.plan.extended and due:
            due.add(self.plan.steps)
        evaluations = [(r["step"], r["avg"] is not None) for r in found if r["kind"] == "eval"]
        judged = [step for step, some in evaluations if some]  # what nobody could judge is asked again by a resumed run
        assert sorted({step for step, _ in evaluations}) == sorted(due), self._say("evaluations")
        assert judged == sorted(set(judged)), self._say("evaluations that were made again")
        left = [p.name for p in self.run.rglob("*partial*")]
        assert not left and (self.run / "model" / "config.json").exists(), self._say(f"left behind: {left}")
        self._check_processes()

    def _check_ledger(self, config: Any, steps: int) -> None:
        from test_async import check_ledger

        fates = check_ledger(self.run, config)
        if not config.pipeline.refill:
            assert fates["trained"] + fates["dropped"] == steps * PROMPTS, self._say(str(fates))
        if config.pipeline.max_staleness == 0:
            gaps = [r["logp_gap_max"] for r in rows(self.run) if "logp_gap_max" in r]
            most = 0.5 if config.engine.rounding else 1e-3
            assert max(gaps, default=0.0) < most, self._say(f"the engine sampled from other weights: {gaps}")

    def _check_processes(self) -> None:
        """None is left, some seconds after the end of the run."""
        deadline = time.monotonic() + 30
        started = self.folder / "started.txt"
        noted = [line.split(maxsplit=2) for line in started.read_text().splitlines()] if started.exists() else []
        while left := [command for pid, birth, command in noted if _birth(int(pid)) == birth]:
            assert time.monotonic() < deadline, self._say(f"processes are left: {left}")
            time.sleep(0.1)

    def _compare(self, within: float) -> None:
        """The same run without a fault has the same numbers, and its weights if it learns from a file."""
        arguments = ["train", str(self.plan.recipe), f"run.dir={self.folder / 'whole'}", *self.plan.settings]
        assert self._run(arguments, None, "") == 0, self._say("uninterrupted")
        whole = self.folder / "whole" / "toy-001"
        try:
            assert_same_metrics(self.run, whole, within)
        except AssertionError as error:
            raise AssertionError(self._say(f"other numbers than uninterrupted: {error}")) from None
        if self.plan.sort == "offline":
            (ours, theirs) = (load_file(next((run / "model").glob("*.safetensors"))) for run in (self.run, whole))
            assert ours.keys() == theirs.keys(), self._say("other weights than uninterrupted")
            for name, weight in ours.items():
                assert torch.allclose(weight, theirs[name], atol=1e-6), self._say(f"other weights: {name}")

    def _say(self, problem: str) -> str:
        output = (self.folder / "output.txt").read_text()[-3000:]
        return f"trial {self.seed} ({self.plan.sort}, {self.kind}): {problem}\n{' '.join(self.plan.settings)}\n{output}"


LIMIT = 240.0  # seconds for one process of a run


def _ending(code: int) -> str:
    return {0: "ended well", 1: "ended with an error", -signal.SIGKILL: "was killed"}.get(code, f"exit status {code}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no trial after so long")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Counter[str]] = {name: Counter() for name in (*KINDS, *SORTS)}
    ends = time.monotonic() + arguments.seconds

    def one(seed: int) -> None:
        if time.monotonic() > ends:
            return
        folder = Path(tempfile.mkdtemp(prefix=f"trial-{seed}-", dir=arguments.folder))
        kind, sort = KINDS[seed % len(KINDS)], "plain"
        try:
            trial = Trial(seed, folder)
            sort = trial.plan.sort
            ended = trial()
            shutil.rmtree(folder)
        except Exception:  # whatever it is, the other trials go on
            ended = "FAILED"
            print(f"{folder}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        found[kind][ended] += 1
        found[sort][ended] += 1

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(one, range(arguments.first, arguments.first + arguments.trials)))
    for kind, endings in found.items():
        print(f"{kind:20} {', '.join(f'{count} × {how}' for how, count in endings.most_common())}")
    done = sum(found[kind].total() for kind in KINDS)
    failed = sum(found[kind]["FAILED"] for kind in KINDS)
    print(f"{done} trials from seed {arguments.first}, {failed} with something lost, trained twice, stuck or different")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
