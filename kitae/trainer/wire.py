"""What travels between the driver and its ranks: rows, conditions and numbers, in frames."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from enum import Enum
from typing import Any

import numpy as np

from kitae.algorithms.control import Coefficients, Signal
from kitae.data.packing import Observed, Row, Span
from kitae.observe.meter import Key, Kind, Sum, Totals
from kitae.processes.frames import Array
from kitae.trainer.base import Conditions, Mark

_ARRAYS = ("tokens_T", "positions_T", "source_N", "target_N", "weight_N")
_KEYS: dict[str, type[Enum]] = {"mark": Mark, "signal": Signal}

Header = dict[str, Any]
Arrays = dict[str, Array]


def rows_to_wire(rows: Iterable[Row]) -> tuple[list[Header], Arrays]:
    """What the header has of each row, and the arrays of all."""
    headers: list[Header] = []
    arrays: Arrays = {}
    for number, row in enumerate(rows):
        arrays |= {f"{number}.{name}": getattr(row, name) for name in _ARRAYS}
        arrays |= {f"{number}:{name}": values for name, values in row.columns.items()}
        arrays[f"{number}.spans"] = np.array([list(asdict(span).values()) for span in row.spans], dtype=np.int64)
        observed = [[list(o.key), o.start, o.stop] for o in row.observed]
        headers.append({"lengths": list(row.lengths), "columns": list(row.columns), "observed": observed})
    return headers, arrays


def rows_of_wire(headers: Sequence[Header], arrays: Mapping[str, Array]) -> list[Row]:
    return [
        Row(
            **{name: arrays[f"{number}.{name}"] for name in _ARRAYS},
            spans=tuple(Span(*numbers) for numbers in arrays[f"{number}.spans"].tolist()),
            columns={name: arrays[f"{number}:{name}"] for name in header["columns"]},
            lengths=tuple(header["lengths"]),
            observed=tuple(Observed((k[0], k[1], k[2]), start, stop) for k, start, stop in header["observed"]),
        )
        for number, header in enumerate(headers)
    ]


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
