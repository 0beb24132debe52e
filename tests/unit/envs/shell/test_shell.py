"""Agents with a shell: task folders and rows as they are, tests in a second box, what agents cannot forge."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kitae.envs.shell.dockerfile import read_dockerfile
from kitae.envs.shell.shell_task import Do, Put, TaskRefused
from kitae.envs.shell.shell_world import Shell
from kitae.envs.shell.task_folders import read_folder
from kitae.errors import ConfigError
from kitae.sandbox.backends import packages_path
from kitae.types import Message, Prompt, ToolCall, Turn

TASK = """
version = "1.0"
[metadata]
difficulty = "easy"
[verifier]
timeout_sec = 20.0
[agent]
timeout_sec = 60.0
[environment]
memory = "512M"
storage = "100M"
allow_internet = false
"""
TESTS = """#!/bin/bash
mkdir -p /logs/verifier
if grep -q 'hello world' /app/hello.txt && [ "$(cat /app/data/seed.txt)" = "$EXPECTED" ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""


def folder(place: Path, name: str = "hello", dockerfile: str = "", task: str = TASK, **files: str) -> Path:
    inside = {
        "instruction.md": "Write 'hello world' into hello.txt.",
        "task.toml": task + '\n[verifier.env]\nEXPECTED = "seed"\n',
        "environment/Dockerfile": dockerfile
        or "FROM python:3.12-slim\n# what it needs\nWORKDIR /app\nCOPY data/ ./data/\n"
        "RUN apt-get update && rm -rf /var/lib/apt/lists/* && \\\n    echo built > built.txt\nENV MODE=fast\n",
        "environment/data/seed.txt": "seed\n",
        "tests/test.sh": TESTS,
        "solution/solve.sh": "#!/bin/bash\necho 'hello world' > /app/hello.txt\n",
        **{key.replace("__", "/"): text for key, text in files.items()},
    }
    for path, text in inside.items():
        (place / name / path).parent.mkdir(parents=True, exist_ok=True)
        (place / name / path).write_text(text)
    return place / name


def shell(place: Path, work: Callable[[Shell], Awaitable[Any]], turns: int = 6, **params: Any) -> Any:
    async def go() -> Any:
        async with Shell({"tasks": str(place), **params}, turns, 60.0) as world:
            return await work(world)

    return asyncio.run(go())


PROMPT = Prompt("p/0", (Message("user", "Episode 0"),), "", {"question": "Episode 0"})


async def played(world: Shell, *commands: str, end: bool = True) -> tuple[list[str], float | None]:
    """What a scripted agent reads, and the reward of its last turn."""
    episode = world.make(PROMPT)
    try:
        await episode.start()
        said = list[str]()
        for command in commands:
            seen = await episode.step(Turn("", calls=(ToolCall("bash", {"command": command}, "a"),)))
            said += [m.content for m in seen.messages]
            if seen.done:
                return said, seen.reward
        seen = await episode.step(Turn("done")) if end else seen
        return said, seen.reward
    finally:
        await episode.close()


def test_a_folder_of_harbor_runs_as_it_is(tmp_path: Path) -> None:
    folder(tmp_path)

    async def work(world: Shell) -> None:
        (task,) = world.tasks.values()
        assert (await world.tried(task, solve=True))[0] == 1.0
        assert (await world.tried(task, solve=False))[0] == 0.0
        said, reward = await played(world, "pwd; cat built.txt; cd data; X=7", "pwd; echo $X; ls /tests /solution")
        assert said[0] == "/app\nbuilt\n" and reward == 0.0
        assert said[1].startswith("/app/data\n7\n") and said[1].count("No such file") == 2
        assert (await played(world, "echo hello world > hello.txt"))[1] == 1.0

    shell(tmp_path, work)


def test_the_last_turn_is_judged_too(tmp_path: Path) -> None:
    folder(tmp_path)

    async def work(world: Shell) -> None:
        assert await played(world, "echo hello world > hello.txt", "true", end=False) == (
            ["(no output)", "(no output)", "The tests give 1.\n"], 1.0
        )  # fmt: skip

    shell(tmp_path, work, turns=2)


def test_files_are_read_written_and_edited(tmp_path: Path) -> None:
    folder(tmp_path)

    async def work(world: Shell) -> None:
        episode = world.make(PROMPT)
        opening = await episode.start()
        assert [t["function"]["name"] for t in opening.tools] == ["bash", "read_file", "write_file", "edit_file"]
        assert "You work in /app" in opening.messages[0].content

        async def call(name: str, **arguments: str) -> str:
            seen = await episode.step(Turn("", calls=(ToolCall(name, arguments, "a"),)))
            assert seen.reward == 0.0
            return seen.messages[0].content

        assert await call("write_file", path="a/b.py", content="x = 1\nx = 2\n") == "wrote a/b.py"
        assert "it occurs 2 times" in await call("edit_file", path="a/b.py", old="x", new="y")
        assert await call("edit_file", path="/app/a/b.py", old="x = 2", new="y = 2") == "changed /app/a/b.py"
        assert await call("read_file", path="a/b.py") == "x = 1\ny = 2\n"
        assert (await call("read_file", path="/nothing")).startswith("Error: ")
        await episode.close()

    shell(tmp_path, work, turns=9)


KEPT = '\nartifacts = ["/app"]\n' + TASK


def test_an_agent_cannot_reach_what_judges_it(tmp_path: Path) -> None:
    """Each line would give it the reward if it came through to the second box."""
    folder(tmp_path, task=KEPT)
    attempts = [
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
        "(while true; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; done) & true",
        "cd /root; mkdir -p .local/bin; printf '#!/bin/sh\\nexit 0\\n' > .local/bin/grep; chmod +x .local/bin/grep",
        "echo 'alias grep=true; grep() { return 0; }' > /root/.bashrc; cp /root/.bashrc /root/.profile",
        "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod +x /tests/test.sh",
        "rm -rf data; ln -s /root data; ln -s /root/.local/bin x",
        "export EXPECTED=; export BASH_ENV=/app/evil; echo 'echo 1 > /logs/verifier/reward.txt; exit' > /app/evil",
        "echo 'seed' > /app/.env; mkfifo hello.txt; (while true; do echo hello world > hello.txt; done) & true",
    ]

    async def work(world: Shell) -> None:
        for attempt in attempts:
            assert (await played(world, attempt))[1] == 0.0, attempt

    shell(tmp_path, work)


def test_what_needs_an_engine_is_refused_by_its_line(tmp_path: Path) -> None:
    cases = {
        "FROM nvidia/cuda:12\n": "Dockerfile:1: only an image of Python",
        "FROM python:3.12\nCOPY --from=x a b\n": "Dockerfile:2: COPY from another stage",
        "FROM debian:12\n\nADD http://a/b /c\n": "Dockerfile:3: ADD of an address",
        "FROM debian:12\nCOPY missing /c\n": "there is no 'missing'",
        "FROM debian:12\nCOPY ../x /c\n": "there is no '../x'",
        "FROM debian:12\nONBUILD RUN x\n": "Dockerfile:2: ONBUILD",
        "FROM debian:12 AS one\n": "Dockerfile:1",
    }
    (tmp_path / "x").write_text("")
    for n, (text, complaint) in enumerate(cases.items()):
        with pytest.raises(TaskRefused, match=complaint):
            read_folder(folder(tmp_path, f"t{n}", text))
    with pytest.raises(ConfigError, match=r"none of the tasks can be run here. .*only an image"):
        Shell({"tasks": str(tmp_path / "t0")}, 2, 60)
    with pytest.raises(ConfigError, match=r"no folder with a task\.toml"):
        Shell({"tasks": str(tmp_path / "t0" / "tests")}, 2, 60)


def test_a_line_that_fails_is_named(tmp_path: Path) -> None:
    folder(tmp_path, dockerfile="FROM ubuntu:24.04\nWORKDIR /app\nRUN echo so && no-such-program\n")

    async def work(world: Shell) -> None:
        with pytest.raises(TaskRefused, match=r"environment/Dockerfile:3 fails here: so\n.*no-such-program"):
            await played(world, "true")

    shell(tmp_path, work)


def test_a_dockerfile_as_steps(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    path = tmp_path / "Dockerfile"
    begin = 'FROM python:3.11\nARG V=2\nENV A=b C="d e"\nWORKDIR /x/$A\n'
    path.write_text(f'{begin}COPY a.txt .\nRUN ["echo", "hi"]\nCMD ["sh"]\n')
    built = read_dockerfile(path)
    assert built.variables == {"V": "2", "A": "b", "C": "d e"} and built.folder == "/x/b"
    puts = [s for s in built.steps if isinstance(s, Put)]
    dos = [s for s in built.steps if isinstance(s, Do)]
    assert [p.path for p in puts] == ["/x/b/a.txt"] and dos[-1].command.endswith("C='d e'\necho hi")


def repository(place: Path) -> str:
    """A repository with a fault, as git has it; returns its commit."""
    files = {"calc.py": "def add(a, b):\n    return a - b\n", "tests/test_calc.py": "from calc import add\n"}
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    run = ["git", "-C", str(place), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q", str(place)], check=True)
    subprocess.run([*run, "add", "-A"], check=True)
    subprocess.run([*run, "commit", "-qm", "one"], check=True)
    return subprocess.run([*run, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()


def test_rows_of_swe_bench_run_as_they_are(tmp_path: Path) -> None:
    base = repository(tmp_path / "repositories" / "own" / "calc")
    test_patch = (
        "--- a/tests/test_calc.py\n+++ b/tests/test_calc.py\n@@ -1 +1,7 @@\n from calc import add\n+\n"
        "+def test_add():\n+    assert add(2, 3) == 5\n+\n+def test_zero():\n+    assert add(2, 0) == 2\n"
    )
    patch = "--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"
    command = f"env PYTHONPATH={packages_path()} {os.path.realpath(sys.executable)} -m pytest"
    row = {
        "instance_id": "own__calc-1", "repo": "own/calc", "base_commit": base, "problem_statement": "add subtracts",
        "patch": patch, "test_patch": test_patch, "FAIL_TO_PASS": json.dumps(["tests/test_calc.py::test_add"]),
        "PASS_TO_PASS": ["tests/test_calc.py::test_zero"], "test_command": command,
    }  # fmt: skip
    other = {**row, "instance_id": "x", "repo": "no/where"}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(other)}\n")

    async def work(world: Shell) -> None:
        assert world.refused and "no repository 'no/where'" in world.refused[0]
        (task,) = world.tasks.values()
        reward, words = await world.tried(task, solve=True)
        assert reward == 1.0 and words.endswith("0 of 2 tests fail:"), words
        assert "1 of 2 tests fail: tests/test_calc.py::test_add" in (await world.tried(task, solve=False))[1]
        said, reward = await played(world, "git log --oneline; cat tests/test_calc.py; sed -i 's/-/+/' calc.py")
        assert "base" in said[0] and "assert" not in said[0] and reward == 1.0

    settings = {"repositories": str(tmp_path / "repositories"), "readable": [packages_path()]}
    shell(tmp_path / "rows.jsonl", work, **settings)
