"""Who may import whom: kernels know no other part of Kitae, and Triton is needed by those alone who run on it."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TRITON = {
    "kitae.kernels.cuda.decoding",
    "kitae.kernels.cuda.expert_decoding",
    "kitae.kernels.cuda.float8_products",
    "kitae.kernels.cuda.small_batch",
    "kitae.kernels.cuda.speculation",
    "kitae.kernels.cuda.paged",
    "kitae.kernels.cuda.shared_prompts",
    "kitae.kernels.cuda.spans",
    "kitae.kernels.cuda.training",
    "kitae.kernels.exact.exact_gpu",
}
FOR_GPUS = TRITON | {
    f"kitae.engines.native.{name}" for name in ("float8_weights", "gpu_decoder", "gpu_runner")
}  # imported only where Triton is


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module(path): path for path in (ROOT / "kitae").rglob("*.py")}


def imports(nodes: list[ast.stmt]) -> set[str]:
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in whole}
    return found


def all_imports(name: str) -> set[str]:
    """Those within functions included."""
    tree = ast.parse(MODULES[name].read_text())
    return imports([node for node in ast.walk(tree) if isinstance(node, ast.stmt)]) - {name}


def test_kernels_know_no_other_part() -> None:
    known = {other for name in MODULES if name.startswith("kitae.kernels") for other in all_imports(name)}
    outside = {name for name in known if name.startswith("kitae") and not name.startswith("kitae.kernels")}
    assert outside == {"kitae.paths"}


@functools.cache
def graph() -> dict[str, set[str]]:
    return {name: {other for other in all_imports(name) if other in MODULES} for name in MODULES}


@pytest.mark.parametrize("part", ["kitae.kernels", "kitae.models", "kitae.engines.native"])
def test_there_are_no_circles(part: str) -> None:
    for start in (name for name in MODULES if name.startswith(part)):
        reached, left = set[str](), set(graph()[start])
        while left:
            reached.add(name := left.pop())
            left |= graph()[name] - reached
        assert start not in reached


@pytest.mark.thorough
def test_triton_is_imported_where_it_is_needed_alone() -> None:
    trees = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
    at_the_top = {name: imports(tree.body) for name, tree in trees.items()}
    assert {name for name, found in at_the_top.items() if "triton" in found} == TRITON
    assert {name for name, found in at_the_top.items() if found & FOR_GPUS} <= FOR_GPUS
