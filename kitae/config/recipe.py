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
from kitae.section import Section, Table

R = TypeVar("R", bound=Root)

_NONE: Mapping[str, Any] = MappingProxyType({})
_LISTED = 8  # names in a message
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
    problems = list(_unknown_sections(values, root))
    try:
        config = root.model_validate({"data": {}, **root.completed(_known(values, root))})
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
        _check_keys(section, keys)


def _check_keys(path: str, values: Any) -> None:
    for key, value in values.items() if isinstance(values, Mapping) else ():
        if not isinstance(key, str):
            raise ConfigError(f"the name of a key in section {path!r} must be text, got {key!r}")
        _check_keys(f"{path}.{key}", value)


def _root(values: Mapping[str, Any]) -> type[Root]:
    method = values.get("method", {})
    kind = method.get("kind", "rl") if isinstance(method, Mapping) else "rl"
    if not isinstance(kind, str) or kind not in ROOTS:
        raise ConfigError(f"method.kind must be one of {', '.join(ROOTS)}, got {kind!r}{nearest(str(kind), ROOTS)}")
    return ROOTS[kind]


def _known(values: Mapping[str, Any], root: type[Root]) -> dict[str, Any]:
    """The values without keys that do not exist, so that what is wrong with the others is found too."""
    kinds = root.tables()
    return {
        name: _known_keys(section, kinds[name])
        for name, section in values.items()
        if name in kinds and isinstance(section, Mapping)
    }


def _known_keys(values: Any, kind: type[Section]) -> Any:
    if kind.checks_keys or not isinstance(values, Mapping):
        return values
    tables = kind.tables()
    return {
        key: _known_keys(value, tables[key]) if key in tables else value
        for key, value in values.items()
        if key in kind.model_fields
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
    named = [
        name for name in sources if any(change.keys == ["data", name] and not _unsets(change) for change in changes)
    ]
    if len(named) > 1:
        raise ConfigError(f"data needs exactly one of {', '.join(sources)}, got {' and '.join(named)}")
    for change in sorted(changes, key=lambda change: (_keeps_source(change.keys, sources), len(change.keys))):
        _apply_change(values, change, root)


def _unsets(change: _Change) -> bool:
    """Whether a source is to be as if it was never named: `data.hub=` or `data.hub=none`."""
    text = change.value.text if isinstance(change.value, _Text) else change.value
    return text is None or (isinstance(text, str) and text.strip("\"'").lower() in ("", "none"))


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
        known = hint(keys[0], _settings(RLConfig)) if equals and len(keys) == 1 and keys[0] else ""
        raise ConfigError(f"an override has the form section.key=value, got {override!r}{known}")
    return _Change(keys, _Text(text.strip()))


def _keeps_source(keys: list[str], sources: Collection[str]) -> bool:
    """False sorts first: a new source or preset drops the old one's settings, and must not drop those given with it."""
    return keys != ["algorithm", "preset"] and not (keys[0] == "data" and keys[1] in sources)


def _apply_change(values: dict[str, Any], change: _Change, root: type[Root]) -> None:
    node, keys, value, kind = values, change.keys, change.value, _kind(root, change.keys)
    if kind is not None and isinstance(value, Mapping):  # a table of a Python caller, setting by setting
        for key, inner in value.items():
            _apply_change(values, _Change([*keys, key], inner), root)
        return
    if keys[:2] == ["data", "mix"] and len(keys) > 2:
        raise ConfigError(
            f"data.mix is a list of files, given as a whole: 'data.mix=[{{path = \"a.jsonl\", weight = 2}}, …]', got "
            f"{'.'.join(keys)!r}"
        )
    for depth, key in enumerate(keys[:-1], 1):
        table = _kind(root, keys[:depth])
        node[key] = table.spelled(node.get(key, {})) if table is not None else node.get(key, {})
        node = node[key]
        if not isinstance(node, dict):
            raise ConfigError(f"{'.'.join(keys)!r} goes below {key!r}, which is a value, not a section")
    if keys[0] == "data" and keys[1:] in [[name] for name in root.sources()] and _unsets(change):
        node.pop(keys[1], None)
        return
    if keys == ["algorithm", "preset"]:  # another method replaces the recipe's choices
        node.clear()
    if isinstance(value, _Text):
        value = _parse_value(value.text, root, keys)
    if kind is not None and keys[-1] in node and not isinstance(value, Mapping):  # the short form of a table
        value = {**kind.spelled(node[keys[-1]]), kind.main: value}
    node[keys[-1]] = value
    if keys[0] == "data" and keys[1] in (sources := root.sources()):  # a new source replaces the recipe's
        gone = {*sources, "params", *(["eval_path"] if keys[1] not in _FILES else [])} - {keys[1]}
        for other in gone:
            node.pop(other, None)


def _parse_value(text: str, root: type[Root], keys: Sequence[str]) -> Any:
    """TOML syntax where it parses (`3`, `1e-5`, `["a"]`), else the bare text; `run.name=2026-01-31` is a name too."""
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text
    if isinstance(value, str) or (isinstance(value, Mapping) and _kind(root, keys) is not None):
        return value
    return text if _is_text(root, keys) else value


def _kind(root: type[Root], keys: Sequence[str]) -> type[Table] | None:
    """The table that a path leads to, within a section: `["algorithm", "gate"]`."""
    kind: type[Section] | None = root
    for key in keys:
        kind = kind.tables().get(key) if kind is not None else None
    return kind if kind is not None and issubclass(kind, Table) else None


def _is_text(root: type[Root], keys: Sequence[str]) -> bool:
    """Whether a path leads to a setting that is text, or to a table whose short form is."""
    if (table := _kind(root, keys)) is not None:
        return _is_text(root, [*keys, table.main]) if table.main else False
    section: type[Section] | None = root
    for key in keys[:-1]:
        section = section.tables().get(key) if section is not None else None
    info = section.model_fields.get(keys[-1]) if section is not None else None
    return info is not None and info.annotation in (str, str | None)


def _settings(kind: type[Section], path: str = "") -> dict[str, list[str]]:
    """The keys of each section, and of each table in it: `{"training": ["lr", …], "algorithm.gate": [...], …}`."""
    found = {path: kind.known_keys()} if path else {}
    for key, table in kind.tables().items():
        found |= _settings(table, f"{path}.{key}" if path else key)
    return found


def _unknown_sections(values: Mapping[str, Any], root: type[Root]) -> Iterable[str]:
    kinds, settings = root.tables(), _settings(root)
    for name, section in values.items():
        if name not in kinds:
            yield from _unknown_section(name, section, {key: settings[key] for key in kinds})
        elif not isinstance(section, Mapping):
            yield f"{name!r} is a section, got the value {section!r}"
        else:
            yield from _unknown_keys(name, section, kinds[name], settings)


def _unknown_keys(path: str, values: Any, kind: type[Section], settings: Mapping[str, list[str]]) -> Iterable[str]:
    if kind.checks_keys or not isinstance(values, Mapping):
        return
    tables = kind.tables()
    for key, value in values.items():
        if key in tables:
            yield from _unknown_keys(f"{path}.{key}", value, tables[key], settings)
        elif key not in kind.model_fields:
            known = _of_other_kinds(path, key) or hint(f"{path}.{key}", settings)
            yield f"unknown key {path}.{key}{known or _some([f'{path}.{k}' for k in settings[path]])}"


def _unknown_section(section: str, values: Any, settings: Mapping[str, list[str]]) -> Iterable[str]:
    """A key outside of any section, another framework's section, or a misspelt one."""
    if other := _of_other_kinds(section):
        yield f"unknown section {section!r}{other}"
        return
    valid = _some(list(settings))
    foreign = [f"unknown key {path}{found}" for path in _leaves(section, values) if (found := hint(path, settings))]
    if not isinstance(values, Mapping):
        yield f"unknown section {section!r}{hint(section, settings) or valid}"
    elif near := nearest(section, settings):
        yield f"unknown section {section!r}{near}"
    else:
        yield from foreign or [f"unknown section {section!r}{valid}"]


def _some(names: list[str]) -> str:
    """The first names of many, and where all of them are."""
    more = f" and {len(names) - _LISTED} more, see docs/configuration.md" if len(names) > _LISTED else ""
    return f"; valid are {', '.join(names[:_LISTED])}{more}"


def _of_other_kinds(section: str, key: str | None = None) -> str:
    """`"; it belongs to method.kind = rl"`, if it is a setting there."""
    found = [
        kind
        for kind, root in ROOTS.items()
        if section in (settings := _settings(root)) and (key is None or key in settings[section])
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
