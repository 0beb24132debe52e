"""Prints the test files and folders of what was changed against `main`: of changed rooms and of rooms that import them.

    python tests/changed.py [REVISION]

A room is a folder of `kitae/`; its tests are in `tests/unit/` under the same name. A room counts as an importer where
one of its modules imports a changed module itself. Changed test files are printed themselves, for a changed helper of
tests those that import it, perhaps by others; but for those in `tests/` itself, which all tests use, and for those that
need a GPU. Nothing is printed if nothing was changed.
"""

import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
IMPORTED = re.compile(r"^\s*(?:from|import) (\w+)", re.MULTILINE)
sys.path.insert(0, str(TESTS / "unit"))

from test_structure import imports, room  # noqa: E402


def changed_files(revision: str) -> list[Path]:
    """Against the point where this branch left the revision, with what is not committed yet."""

    def git(*command: str) -> list[str]:
        done = subprocess.run(["git", *command], cwd=TESTS.parent, capture_output=True, check=True, text=True)
        return done.stdout.splitlines()

    (start,) = git("merge-base", revision, "HEAD")
    named = [*git("diff", "--name-only", start), *git("ls-files", "--others", "--exclude-standard")]
    return [Path(name) for name in named if (TESTS.parent / name).exists()]


def chosen_for(files: list[Path]) -> list[Path]:
    modules, found = set(), set()
    for file in files:
        if file.parts[0] == "kitae":  # data files too: of the package that they lie in
            modules.add(".".join(file.with_suffix("").parts).removesuffix(".__init__"))
        elif file.parts[0] == "tests" and file.suffix == ".py" and file.parent != Path("tests"):
            found |= {file} if file.name.startswith("test_") else users_of(file)
    rooms = {room(module) for module in modules}
    rooms |= {room(name) for name, others in imports().items() if others & modules}
    found |= {Path("tests/unit") / name for name in rooms if name}
    found |= {Path("tests/unit") / f"test_{module.removeprefix('kitae.')}.py" for module in modules if not room(module)}
    if modules:
        found.add(Path("tests/unit/test_structure.py"))
    there = [path for path in found if (TESTS.parent / path).exists() and "gpu" not in path.parts]
    return sorted(path for path in there if not found & set(path.parents))


def users_of(helper: Path) -> set[Path]:
    """The test files that import a helper, or another one that does; of a conftest, its folder."""
    if helper.name == "conftest.py":
        return {helper.parent}
    imported = {path: set(IMPORTED.findall(path.read_text())) for path in TESTS.rglob("*.py")}
    found: set[Path] = set()
    names = {helper.stem}
    while more := {path for path, known in imported.items() if known & names} - found:
        found |= more
        names = {path.stem for path in more}
    return {path.relative_to(TESTS.parent) for path in found if path.name.startswith("test_")}


if __name__ == "__main__":
    print(*chosen_for(changed_files(*sys.argv[1:] or ["main"])), sep="\n")
