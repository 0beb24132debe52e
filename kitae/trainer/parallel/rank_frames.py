"""What travels between the driver and its ranks beside samples: conditions and numbers, in frames."""

from collections.abc import Mapping
from enum import Enum
from typing import Any

from kitae.algorithms.control import Coefficients, Signal
from kitae.observe.meter import Key, Kind, Sum, Totals
from kitae.trainer.base import Conditions, Mark
from kitae.workers.frames import Array

_KEYS: dict[str, type[Enum]] = {"mark": Mark, "signal": Signal}

Header = dict[str, Any]
Arrays = dict[str, Array]


def conditions_of(record: Mapping[str, Any]) -> Conditions:
    """From what `asdict` made of them."""
    return Conditions(record["version"], Coefficients(**record["coefficients"]))


def totals_to_wire(totals: Totals) -> tuple[Header, Arrays]:
    entries = [[*_named(key), value.kind.name, list(value.sums)] for key, value in totals.entries.items()]
    arrays = {
        f"{place}:{name}": values
        for place, columns in enumerate(totals.tokens.values())
        for name, values in columns.items()
    }
    tokens = [[list(key), list(columns)] for key, columns in totals.tokens.items()]
    return {"entries": entries, "tokens": tokens}, arrays


def totals_of_wire(header: Header, arrays: Mapping[str, Array]) -> Totals:
    entries: dict[Key, Sum] = {
        _key(kind, name): Sum(Kind[how], tuple(map(float, sums))) for kind, name, how, sums in header["entries"]
    }
    tokens = {
        (key[0], key[1], key[2]): {name: arrays[f"{place}:{name}"] for name in columns}
        for place, (key, columns) in enumerate(header["tokens"])
    }
    return Totals(entries, tokens)


def _named(key: Any) -> tuple[str, str]:
    for kind, keys in _KEYS.items():
        if isinstance(key, keys):
            return kind, key.name
    assert isinstance(key, str), f"{key!r} is no name of a metric, and no key that ranks know"
    return "name", key


def _key(kind: str, name: str) -> str | Enum:
    return name if kind == "name" else _KEYS[kind][name]
