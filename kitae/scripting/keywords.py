"""Settings as keywords of Python: `train(…, lr=1e-5, max_tokens=64, eval={"prompts": 16})`.

The rule: a keyword that is a section takes the keys of that section. Any other is a key of one of the sections in
`FLAT`, and must be a key of exactly one of them; what the others have (`eval`, `pipeline`, `engine` …) is given by
section.
"""

from collections.abc import Mapping
from typing import Any

from kitae.config.hints import hint
from kitae.config.root import Root
from kitae.errors import ConfigError

FLAT = ("training", "sampling", "model", "algorithm", "data", "run")
"""Sections whose keys may be given without their section."""


def by_section(root: type[Root], keywords: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """`{"lr": 1e-5, "eval": {"prompts": 16}}` → `{"training": {"lr": 1e-5}, "eval": {"prompts": 16}}`.

    root: the settings of the kind of run that they are for. All that is wrong is in one `ConfigError`.
    """
    sections = root.tables()
    found: dict[str, dict[str, Any]] = {}
    problems = list[str]()
    for key, value in keywords.items():
        if key in sections:
            if not isinstance(value, Mapping):
                problems.append(f"{key!r} is a section, and takes its keys and values, got {value!r}")
                continue
            found.setdefault(key, {}).update(value)
            continue
        homes = [name for name in FLAT if name in sections and key in sections[name].model_fields]
        if len(homes) == 1:
            found.setdefault(homes[0], {})[key] = value
        elif isinstance(value, Mapping):  # refused with the settings, which know the sections of other kinds
            found[key] = dict(value)
        elif homes:
            problems.append(f"{key!r} is a setting of {' and '.join(homes)}: give it as {homes[0]}={{{key!r}: …}}")
        else:
            known = {name: section.known_keys() for name, section in sections.items()}
            problems.append(f"unknown setting {key!r}{hint(key, known)}")
    if problems:
        raise ConfigError("\n".join(problems))
    return found
