"""A Dockerfile of the simple sort, as steps that a box without an engine can make.

FROM a base that the machine itself can stand for (a system with Python, Debian, Ubuntu), COPY and ADD of files beside
it, RUN, WORKDIR, ENV and ARG; what only says how the image would be started (CMD, EXPOSE, LABEL, …) is left out. All
else is refused by its line, and so is a RUN that fails: one that would install packages of the system, say.
"""

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from kitae.envs.shell.shell_task import Do, Put, TaskRefused

_BASES = re.compile(r"(python|debian|ubuntu|bash|buildpack-deps|t-bench/python|t-bench/ubuntu)", re.ASCII)
_IDLE = ("CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK", "VOLUME", "SHELL", "USER")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})")
_MOST = 64 * 2**20  # bytes of all files
_NOTHING = re.compile(  # installing what the machine has already, or what only makes an image smaller
    r"(apt-get|apt)\s+(-\S+\s+)*(update|clean|autoremove)\b[^;&|]*|rm\s+-rf\s+/var/lib/apt/lists/\*"
)


@dataclass(slots=True)
class Built:
    """What a Dockerfile makes: its steps, the folder and the variables that commands begin with."""

    steps: list[Put | Do] = field(default_factory=list)
    folder: str = "/"
    variables: dict[str, str] = field(default_factory=dict)
    size: int = 0


def read_dockerfile(path: Path) -> Built:
    """Raises `TaskRefused` where a line needs an engine."""
    built = Built()
    for number, line in _lines(path.read_text("utf-8")):
        where = f"{path.parent.name}/{path.name}:{number}"
        word, _, rest = line.partition(" ")
        _one(built, word.upper(), rest.strip(), where, path.parent)
    return built


def _lines(text: str) -> list[tuple[int, str]]:
    """Instructions with the number of their first line; comments and continued lines are resolved."""
    found, begun, number = list[tuple[int, str]](), "", 0
    for n, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or not (line.strip() or begun):
            continue
        number = number if begun else n
        begun += line.rstrip().removesuffix("\\") + ("\n" if line.rstrip().endswith("\\") else "")
        if not line.rstrip().endswith("\\"):
            found.append((number, begun.strip()))
            begun = ""
    return found + ([(number, begun.strip())] if begun.strip() else [])


def _one(built: Built, word: str, rest: str, where: str, context: Path) -> None:
    if word == "FROM":
        if built.steps or not _BASES.search(rest.split()[0]) or " AS " in rest.upper():
            raise TaskRefused(
                f"{where}: only an image of Python, Debian or Ubuntu can be had without an engine, got {rest!r}"
            )
    elif word == "RUN":
        command = shlex.join(json.loads(rest)) if rest.startswith("[") else rest
        if "<<" in command.split("\n")[0] and "EOF" in command:
            raise TaskRefused(f"{where}: RUN with a text of its own needs an engine")
        command = _NOTHING.sub("true", command)
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in built.variables.items())
        built.steps.append(Do(f"set -e\n{exports}{command}", built.folder, where))
    elif word in ("COPY", "ADD"):
        _copy(built, _filled(built, rest), where, context)
    elif word == "WORKDIR":
        built.folder = str(PurePosixPath(built.folder) / _filled(built, rest).strip("\"'"))
        built.steps.append(Do(f"mkdir -p {shlex.quote(built.folder)}", "/", where))
    elif word in ("ENV", "ARG"):
        _set(built, rest, word)
    elif word not in _IDLE:
        raise TaskRefused(f"{where}: {word} needs an engine")


def _set(built: Built, rest: str, word: str) -> None:
    pairs = shlex.split(_filled(built, rest))
    if word == "ENV" and pairs and "=" not in pairs[0]:
        pairs = [f"{pairs[0]}={' '.join(pairs[1:])}"]
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if sign:
            built.variables[name] = value


def _filled(built: Built, text: str) -> str:
    return _VARIABLE.sub(lambda m: built.variables.get(m[1] or m[2], m[3] or ""), text)


def _copy(built: Built, rest: str, where: str, context: Path) -> None:
    words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    if any(word.startswith("--from") for word in words):
        raise TaskRefused(f"{where}: COPY from another stage needs an engine")
    *sources, target = [word for word in words if not word.startswith("--")]
    to = PurePosixPath(built.folder) / target
    for source in sources:
        if "://" in source:
            raise TaskRefused(f"{where}: ADD of an address needs an engine, got {source!r}")
        found = sorted(context.glob(source.lstrip("/"))) if any(c in source for c in "*?[") else [context / source]
        for place in found:
            if not place.resolve().is_relative_to(context.resolve()) or not place.exists():
                raise TaskRefused(f"{where}: there is no {source!r} beside the Dockerfile")
            into = to / place.name if place.is_file() and (target.endswith(("/", ".")) or len(sources) > 1) else to
            built.steps += put_tree(place, str(into), where, built)


def put_tree(place: Path, into: str, where: str, built: Built | None = None) -> list[Put]:
    """A file, or all files of a folder, as they come to lie below `into`."""
    built = built or Built()
    files = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
    puts = []
    for path in files:
        if not path.resolve().is_relative_to(place.resolve()):
            raise TaskRefused(f"{where}: {path} leads out of its folder")
        built.size += path.stat().st_size
        if built.size > _MOST:
            raise TaskRefused(f"{where}: files of a task must have at most {_MOST >> 20} MiB together")
        inside = into if path == place else str(PurePosixPath(into) / path.relative_to(place))
        puts.append(Put(inside, path.read_bytes(), path.stat().st_mode & 0o777))
    return puts
