"""Settings of an algorithm in one line, for tests: each as a keyword, whatever table it is in.

    algorithm_with(preset="grpo", gate="mask", clip_high=0.3, kl_coef=0.1, reference="frozen")

A keyword is the name of a table, of which it is the function; or a table and a setting, as in kl_coef; or a setting
that one table alone has, as clip_high.
"""

from collections.abc import Mapping
from typing import Any

from kitae.algorithms.config import AlgorithmConfig


def algorithm_with(**choices: Any) -> AlgorithmConfig:
    return algorithm_of(choices)


def algorithm_of(choices: Mapping[str, Any]) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(spelled(choices))


def spelled(choices: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of `[algorithm]`, as a recipe has them."""
    kinds = AlgorithmConfig.tables()
    found: dict[str, Any] = {}
    for key, value in choices.items():
        if key not in kinds:
            table, setting = _place(key)
            place = found.setdefault(table, {}) if table else found
            place[setting] = value
        elif isinstance(value, Mapping):
            found.setdefault(key, {}).update(value)
        else:
            found.setdefault(key, {})["name"] = value
    return found


def _place(key: str) -> tuple[str, str]:
    kinds = AlgorithmConfig.tables()
    for table, kind in kinds.items():
        setting = key.removeprefix(f"{table}_")
        if setting != key and setting in kind.known_keys():
            return table, setting
    places = [table for table, kind in kinds.items() if key in kind.known_keys()]
    assert len(places) < 2, f"{key} is in several tables: {places}"
    return (places[0], key) if places else ("", key)
