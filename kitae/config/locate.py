"""Find recipes, chains and runs by name or path."""

from pathlib import Path

from kitae.errors import ConfigError
from kitae.plugins import nearest

SHIPPED = Path(__file__).parent.parent / "recipes"


def shipped_recipes() -> list[Path]:
    return sorted(SHIPPED.glob("*.toml"))


def find_recipe(name: str) -> Path:
    """A path as it is; a bare name from the shipped ones."""
    path = Path(name)
    if path.is_file():
        return path
    names = [p.stem for p in shipped_recipes()]
    if name in names:
        return SHIPPED / f"{name}.toml"
    if path.is_dir():
        raise ConfigError(
            f"{name} is a folder, neither a recipe file nor a run (which has config.json and journal.sqlite)"
        )
    hint = nearest(path.stem, names)
    if path.suffix or len(path.parts) > 1:
        raise ConfigError(f"no recipe file {name!r} in {Path.cwd()}{hint}")
    raise ConfigError(f"no recipe file {name!r}, and no shipped recipe of that name ({', '.join(names)}){hint}")


def shipped_chains() -> list[Path]:
    return sorted(SHIPPED.glob("chains/*.toml"))


def find_chain(name: str) -> Path:
    """A path as it is; a bare name from the shipped ones."""
    path = Path(name)
    if path.is_file():
        return path
    known = {p.stem: p for p in shipped_chains()}
    if name in known:
        return known[name]
    raise ConfigError(
        f"no chain file {name!r}, and no shipped one of that name ({', '.join(known)}){nearest(name, known)}"
    )


def find_run(run: Path) -> Path:
    """A folder as it is; a bare name from those in `runs`, where recipes put them."""
    named = Path("runs") / run
    return named if not run.exists() and len(run.parts) == 1 and named.exists() else run


def summary(recipe: Path) -> str:
    """The comment lines at the top of a recipe."""
    lines = []
    for line in recipe.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# ").strip())
    return " ".join(lines)
