"""The walls of the house: who may know whom, and that a name means one thing."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import kitae

ROOT = Path(kitae.__file__).parent
MOST_IMPORTS = 22  # of one module

FLOORS = (
    ("cli", "ui", "study", "tinker"),
    ("chains", "importers", "scripting"),
    ("run",),
    ("offline", "rl", "evaluation", "primitives"),
    ("envs", "serving", "trainer", "verifiers"),
    ("engines", "algorithms", "sandbox", "clients"),
    ("sandbox", "clients"),
    ("weights", "models"),
    ("observe", "store"),
    ("data", "kernels", "workers"),
)
"""A room may import those on floors below its own; settings (`*/config.py`, `config/`) stand beside the house."""

BESIDE = {
    ("cli", "ui"),
    ("cli", "study"),
    ("cli", "tinker"),
    ("rl", "evaluation"),
    ("offline", "evaluation"),
    ("envs", "serving"),
    ("serving", "verifiers"),
    ("sandbox", "clients"),
    ("weights", "models"),
    ("observe", "store"),
}
"""Who may import whom on one floor."""

CONCRETE = {
    "kitae.engines.native.engine",
    "kitae.engines.process.process_engine",
    "kitae.trainer.local_trainer",
    "kitae.trainer.training_worker",
    "kitae.weights.shared_memory",
}
"""What the loops know by its protocol alone."""

PUTS_TOGETHER = {
    "kitae.run.assembly",
    "kitae.offline.methods",
    "kitae.offline.loaded_model",
}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def modules() -> dict[str, Path]:
    found = {}
    for path in ROOT.rglob("*.py"):
        name = ".".join(("kitae", *path.relative_to(ROOT).with_suffix("").parts))
        found[name.removesuffix(".__init__")] = path
    return found


@cache
def imports() -> dict[str, set[str]]:
    """Of each module, those it imports, also inside functions and for types alone."""
    known = modules()

    def of(path: Path) -> set[str]:
        found = set()
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                full = [f"{node.module}.{alias.name}" for alias in node.names]
                found |= {name if name in known else node.module for name in full}
        return found & known.keys()

    return {name: of(path) - {name} for name, path in known.items()}


def room(module: str) -> str:
    return module.split(".")[1] if module.count(".") else ""


def test_nobody_imports_in_a_circle() -> None:
    left = dict(imports())
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"these import each other, or something that does: {sorted(left)}"


def test_a_room_imports_from_below() -> None:
    level = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    assert level.keys() | {"config"} == {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    broken = [
        f"{name} imports {other}"
        for name, others in imports().items()
        for other in others
        if not name.endswith(".config")
        and not other.endswith(".config")
        and (a := room(name)) in level
        and (b := room(other)) in level
        and a != b
        and level[b] <= level[a]
        and (a, b) not in BESIDE
    ]
    assert not broken, "\n".join(broken)


def test_the_loops_know_engines_trainers_and_transports_by_their_protocols() -> None:
    found = [
        f"{name} imports {other}"
        for name, others in imports().items()
        for other in others & CONCRETE
        if room(name) in ("rl", "offline", "run") and name not in PUTS_TOGETHER
    ]
    assert not found, "\n".join(found)


def test_the_python_api_is_for_those_above_it() -> None:
    found = [name for name, others in imports().items() if "kitae.api" in others and room(name) not in ("", "cli")]
    assert not found, f"these stand below the API and import it: {found}"


def test_one_folder_alone_knows_ray() -> None:
    def imported(path: Path) -> set[str]:
        found = set()
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
        return found

    found = {name for name, path in modules().items() if "ray" in imported(path)}
    assert found and all(name.startswith("kitae.workers.ray.") for name in found), f"these import ray: {found}"


def test_no_module_must_know_everybody() -> None:
    name, others = max(imports().items(), key=lambda item: len(item[1]))
    assert len(others) <= MOST_IMPORTS, f"{name} imports {len(others)} modules"


def test_a_class_name_means_one_thing() -> None:
    homes = defaultdict(list)
    for name, path in modules().items():
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(name)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}
