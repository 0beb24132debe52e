"""docs/kernels.md: a row for every kernel, and nothing in it that does not exist."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "kernels.md"
HEADER = ["kernel", "function", "caller", "twin", "test", "benchmark", "why"]
BELOW = {"function": "kitae", "caller": "kitae", "twin": "kitae", "test": "tests", "benchmark": "benchmarks"}
SOURCES = [
    "kitae/kernels/cpu/cpu.cpp",
    "kitae/kernels/cpu/amx.h",
    "kitae/kernels/cpu/decoder.h",
    "kitae/kernels/cpu/spans.h",
    "kitae/kernels/cuda/decoding.py",
    "kitae/kernels/cuda/float8_products.py",
    "kitae/kernels/cuda/expert_decoding.py",
    "kitae/kernels/cuda/small_batch.py",
    "kitae/kernels/cuda/speculation.py",
    "kitae/kernels/cuda/paged.py",
    "kitae/kernels/cuda/shared_prompts.py",
    "kitae/kernels/cuda/spans.py",
    "kitae/kernels/cuda/training.py",
    "kitae/kernels/exact/exact_gpu.py",
]


class Row(NamedTuple):
    source: str
    cells: dict[str, str]

    @property
    def kernel(self) -> str:
        return self.cells["kernel"].strip("`")

    def named(self, column: str) -> list[str]:
        """`["trainer/optim.py::Optimizer._update"]`: what a cell names, of the things that must exist."""
        return [name for name in re.findall(r"`([^`]+)`", self.cells[column]) if ".py" in name]


def rows() -> Iterator[Row]:
    source = ""
    for line in PAGE.read_text().splitlines():
        if found := re.match(r"## .*: `(.*)`$", line):
            source = found[1]
        elif source and line.startswith("| `"):
            yield Row(source, dict(zip(HEADER, (c.strip() for c in line.strip("|").split("|")), strict=True)))


def exported(path: Path) -> set[str]:
    """Functions that ctypes can find, or Triton kernels. Those that are made for each dtype are one."""
    text = path.read_text()
    if path.suffix == ".py":
        return {node.name for node in jitted(path)}
    if path.suffix == ".cu":
        return set(re.findall(r"__global__ void (?:__launch_bounds__\(.*?\) )?(\w+)\(", text))
    made = re.findall(r"^    void (\w+)_##SUFFIX\(", text, re.M)
    return {*made, *(name for block in extern_blocks(text) for name in re.findall(r"^\w+ (\w+)\(", block, re.M))}


def extern_blocks(text: str) -> Iterator[str]:
    for found in re.finditer(r'^extern "C" \{$', text, re.M):
        depth, end = 1, found.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        yield text[found.end() : end]


def jitted(path: Path) -> list[ast.FunctionDef]:
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return [f for f in functions if any("triton.jit" in ast.unparse(d) for d in f.decorator_list)]


@cache
def parsed(path: Path) -> tuple[str, ast.AST]:
    text = path.read_text()
    return text, ast.parse(text)


def source_of(name: str, below: str) -> str:
    """The text of a file, or of a function, class or method in it: `trainer/optim.py::Optimizer._update`."""
    file, _, inside = name.partition("::")
    text, node = parsed(ROOT / below / file)
    for part in filter(None, inside.split(".")):
        children = (c for c in ast.iter_child_nodes(node) if isinstance(c, ast.FunctionDef | ast.ClassDef))
        found = [c for c in children if c.name == part]
        assert found, f"{file} has no {inside}"
        node = found[0]
    return text if not inside else ast.unparse(node)


ROWS = list(rows())


@pytest.mark.parametrize("source", SOURCES)
def test_every_kernel_has_one_row(source: str) -> None:
    kernels = exported(ROOT / source)
    assert kernels
    assert sorted(row.kernel for row in ROWS if row.source == source) == sorted(kernels)


def test_all_sources_of_kernels_are_on_the_page() -> None:
    """Also those that somebody adds."""
    folder = ROOT / "kitae" / "kernels"
    compiled = [p for p in folder.rglob("*") if p.suffix in (".cpp", ".h", ".cu") and exported(p)]
    triton = [p for p in folder.rglob("*.py") if jitted(p)]
    assert sorted(str(p.relative_to(ROOT)) for p in (*compiled, *triton)) == sorted(SOURCES)
    assert {row.source for row in ROWS} == set(SOURCES)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{Path(row.source).name}-{row.kernel}")
def test_what_a_row_names_exists(row: Row) -> None:
    for column, below in BELOW.items():
        for name in row.named(column):
            source_of(name, below)
    functions = [source_of(name, BELOW["function"]) for name in row.named("function")]
    assert functions and all(re.search(rf"(?<![A-Za-z]){row.kernel}(?![A-Za-z])", function) for function in functions)
    assert row.named("caller") and row.named("test")


@pytest.mark.parametrize("source", [s for s in SOURCES if s.endswith(".py")])
def test_every_triton_kernel_says_what_it_is_for(source: str) -> None:
    for kernel in jitted(ROOT / source):
        assert len((ast.get_docstring(kernel) or "").splitlines()) > 1, kernel.name
