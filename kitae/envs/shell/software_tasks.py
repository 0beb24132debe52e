"""Tasks about software: small modules, each with one fault, which an agent finds and corrects.

The modules (`seeds/`) are Kitae's own and nowhere else in a box. A fault counts if calls of the module give something
else with it, and every call still ends. The agent sees the module, one call that goes wrong, and half of the calls
that do not; the hidden tests are all calls. A task is a folder in the format of Harbor (`task_folders`).
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import ModuleType

from kitae.envs.shell.faults import Fault, faults
from kitae.errors import DataError
from kitae.workers.interruptible_calls import CutShort, briefly

_SECONDS = 0.1  # for all calls of a module; most take a millisecond
_CHECK_SECONDS = 20  # for all calls of a module that an agent has left
_CALLS = "# calls\n"
_MOST_BROKEN = 0.8  # of all calls: beyond, the module just does not work
_TASK = """version = "1.0"
artifacts = ["/app"]

[metadata]
module = "{module}"
line = {line}

[verifier]
timeout_sec = 60.0

[agent]
timeout_sec = 600.0

[environment]
memory_mb = 512
storage_mb = 64
allow_internet = false
"""
_INSTRUCTION = """The module {module}.py has one fault, in one line. With `from {module} import *`,

    {call}

gives {wrong}, but it should give {right}. Find the fault and correct it in /app/{module}.py. Change nothing else: other
calls are tested, too. `python3 examples.py` tries some that are right already.
"""
_EXAMPLES = """from {module} import *

for call, right in {pairs}:
    try:
        found = repr(eval(call))
    except Exception as problem:
        found = type(problem).__name__
    print("right" if found == right else "WRONG: " + call + " gives " + found + " instead of " + right)
"""


@dataclass(frozen=True, slots=True)
class SeedModule:
    """A module without a fault, and calls of it: `SeedModule("roman", "…", ("to_roman(4)", …))`."""

    name: str
    source: str
    calls: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FaultyModule:
    """right, wrong: what the calls give without and with the fault."""

    seed: SeedModule
    fault: Fault
    right: tuple[str, ...]
    wrong: tuple[str, ...]


def seed_modules() -> list[SeedModule]:
    found = []
    for file in sorted((resources.files("kitae.envs.shell") / "seeds").iterdir(), key=lambda file: file.name):
        source, _, calls = file.read_text("utf-8").partition(_CALLS)
        found.append(SeedModule(file.name.removesuffix(".txt"), source, tuple(calls.split("\n")[:-1])))
    return found


def faulty_modules(seed: SeedModule) -> Iterator[FaultyModule]:
    """All faults of a module that its calls show, each of which shows otherwise than those before."""
    right = _given(seed.name, seed.source, seed.calls)
    assert right is not None, f"the module {seed.name} must work"
    known = set[tuple[str, ...]]()
    for fault in faults(seed.source):
        wrong = _given(seed.name, fault.source, seed.calls)
        if wrong is None or wrong in known:
            continue
        broken = sum(a != b for a, b in zip(right, wrong, strict=True))
        if 0 < broken <= _MOST_BROKEN * len(right):
            known.add(wrong)
            yield FaultyModule(seed, fault, right, wrong)


def write_tasks(folder: Path, count: int, seed: int) -> list[Path]:
    """So many tasks, of all modules alike, drawn by the seed. Raises `DataError` if there are not as many."""
    rng = random.Random(seed)
    found = {module.name: list(faulty_modules(module)) for module in seed_modules()}
    for modules in found.values():
        rng.shuffle(modules)
    most = sum(map(len, found.values()))
    if count > most:
        raise DataError(f"there are {most} tasks at most, got {count}")
    chosen = list[FaultyModule]()
    while len(chosen) < count:
        for modules in found.values():
            if modules and len(chosen) < count:
                chosen.append(modules.pop())
    return [_write(folder, number, module, rng) for number, module in enumerate(chosen)]


def _given(name: str, source: str, calls: Sequence[str]) -> tuple[str, ...] | None:
    """What the calls give; None if the module cannot be loaded, or a call does not end."""

    def work() -> tuple[str, ...]:
        module = ModuleType(name)
        exec(compile(source, f"{name}.py", "exec"), module.__dict__)
        return tuple(_one(call, module) for call in calls)

    try:
        return briefly(_SECONDS, work)
    except (CutShort, Exception):
        return None


def _one(call: str, module: ModuleType) -> str:
    try:
        return repr(eval(call, dict(module.__dict__)))
    except Exception as problem:
        return type(problem).__name__


def _write(folder: Path, number: int, module: FaultyModule, rng: random.Random) -> Path:
    seed, name = module.seed, module.seed.name
    told = list(zip(seed.calls, module.right, module.wrong, strict=True))
    call, right, wrong = rng.choice([one for one in told if one[1] != one[2]])
    fine = [(c, r) for c, r, w in told if r == w]
    check = (resources.files("kitae.envs.shell") / "check.txt").read_text("utf-8")
    shown = sorted(rng.sample(fine, len(fine) // 2))
    files = {
        "instruction.md": _INSTRUCTION.format(module=name, call=call, right=right, wrong=wrong),
        "task.toml": _TASK.format(module=name, line=module.fault.line),
        "environment/Dockerfile": "FROM python:3.12-slim\nWORKDIR /app\nCOPY repository/ /app/\n",
        f"environment/repository/{name}.py": module.fault.source,
        "environment/repository/examples.py": _EXAMPLES.format(module=name, pairs=shown),
        "tests/test.sh": "#!/bin/sh\nexec python3 /tests/check.py\n",
        "tests/check.py": check.replace("SECONDS = 20", f"SECONDS = {_CHECK_SECONDS}"),
        "tests/expected.json": json.dumps([name, [[c, r] for c, r, _ in told]]),
        "solution/solve.sh": f"#!/bin/sh\ncp /solution/{name}.py /app/{name}.py\n",
        f"solution/{name}.py": seed.source,
    }
    place = folder / f"{number:04}-{name}"
    for path, text in files.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text, "utf-8")
    return place
