"""Command lines and files of settings, as peers have them."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kitae.errors import ConfigError

_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)(?::-([^}]*))?\}?")
_ARRAY = re.compile(r"\w+=\(|\)|\$\{\w+\[@\]\}")  # where an array begins and ends, and where it is put in
_ASSIGNED = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=([^\s#]*|\"[^\"]*\"|'[^']*')\s*(?:#.*)?\Z")


def split_command(text: str) -> list[str]:
    """The words of a command line, or of the commands of a shell script (`run.sh`), with its plain variables filled in.

    Variables that the script does not bind are those of the environment; what is neither stays as it is.
    """
    if text.endswith(".sh") and Path(text).is_file():
        return [word for line in _commands(Path(text)) for word in (*line, "\n") if not _ARRAY.fullmatch(word)]
    try:
        return [word for word in shlex.split(text, comments=False) if word != "\n"]
    except ValueError as error:
        raise ConfigError(f"a command line must be one for a shell, got {text!r}: {error}") from None


def _commands(script: Path) -> list[list[str]]:
    known = dict(os.environ)
    found = []
    for written in script.read_text("utf-8").replace("\\\n", " ").splitlines():
        line = written.strip()
        if (
            written[:1] != " " and (bound := _ASSIGNED.fullmatch(line)) is not None
        ):  # not in a branch, as far as one sees
            known[bound[1]] = _filled(bound[2].strip("\"'"), known)
        elif line and not line.startswith("#"):
            try:
                found.append([_filled(word, known) for word in shlex.split(line, comments=True)])
            except ValueError:  # a here-document, or half of a string: no settings
                continue
    return found


def _filled(text: str, known: Mapping[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        if found[1] in known:
            return known[found[1]]
        return found[0] if found[2] is None else _filled(found[2], known)

    return _VARIABLE.sub(value, text)


def parse_flags(words: Sequence[str]) -> dict[str, Any]:
    """`--beta 0.04 --data.key=x --flag --betas 0.9 0.95` as a mapping; a flag without a value is true."""
    found: dict[str, Any] = {}
    key = None
    for word in words:
        if word.startswith("--") and len(word) > 2:
            key, equals, value = word[2:].partition("=")
            found[key] = parse_value(value) if equals else True
            key = None if equals else key
        elif key is not None and word not in ("&", "&&", "|", ";", "\n"):
            value, before = parse_value(word), found[key]
            found[key] = value if before is True else [*(before if isinstance(before, list) else [before]), value]
        else:
            key = None
    return found


def parse_value(text: str) -> Any:
    """A number, true or false, null, or text; lists and tables as YAML has them on one line."""
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):  # YAML reads no 1e-6
        try:
            return float(value) if re.fullmatch(r"[-+]?[0-9.]+[eE][-+]?[0-9]+", value) else value
        except ValueError:
            return value
    return value if isinstance(value, int | float | bool | list | dict | None) else text


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping of a YAML file, with numbers like 1e-6 as numbers."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(found, Mapping):
        raise ConfigError(f"{path} must be a mapping of settings, got {type(found).__name__}")
    return {str(key): _numbers(value) for key, value in found.items()}


def _numbers(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner) for inner in value]
    return parse_value(value) if isinstance(value, str) and value[:1].isdigit() else value


def flattened(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`; lists stay as they are, and an empty table is one."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flattened(value, f"{path}{key}.")
        else:
            found[f"{path}{key}"] = value
    return found
