"""Breaks the package in random places, one at a time, and asks which tests notice.

    python tests/mutations.py [--count 100] [--seed 1] [--output mutations.jsonl]

A mutation changes one operator, constant, `and`/`or` or returned value, or removes one statement, in a copy of what is
committed. Then these tests are run until one fails: the test files that import the changed module, then the whole
folder of its room; of each first what `make test` runs, then what it leaves out. A test that fails, or runs for
minutes, counts if it passes on the unchanged copy. Of a room whose tests take longer than `PROCESSOR_SECONDS`, only
those count that come before.

Left out: kernels for GPUs, text in f-strings, types, assertions and the text of errors; whole runs outside the folder
of the room. The result of a mutation is one line of JSON; at the end a table is printed.
"""

import argparse
import ast
import copy
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = ("kitae/kernels/cuda/", "kitae/kernels/exact/exact_gpu.py")
PROCESSOR_SECONDS, WALL_SECONDS = 60, 3600  # of one run of tests
TEST_SECONDS = 150
PRELOADED = ("hypothesis", "transformers.modeling_utils", "pydantic", "peft")
PRELOADED_TOO = "ignore::pytest.PytestAssertRewriteWarning"  # what pytest would like to import itself
COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMPUTED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """Mutation("kitae/clock.py", 41, "compare", "timeout != 0", "(timeout == 0)", start=1500, end=1512)"""

    file: str
    line: int
    kind: str
    before: str
    after: str
    start: int
    end: int

    def applied(self, source: str) -> str:
        """start and end: offsets in bytes."""
        text = source.encode()
        return (text[: self.start] + self.after.encode() + text[self.end :]).decode()


def mutations_of(file: str, source: str) -> Iterator[Mutation]:
    """All that this script knows how to do to a file."""
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    for kind, node, after in _changes(ast.parse(source), inside=False):
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        text = source.encode()[start:end].decode()
        yield Mutation(file, node.lineno, kind, text, after, start, end)  # type: ignore[attr-defined]


def _changes(node: ast.AST, inside: bool) -> Iterator[tuple[str, ast.AST, str]]:
    """(kind, node, what stands in its place), of the nodes inside functions."""
    if isinstance(node, ast.JoinedStr | ast.Assert | ast.Raise):
        return
    if inside:
        yield from _changes_of(node)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                within = inside or (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and name == "body")
                yield from _changes(child, within)


def _changes_of(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
        changed = copy.deepcopy(node)
        changed.ops[0] = COMPARED[type(node.ops[0])]()
        yield "compare", node, f"({ast.unparse(changed)})"
    elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED and not _is_text(node):
        changed_op = copy.deepcopy(node)
        changed_op.op = COMPUTED[type(node.op)]()
        yield "arithmetic", node, f"({ast.unparse(changed_op)})"
    elif isinstance(node, ast.BoolOp):
        other = ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        yield "and/or", node, f"({ast.unparse(other)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", node, str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield "constant", node, f"({node.value + 1})"
    elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield "return", node, "return None"
    elif isinstance(node, ast.Assign | ast.AugAssign) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)
    ):
        yield "statement", node, "pass"


def _is_text(node: ast.BinOp) -> bool:
    def text(side: ast.AST) -> bool:
        return isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str))

    return text(node.left) or text(node.right)


def drawn(folder: Path, count: int, seed: int) -> list[Mutation]:
    """Modules by their length, and in each module any place."""
    files = sorted(str(path.relative_to(folder)) for path in (folder / "kitae").rglob("*.py"))
    sources = {file: (folder / file).read_text() for file in files if not file.startswith(SKIPPED)}
    places = {file: list(mutations_of(file, source)) for file, source in sources.items()}
    files = [file for file in sources if places[file]]
    weights = [sources[file].count("\n") for file in files]
    random_numbers = random.Random(seed)
    return [random_numbers.choice(places[file]) for file in random_numbers.choices(files, weights, k=count)]


class Failures:
    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.names.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.names.append(report.nodeid)


def tests_for(folder: Path, file: str) -> list[list[str]]:
    """Files that import the module, and the folder of its room."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    parent, _, name = module.rpartition(".")
    said = (f"from {module} import", f"import {module}\n", f"from {parent} import {name}")
    files = sorted((folder / "tests/unit").rglob("test_*.py"))
    near = [str(path.relative_to(folder)) for path in files if any(text in path.read_text() for text in said)]
    parts = module.split(".")
    room = f"tests/unit/{parts[1]}" if len(parts) > 2 else f"tests/unit/test_{parts[1]}.py"
    stages = [near, [room]] if (folder / room).exists() else [near]
    return [stage for stage in stages if stage]


def run_tests(folder: Path, tests: list[str], part: str, seconds: int = PROCESSOR_SECONDS) -> str:
    """The first test that fails; "" if none does in time. In a process with the imports done."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(write, _first_failure(folder, tests, part, seconds).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(write)
    status, end = None, time.monotonic() + WALL_SECONDS
    while status is None and time.monotonic() < end:
        done, code = os.waitpid(child, os.WNOHANG)
        status = code if done else None
        time.sleep(0.1)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    with os.fdopen(read, "rb") as pipe:
        found = pipe.read().decode()
    if status is not None and os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise RuntimeError(f"tests could not be run: {tests}")
    return found


def _first_failure(folder: Path, tests: list[str], part: str, seconds: int) -> str:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    sys.path.insert(0, str(folder))
    failures = Failures()
    pytest.main(
        [
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-W",
            PRELOADED_TOO,
            f"--timeout={TEST_SECONDS}",
            "--part",
            part,
            *tests,
        ],
        plugins=[failures],
    )
    return failures.names[0] if failures.names else ""


def noticed(folder: Path, mutation: Mutation, part: str) -> str:
    path = folder / mutation.file
    source = path.read_text()
    for tests in tests_for(folder, mutation.file):
        path.write_text(mutation.applied(source))
        try:
            found = run_tests(folder, tests, part)
        finally:
            path.write_text(source)
        if found and run_tests(folder, [found.split("::")[0]], part) != found:  # with those before it, as then
            return found
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="go on with this one")
    parser.add_argument("--output", type=Path, default=Path("mutations.jsonl"))
    options = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    for name in PRELOADED:
        __import__(name)
    import torch

    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="mutations-"))
    try:
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
        table: Counter[tuple[str, str]] = Counter()
        with options.output.open("a") as output:
            for number, mutation in enumerate(drawn(folder, options.count, options.seed)):
                if number < options.first:
                    continue
                quick = noticed(folder, mutation, "quick")
                rest = "" if quick else noticed(folder, mutation, "rest")
                who = "make test" if quick else "make test-all" if rest else "nobody"
                table[mutation.kind, who] += 1
                print(
                    json.dumps({"number": number, **asdict(mutation), "by": who, "test": quick or rest}),
                    file=output,
                    flush=True,
                )
                print(number, mutation.file, mutation.line, mutation.kind, who, quick or rest, flush=True)
    finally:
        shutil.rmtree(folder)
    for (kind, who), times in sorted(table.items()):
        print(f"{kind:12s} {who:14s} {times}")


if __name__ == "__main__":
    main()
