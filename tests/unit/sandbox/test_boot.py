"""What is sent into a sandbox is complete, in order, and needs nothing else of ours."""

import ast
from importlib import resources

from kitae.sandbox.boot import PACKAGES, inside_sources
from kitae.sandbox.inside import LATER, MODULES


def test_every_module_inside_is_sent() -> None:
    files = {path.name.removesuffix(".py") for path in resources.files(PACKAGES[-1]).iterdir() if path.is_file()}
    later = [name for names in LATER.values() for name in names]
    modules = [*MODULES[:-1], *later, MODULES[-1]]
    assert files - {"__init__"} == set(modules)
    assert [name for name, _ in inside_sources()] == [f"{PACKAGES[-1]}.{module}" for module in modules]


def test_each_module_imports_of_ours_only_what_was_sent_before() -> None:
    sent: set[str] = set()
    for name, source in inside_sources():
        tree = ast.parse(source)
        checked = [node for part in tree.body if not isinstance(part, ast.If) for node in ast.walk(part)]
        imports = {node.module for node in checked if isinstance(node, ast.ImportFrom) and node.module}
        assert {module for module in imports if module.startswith("kitae")} <= sent, name
        sent.add(name)
