"""`kitae import`."""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from kitae.config.recipe import make_config
from kitae.errors import ConfigError
from kitae.importers.translation import OUTCOMES, Translation
from kitae.plugins import nearest

PEERS = {"trl": "trl", "verl": "verl", "openrlhf": "openrlhf", "prime-rl": "prime_rl"}
Reader = Callable[[str, Sequence[str], Path], Translation]

_TITLES = {
    "mapped": "mapped",
    "default": "not given, and set here because Kitae's default is another",
    "near": "mapped, with a difference",
    "nothing": "changes nothing that is learned here",
    "refused": "refused",
    "unknown": "unknown",
}


def import_recipe(
    peer: Annotated[str, typer.Argument(help="trl, verl, openrlhf or prime-rl.", metavar="PEER")],
    source: Annotated[str, typer.Argument(help="A script, a config, or a command line in quotes.", metavar="SOURCE")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Of verl: key=value …", metavar="[KEY=VALUE]…")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The recipe to write.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> None:
    """Turn another trainer's settings into a recipe.

    It says what became of each of them.

    Nothing of the peer is imported or run. What the peer does by default and Kitae does otherwise is set in the recipe.
    """
    if peer not in PEERS:
        raise ConfigError(f"kitae import knows {', '.join(PEERS)}, got {peer!r}{nearest(peer, PEERS)}")
    target = output or Path(f"{_stem(source, peer)}.toml")
    read: Reader = import_module(f"kitae.importers.{PEERS[peer]}").read
    found = read(source, overrides or [], target)
    _write(found, target, force)
    _report(found)
    files = "".join(f" and {name}" for name in found.files)
    print(f"\nwritten: {target}{files}\ntrain with: kitae train {target}")
    try:
        make_config(found.recipe)
    except ConfigError as problem:
        raise ConfigError(f"the recipe is written, but not complete:\n{problem}") from None


def _stem(source: str, peer: str) -> str:
    first = next((word for word in source.split() if word.endswith((".py", ".yaml", ".yml", ".toml", ".sh"))), "")
    return Path(first).stem if first and Path(first).suffix != ".toml" else f"{Path(first).stem or peer}-kitae"


def _write(found: Translation, target: Path, force: bool) -> None:
    files = {target: found.toml(), **{Path(name): text for name, text in found.files.items()}}
    for path in files:
        if path.exists() and not force:
            raise ConfigError(f"{path} is there already: give another name with -o, or --force")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


def _report(found: Translation) -> None:
    lines = found.lines()
    for outcome in OUTCOMES:
        own = [line for line in lines if line.outcome == outcome]
        if own:
            print(f"\n{_TITLES[outcome]}:" if outcome != lines[0].outcome else f"{_TITLES[outcome]}:")
        width = min(44, max((len(line.key) for line in own), default=0))
        for line in own:
            value = f"{line.value if len(line.value) <= 48 else f'{line.value[:47]}…'}"
            print(f"  {line.key:{width}}  {value}  →  {line.here}")
    for note in found.notes:
        print(f"\nnote: {note}")
