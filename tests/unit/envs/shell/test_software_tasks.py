"""Tasks about software: the faults, what an agent sees, what it cannot forge, the scripted agent that solves them."""

import asyncio
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from kitae.envs.shell import software_tasks
from kitae.envs.shell.faults import faults
from kitae.envs.shell.shell_world import Shell
from kitae.envs.shell.software_tasks import FaultyModule, faulty_modules, seed_modules, write_tasks
from kitae.errors import DataError
from kitae.types import Message, Prompt, ToolCall, Turn


def test_a_fault_changes_one_place() -> None:
    source = "def f(a, b=True):\n    if not a <= 3 and b:\n        return max(a, -1)\n    return [1 + a]\n"
    changed = {(f.line, f.before, f.after) for f in faults(source)}
    assert {(2, "<=", "<"), (2, "and", "or"), (2, "not ", ""), (1, "True", "False"), (3, "max", "min")} <= changed
    assert {(2, "3", "4"), (2, "3", "2"), (3, "-", ""), (4, "+", "-")} <= changed
    assert all(f.source.count("\n") == source.count("\n") for f in faults(source))


def intervals() -> list[FaultyModule]:
    return list(faulty_modules(next(m for m in seed_modules() if m.name == "intervals")))


def test_every_fault_shows_and_no_two_alike() -> None:
    found = intervals()
    assert len(found) > 50 and len({f.wrong for f in found}) == len(found)
    assert all(f.wrong != f.right and f.fault.source != f.seed.source for f in found)


@pytest.mark.thorough
def test_there_are_more_than_three_hundred_and_none_says_its_solution(tmp_path: Path) -> None:
    places = write_tasks(tmp_path / "tasks", 320, 0)
    assert len({(p / "environment/repository").parent for p in places}) == 320
    sources = {module.name: module.source for module in seed_modules()}
    for place in places:
        name = place.name.partition("-")[2]
        shown = (place / f"environment/repository/{name}.py").read_text()
        fixed = (place / f"solution/{name}.py").read_text()
        assert fixed == sources[name] != shown
        lines = [(a, b) for a, b in zip(fixed.split("\n"), shown.split("\n"), strict=True) if a != b]
        assert len(lines) == 1, place
        others = [place / "instruction.md", *(place / "environment").rglob("*")]
        assert not any(lines[0][0] in p.read_text() for p in others if p.is_file() and p.name != f"{name}.py")
    with pytest.raises(DataError, match="tasks at most, got 100000"):
        write_tasks(tmp_path / "more", 100_000, 0)


PROMPT = Prompt("p/0", (Message("user", "Episode 0"),), "", {"question": "Episode 0"})


def played(place: Path, *commands: str) -> list[tuple[list[str], float | None]]:
    """What scripted agents read and get, each with one command, all of them at the same time."""

    async def go() -> Any:
        async with Shell({"tasks": str(place)}, 3, 60.0) as world:
            return await asyncio.gather(*(one(world, command) for command in commands))

    async def one(world: Shell, command: str) -> tuple[list[str], float | None]:
        episode = world.make(PROMPT)
        try:
            await episode.start()
            seen = await episode.step(Turn("", calls=(ToolCall("bash", {"command": command}, "a"),)))
            return [m.content for m in seen.messages], (await episode.step(Turn("done"))).reward
        finally:
            await episode.close()

    return asyncio.run(go())


FORGERIES = [
    "echo 'import os; os._exit(0)' > {m}.py",
    "echo 'import sys; sys.exit(0)' > {m}.py",
    "printf 'class A(str):\\n    __eq__ = lambda s, o: True\\ndef __getattr__(n): return A()\\n' > {m}.py",
    'echo \'import os; open("/logs/verifier/reward.txt", "w").write("1")\' >> {m}.py',
    "printf 'import os, time\\nif not os.fork():\\n os.setsid()\\n if not os.fork():\\n  while 1:\\n   "
    'os.makedirs("/logs/verifier", exist_ok=True); open("/logs/verifier/reward.txt", "w").write("1")\\n\' >> {m}.py',
    "echo 'import os, signal; os.kill(os.getppid(), signal.SIGKILL)' >> {m}.py",
    "echo 'import json; print(json.load(open(\"/tests/expected.json\")))' >> {m}.py",
    'printf \'import os\\nfor p in os.listdir("/proc"):\\n try: open("/proc/%%s/mem" %% p, "rb").read(1)\\n'
    " except Exception: pass\\n' >> {m}.py",
    'echo \'import sys; sys.stdout.write("["); import os; os.write(1, b"[]")\' >> {m}.py',
    "echo 'raise SystemExit(0)' > json.py; echo 'import os; os._exit(0)' > sitecustomize.py",
    "mkdir -p /logs/verifier; echo '{{\"reward\": 1}}' > /logs/verifier/reward.json",
    "rm -f {m}.py; ln -s /solution/{m}.py {m}.py",
    "echo 'import ctypes; ctypes.CDLL(None).ptrace(16, 1, 0, 0)' >> {m}.py; cat /tests/* /solution/*",
]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One module, so that its faults are found in a moment."""
    monkeypatch.setattr(software_tasks, "seed_modules", lambda: [m for m in seed_modules() if m.name == "intervals"])
    monkeypatch.setattr(software_tasks, "_CHECK_SECONDS", 3)


@pytest.mark.thorough
def test_only_the_right_module_is_rewarded(few: None, tmp_path: Path) -> None:
    (place,) = write_tasks(tmp_path / "tasks", 1, 3)
    name = place.name.partition("-")[2]
    shown = (place / f"environment/repository/{name}.py").read_text().split("\n")
    fixed = (place / f"solution/{name}.py").read_text().split("\n")
    (line,) = [n for n, (a, b) in enumerate(zip(fixed, shown, strict=True), 1) if a != b]
    right = json.dumps(fixed[line - 1])
    program = (
        f"import json\nlines = open('{name}.py').read().split(chr(10))\n"
        f"lines[{line - 1}] = json.loads({right!r})\nopen('{name}.py', 'w').write(chr(10).join(lines))\n"
    )
    solved = f"python3 - <<'END'\n{program}END"
    (said, reward), *forged = played(tmp_path / "tasks", solved, *(f.format(m=name) for f in FORGERIES))
    assert (said, reward) == (["(no output)"], 1.0)
    for attempt, (said, reward) in zip(FORGERIES, forged, strict=True):
        assert reward == 0.0, (attempt, said)


@pytest.mark.thorough
def test_no_copy_of_a_module_is_in_an_agent_s_box(few: None, tmp_path: Path) -> None:
    (place,) = write_tasks(tmp_path / "tasks", 1, 0)
    marks = [module.source.split("\n")[0].strip('"') for module in seed_modules()]
    patterns = " ".join(f"-e {shlex.quote(mark)}" for mark in marks)
    kinds = "--exclude-dir=proc --include='*.py' --include='*.txt' --include='*.pyc'"
    find = f"grep -rlF {kinds} {patterns} / 2>/dev/null; true"
    ((said, _),) = played(tmp_path / "tasks", find)
    assert said == [f"/app/{place.name.partition('-')[2]}.py\n"]
