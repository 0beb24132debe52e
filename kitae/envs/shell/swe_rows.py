"""Tasks as rows, in the format of SWE-bench and its kin, read as they are; a JSON object in each line.

    {"instance_id": "a__b-1", "repo": "a/b", "base_commit": "…", "problem_statement": "…", "patch": "…",
     "test_patch": "…", "FAIL_TO_PASS": ["tests/test_x.py::test_y"], "PASS_TO_PASS": […]}

The repository is a folder `owner/name` (or `owner__name`) of `env.params.repositories`, which git can read. The agent
finds it in /testbed, without its history. The tests of both lists run by pytest, in a box that has the files of
`test_patch`; the reward is 1 where all of them pass. A row may say `test_command` instead of `python3 -m pytest`.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from kitae.envs.shell.shell_task import Do, Put, ShellTask, TaskRefused
from kitae.errors import ConfigError
from kitae.sandbox.boxes.base import BoxLimits

_FOLDER = "/testbed"
_SECONDS = 1800.0
_FILES = re.compile(r"^(?:---|\+\+\+) [ab]/(\S+)", re.MULTILINE)
_SETUP = (
    f"mkdir -p {_FOLDER} && cd {_FOLDER} && tar -xf /tmp/base.tar && rm /tmp/base.tar && git init -q . && "
    "git add -A && git -c user.name=a -c user.email=a@b commit -qm base"
)
_JUDGE = r"""
import json, subprocess, sys, xml.etree.ElementTree as tree
told = json.load(open("/tests/tests.json"))
options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "--junitxml=/tests/found.xml"]
subprocess.run([*told["command"], *options, *told["tests"]], cwd="/testbed")
passed = set()
for case in tree.parse("/tests/found.xml").iter("testcase"):
    if not any(part.tag in ("failure", "error", "skipped") for part in case):
        passed.add((case.get("classname"), case.get("name")))
def found(name):
    path, *inside = name.split("::")
    return (".".join([path.removesuffix(".py").replace("/", "."), *inside[:-1]]), inside[-1]) in passed
failed = [name for name in told["tests"] if not found(name)]
print(len(failed), "of", len(told["tests"]), "tests fail:", *failed[:10])
open("/logs/verifier/reward.txt", "w").write("0" if failed else "1")
"""


def read_rows(file: Path, repositories: Path, refused: list[str]) -> dict[str, ShellTask]:
    """The tasks by their names; what cannot be run is told in `refused`."""
    found = dict[str, ShellTask]()
    for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            found[row["instance_id"]] = _task(row, repositories)
        except TaskRefused as refusal:
            refused.append(f"{file.name}:{number}: {refusal}")
        except (ValueError, KeyError, TypeError) as problem:
            raise ConfigError(f"{file}:{number} is no row of a task: {type(problem).__name__}: {problem}") from None
    return found


def _task(row: dict[str, Any], repositories: Path) -> ShellTask:
    owner, _, name = row["repo"].partition("/")
    places = [repositories / owner / name, repositories / f"{owner}__{name}", repositories / name]
    place = next((p for p in places if p.is_dir()), None)
    if place is None:
        raise TaskRefused(
            f"there is no repository {row['repo']!r} below env.params.repositories = {str(repositories)!r}"
        )
    base = row["base_commit"]
    tests = [*_listed(row["FAIL_TO_PASS"]), *_listed(row["PASS_TO_PASS"])]
    if not tests or any("::" not in test for test in tests):
        raise TaskRefused("FAIL_TO_PASS and PASS_TO_PASS must name tests of pytest, path::name")
    command = row.get("test_command", "python3 -m pytest").split()
    return ShellTask(
        name=row["instance_id"],
        instruction=row["problem_statement"].strip(),
        folder=_FOLDER,
        steps=(Put("/tmp/base.tar", _git(place, "archive", base)), Do(_SETUP, "/", "base_commit")),
        tests=(
            Put("/tests/tests.json", json.dumps({"command": command, "tests": tests}).encode()),
            Put("/tests/judge.py", _JUDGE.encode()),
            *_patched(place, base, row["test_patch"]),
        ),
        judge="python3 /tests/judge.py",
        judge_seconds=_SECONDS,
        limits=BoxLimits(memory_mb=2048, disk_mb=1024),
        kept=(_FOLDER,),
        solution=(Put("/solution/solution.patch", row.get("patch", "").encode()),),
        solve=f"cd {_FOLDER} && patch -p1 -s < /solution/solution.patch",
    )  # fmt: skip


def _listed(given: Any) -> list[str]:
    """A list, or one that is written as JSON."""
    return list(json.loads(given) if isinstance(given, str) else given)


def _patched(place: Path, base: str, patch: str) -> list[Put]:
    """The files of a patch, as they are when it is applied to the base."""
    names = sorted(set(_FILES.findall(patch)))
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            target = Path(scratch, name)
            if not target.resolve().is_relative_to(Path(scratch).resolve()):
                raise TaskRefused(f"test_patch changes {name!r}, which is not in the repository")
            shown = subprocess.run(["git", "-C", place, "show", f"{base}:{name}"], capture_output=True, check=False)
            if not shown.returncode:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(shown.stdout)
        done = subprocess.run(
            ["patch", "-p1", "-s"], cwd=scratch, input=patch.encode(), capture_output=True, check=False
        )
        if done.returncode:
            raise TaskRefused(f"test_patch does not fit {base}: {(done.stdout + done.stderr).decode()[-300:]}")
        return [Put(f"{_FOLDER}/{n}", Path(scratch, n).read_bytes()) for n in names if Path(scratch, n).exists()]


def _git(place: Path, *words: str) -> bytes:
    done = subprocess.run(["git", "-C", str(place), *words], capture_output=True, check=False)
    if done.returncode:
        raise TaskRefused(f"git {' '.join(words)} in {place}: {done.stderr.decode().strip()[-300:]}")
    return done.stdout
