"""Recipes into settings: TOML file + `section.key=value` overrides → one frozen, fully resolved root.

Everything that can be refused is refused here, before a model loads: unknown keys get a hint (`hints`), contradictions
name both sides (`rules`). The resolved settings are saved with the run.
"""

import json
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import ValidationError

from kitae.config.hints import hint
from kitae.config.root import ROOTS, RLConfig, Root
from kitae.errors import ConfigError
from kitae.plugins import nearest

R = TypeVar("R", bound=Root)

_NONE: Mapping[str, Any] = MappingProxyType({})
_FILES = ("path", "mix")  # sources beside which a file of held-out rows may stay


def load_config(recipe: Path, overrides: Iterable[str] = ()) -> Root:
    """Read a recipe file and apply `section.key=value` overrides."""
    return make_config(read_recipe(recipe), overrides)


def make_config(values: dict[str, Any], overrides: Iterable[str] = (), settings: Mapping[str, Any] = _NONE) -> Root:
    """From the nested values of a recipe, with others in place of some of them: `section.key=value`, as text or as
    `{"training": {"lr": 1e-5}}`."""
    return parse_config(with_settings(values, overrides, settings))


def model_settings(path: str, overrides: Iterable[str] = (), settings: Mapping[str, Any] = _NONE) -> RLConfig:
    """Those of a model that only answers, and of its engine; what it would be trained on does not matter."""
    config = make_config({"data": {"task": "reverse"}, "model": {"path": path}}, overrides, settings)
    assert isinstance(config, RLConfig)
    return config


def with_settings(
    values: dict[str, Any], overrides: Iterable[str] = (), settings: Mapping[str, Any] = _NONE
) -> dict[str, Any]:
    """The values with others in place of some; a new source of data or preset drops what belonged to the old one."""
    values = deepcopy(values)
    _apply(values, [*_given(settings), *map(_split_override, overrides)])
    return values


def read_recipe(recipe: Path) -> dict[str, Any]:
    """The nested values of a recipe file; the run is named like it."""
    try:
        values = tomllib.loads(recipe.read_text("utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigError(f"no recipe file {recipe}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{recipe} is not valid TOML: {error}") from None
    if isinstance(run := values.setdefault("run", {}), dict):
        run.setdefault("name", recipe.stem)
    return values


def override_config(config: R, overrides: Iterable[str]) -> R:
    """A copy of a resolved config with some settings changed, but not its kind."""
    values = config.given()
    _apply(values, list(map(_split_override, overrides)))
    if _root(values) is not type(config):
        got = values["method"]["kind"]
        raise ConfigError(f"method.kind cannot be changed: it is {config.method.kind!r}, got {got!r}")
    changed = parse_config(values)
    assert isinstance(changed, type(config))
    return changed


def parse_config(values: Any) -> Root:
    """Validate a nested mapping; every complaint becomes one `ConfigError` that lists all of them."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"settings are sections with keys, got {values!r}")
    _check_names(values)
    root = _root(values)
    settings = _settings(root)
    problems = list(_unknown_keys(values, settings))
    try:
        config = root.model_validate({"data": {}, **root.completed(_known(values, settings))})
    except ValidationError as error:
        problems += [_describe(e) for e in error.errors()]
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def _check_names(values: Mapping[Any, Any]) -> None:
    """Python has dicts with other keys than text; TOML has not."""
    for section, keys in values.items():
        if not isinstance(section, str):
            raise ConfigError(f"the name of a section must be text, got {section!r}")
        for key in keys if isinstance(keys, Mapping) else ():
            if not isinstance(key, str):
                raise ConfigError(f"the name of a key in section {section!r} must be text, got {key!r}")


def _root(values: Mapping[str, Any]) -> type[Root]:
    method = values.get("method", {})
    kind = method.get("kind", "rl") if isinstance(method, Mapping) else "rl"
    if not isinstance(kind, str) or kind not in ROOTS:
        raise ConfigError(f"method.kind must be one of {', '.join(ROOTS)}, got {kind!r}{nearest(str(kind), ROOTS)}")
    return ROOTS[kind]


def _known(values: Mapping[str, Any], settings: Mapping[str, list[str]]) -> dict[str, Any]:
    """Without what does not exist: the rest may be wrong too."""
    return {
        section: {key: value for key, value in keys.items() if key in settings[section]}
        for section, keys in values.items()
        if section in settings and isinstance(keys, Mapping)
    }


@dataclass(frozen=True, slots=True)
class _Change:
    """`_Change(["training", "lr"], _Text("1e-5"))`, or with a value that is one already."""

    keys: list[str]
    value: Any


@dataclass(frozen=True, slots=True)
class _Text:
    """A value as it was typed."""

    text: str


def _apply(values: dict[str, Any], changes: Sequence[_Change]) -> None:
    for change in changes:  # another kind of run has other settings
        if change.keys == ["method", "kind"]:
            _apply_change(values, change, ROOTS["rl"])
    root = _root(values)
    sources = root.sources()
    named = [name for name in sources if any(change.keys == ["data", name] for change in changes)]
    if len(named) > 1:
        raise ConfigError(f"data needs exactly one of {', '.join(sources)}, got {' and '.join(named)}")
    for change in sorted(changes, key=lambda change: _keeps_source(change.keys, sources)):
        _apply_change(values, change, root)


def _given(settings: Mapping[str, Any]) -> Iterable[_Change]:
    for section, keys in settings.items():
        if not isinstance(keys, Mapping):
            raise ConfigError(f"{section!r} is a section, and takes its keys and values, got {keys!r}")
        for key, value in keys.items():
            yield _Change([section, key], value)


def _split_override(override: str) -> _Change:
    if not isinstance(override, str):
        raise ConfigError(f"an override has the form section.key=value, as text, got {override!r}")
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or len(keys) < 2 or not all(keys):
        known = hint(keys[0], _settings(ROOTS["rl"])) if equals and len(keys) == 1 and keys[0] else ""
        raise ConfigError(f"an override has the form section.key=value, got {override!r}{known}")
    return _Change(keys, _Text(text.strip()))


def _keeps_source(keys: list[str], sources: Collection[str]) -> bool:
    """False sorts first: a new source or preset drops the old one's settings, and must not drop those given with it."""
    return keys != ["algorithm", "preset"] and not (keys[0] == "data" and keys[1] in sources)


def _apply_change(values: dict[str, Any], change: _Change, root: type[Root]) -> None:
    node, keys, value = values, change.keys, change.value
    if keys[:2] == ["data", "mix"] and len(keys) > 2:
        raise ConfigError(
            f"data.mix is a list of files, given as a whole: 'data.mix=[{{path = \"a.jsonl\", weight = 2}}, …]', got "
            f"{'.'.join(keys)!r}"
        )
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{'.'.join(keys)!r} goes below {key!r}, which is a value, not a section")
    if keys == ["algorithm", "preset"]:  # another method replaces the recipe's choices
        node.clear()
    if isinstance(value, _Text):
        value = _parse_value(value.text, wants_text=_is_text(root, *keys[:2]))
    node[keys[-1]] = value
    if keys[0] == "data" and keys[1] in (sources := root.sources()):  # a new source replaces the recipe's
        gone = {*sources, "params", *(["eval_path"] if keys[1] not in _FILES else [])} - {keys[1]}
        for other in gone:
            node.pop(other, None)


def _parse_value(text: str, wants_text: bool) -> Any:
    """TOML syntax where it parses (`3`, `1e-5`, `["a"]`), else the bare text; `run.name=2026-01-31` is a name too."""
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text
    return text if wants_text and not isinstance(value, str) else value


def _is_text(root: type[Root], section: str, key: str) -> bool:
    sections = root.sections()
    fields = sections[section].model_fields if section in sections else {}
    return key in fields and fields[key].annotation in (str, str | None)


def _settings(root: type[Root]) -> dict[str, list[str]]:
    """The keys of each section."""
    return {name: list(section.model_fields) for name, section in root.sections().items()}


def _unknown_keys(values: Mapping[str, Any], settings: Mapping[str, list[str]]) -> Iterable[str]:
    for section, keys in values.items():
        if section not in settings:
            yield from _unknown_section(section, keys, settings)
        elif not isinstance(keys, Mapping):
            yield f"{section!r} is a section, got the value {keys!r}"
        else:
            for key in keys:
                if key not in settings[section]:
                    valid = ", ".join(f"{section}.{k}" for k in settings[section])
                    known = _of_other_kinds(section, key) or hint(f"{section}.{key}", settings)
                    yield f"unknown key {section}.{key}{known or f'; valid are {valid}'}"


def _unknown_section(section: str, values: Any, settings: Mapping[str, list[str]]) -> Iterable[str]:
    """A key outside of any section, another framework's section, or a misspelt one."""
    if other := _of_other_kinds(section):
        yield f"unknown section {section!r}{other}"
        return
    valid = f"; valid are {', '.join(settings)}"
    foreign = [f"unknown key {path}{found}" for path in _leaves(section, values) if (found := hint(path, settings))]
    if not isinstance(values, Mapping):
        yield f"unknown section {section!r}{hint(section, settings) or valid}"
    elif near := nearest(section, settings):
        yield f"unknown section {section!r}{near}"
    else:
        yield from foreign or [f"unknown section {section!r}{valid}"]


def _of_other_kinds(section: str, key: str | None = None) -> str:
    """`"; it belongs to method.kind = rl"`, if it is a setting there."""
    found = [
        kind
        for kind, root in ROOTS.items()
        if section in (sections := root.sections()) and (key is None or key in sections[section].model_fields)
    ]
    return f"; it belongs to method.kind = {' or '.join(found)}" if found else ""


def _leaves(path: str, values: Any) -> Iterable[str]:
    if not isinstance(values, Mapping):
        yield path
    else:
        for key, value in values.items():
            yield from _leaves(f"{path}.{key}", value)


def _describe(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return str(message)
    got = json.dumps(error["input"], default=str)
    return f"{where}: {message[0].lower()}{message[1:]}, got {got}"
