"""One trial: a run that something happens to, resumed until it is finished. Everything follows from the seed.

    python tests/integration/faults.py [--trials 200] [--first 0] [--folder DIR]     all kinds in turn, and a table

A trial runs the command line in a forked process (the imports are done once, in multiprocessing's fork server). The
fault strikes at the n-th call of some function of the run, drawn from the seed: before or after it.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import HERE, RECIPE, toy_config

STEPS, PROMPTS, SAMPLES = 4, 3, 4

KINDS = (
    "kill the run",
    "interrupt the run",
    "kill a verifier",
    "fail in the trainer",
    "full disk",
    "clock jump",
    "freeze the run",
    "kill the engine",
    "corrupt an update",
    "delay an update",
)
OWN_PROCESS = KINDS[-3:]  # the engine has a process of its own


def settings_of(seed: int, kind: str) -> list[str]:
    """What the run is like: on-policy or stale, with refills, with overdue groups dropped, …"""
    rng = random.Random(f"settings {seed}")
    stale = rng.choice([0, 1, 2, 3])
    settings = [
        f"verifier.name={HERE / 'toy.py'}:digits",
        f"run.seed={seed}",
        f"training.steps={STEPS}",
        f"training.prompts_per_step={PROMPTS}",
        f"training.group_size={SAMPLES}",
        f"checkpoint.every={rng.choice([1, 2, 3])}",
        f"pipeline.max_staleness={stale}",
        f"pipeline.in_flight={rng.choice(['keep', 'recompute'])}",
        f"sampling.max_tokens={rng.choice([6, 40])}",
        f"pipeline.snapshot_seconds={rng.choice([0.05, 30])}",
        f"verifier.workers={rng.choice([1, 2])}",
        "eval.prompts=0",
        "verifier.check_gold=false",
    ]
    if stale and rng.random() < 0.4:
        settings.append("pipeline.overdue=drop")
    if rng.random() < 0.4:
        settings += ["algorithm.filter=zero-variance", "pipeline.refill=true", "pipeline.max_refill=5"]
        settings[0] = f"verifier.name={HERE / 'toy.py'}:any_digit"
    if kind in OWN_PROCESS:
        settings += ["pipeline.placement=process", f"pipeline.sync={rng.choice(['full', 'delta'])}"]
    return settings


def _points() -> list[tuple[Any, str, int]]:
    """Functions of a run at which a fault may strike, with about how often they are called."""
    from kitae.store.checkpoint import Checkpoints
    from kitae.store.journal import Journal
    from kitae.store.run import Metrics
    from kitae.trainer.learner import Learner
    from kitae.trainer.trainer import Trainer

    return [
        (Journal, "add_prompt", STEPS * PROMPTS),
        (Journal, "add_rollout", STEPS * PROMPTS * SAMPLES),
        (Journal, "add_fates", STEPS),
        (Learner, "learn", STEPS),
        (Trainer, "optim_step", STEPS),
        (Checkpoints, "save", 2),
        (Metrics, "append", STEPS),
    ]


def strike(kind: str, rng: random.Random) -> None:
    """Arrange for the fault, in the process of the run."""
    if kind == "full disk":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limit = rng.choice([20_000, 60_000, 200_000, 1_000_000])
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    elif kind == "clock jump":
        jumps, real = rng.choice([-1e6, 1e6]), time.time
        time.time = lambda: real() + (jumps if rng.random() < 0.5 else 0.0)
    elif kind == "delay an update":
        _around("kitae.engines.process:ProcessEngine", "update_weights", rng.randint(0, STEPS), _delay(rng.random()))
    elif kind == "corrupt an update":
        _around("kitae.engines.transport:WeightTransport", "publish", rng.randint(1, STEPS), _corrupt)
    else:
        owner, method, calls = rng.choice(_points())
        _at(owner, method, rng.randint(1, calls), rng.random() < 0.5, lambda: _now(kind))


def _now(kind: str) -> None:
    me = os.getpid()
    if kind == "kill the run":
        os.kill(me, signal.SIGKILL)
    elif kind == "interrupt the run":
        os.kill(me, signal.SIGINT)
    elif kind == "fail in the trainer":
        raise MemoryError("a fault for the test")
    elif kind == "freeze the run":
        subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {me}"])
        os.kill(me, signal.SIGSTOP)
    elif kind in ("kill a verifier", "kill the engine"):
        mark = "kitae.engines.serve" if "engine" in kind else "kitae.verifiers"
        victims = [pid for pid in _descendants(me) if mark in _command(pid)]
        for pid in victims[-1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


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


def _corrupt(original: Callable[..., Any], transport: Any, *arguments: Any, **settings: Any) -> Any:
    """One byte of what was written is another one."""
    published = original(transport, *arguments, **settings)
    if published.parts:
        written = transport._delta.array(np.dtype(np.uint8), 1, published.parts[0].offset)
    else:
        written = transport._view(published.names[0]).view(np.uint8)
    written[0] ^= 0x40
    return published


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


def _child(folder: str, arguments: list[str], kind: str | None, seed: str) -> None:
    """The process of a run: `kitae` with these arguments, and perhaps a fault."""
    import torch

    from kitae.cli.main import run

    log = os.open(Path(folder) / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    if kind:
        strike(kind, random.Random(seed))
    sys.argv = ["kitae", *arguments]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def trial(seed: int, folder: Path, kind: str | None = None) -> str:
    """Run one trial and check its ledger; how the first process ended."""
    from test_async import check_ledger

    kind = kind or KINDS[seed % len(KINDS)]
    rng = random.Random(f"trial {seed}")
    settings = settings_of(seed, kind)
    run = folder / "toy-001"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kitae.pipeline.session", "kitae.cli.training", "torch", "harness"])
    ended = ""
    for attempt in range(8):
        there = bool(list((run / "checkpoints").glob("step-*"))) if run.exists() else False
        if run.exists() and not there:
            shutil.rmtree(run)  # it ended before its first checkpoint: there is nothing to resume
        arguments = ["resume", str(run)] if there else ["train", str(RECIPE), f"run.dir={folder}", *settings]
        faulty = attempt == 0 or (attempt == 1 and rng.random() < 0.5)
        process = context.Process(
            target=_child, args=(str(folder), arguments, kind if faulty else None, f"{seed}/{attempt}")
        )
        process.start()
        process.join(150)
        if process.exitcode is None:
            process.kill()
            raise AssertionError(f"trial {seed} ({kind}): hangs\n{(folder / 'output.txt').read_text()[-3000:]}")
        ended = ended or _ending(process.exitcode)
        if process.exitcode == 0 and (run / "model").exists():
            break
    else:
        raise AssertionError(f"trial {seed} ({kind}): does not finish\n{(folder / 'output.txt').read_text()[-3000:]}")
    fates = check_ledger(run, toy_config(folder, *settings))
    assert fates["trained"] + fates["dropped"] >= STEPS * PROMPTS, fates
    return ended


def _ending(code: int) -> str:
    return {0: "ended well", 1: "ended with an error", -signal.SIGKILL: "was killed"}.get(code, f"exit status {code}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for seed in range(arguments.first, arguments.first + arguments.trials):
        folder = Path(tempfile.mkdtemp(prefix=f"trial-{seed}-", dir=arguments.folder))
        kind = KINDS[seed % len(KINDS)]
        try:
            found[kind][trial(seed, folder)] += 1
            shutil.rmtree(folder)
        except AssertionError as problem:
            found[kind]["FAILED"] += 1
            print(f"{folder}: {problem}", file=sys.stderr)
    for kind, endings in found.items():
        print(f"{kind:20} {', '.join(f'{count} × {how}' for how, count in endings.most_common())}")
    failed = sum(endings["FAILED"] for endings in found.values())
    print(f"{arguments.trials} trials, {failed} with something lost, trained twice or stuck")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
