"""Samples as a few arrays, whatever their number, on their way to ranks, which lay them out into rows.

    samples         int64 [S, 5]  group, index, chain, number of the prompt, tokens
    prompts         int32         the tokens of each distinct prompt, concatenated; `prompt_lengths` has their lengths
    NAME.pieces     int64 [P, 3]  of a column: number of the sample, kind of piece, number of values
    NAME.values                   the values of all pieces, concatenated
    NAME.counts     int64         the lengths of runs
    NAME.stretches  int64 [P, 7]  of pieces that lie in files: number of the file, offset, tokens, characters, checksum
                                  of the response, start and end within it

A column holds the tokens after the prompt, the mask, the weights of the loss tokens, or a column that a loss reads. A
value that is the same over all tokens of a response (advantage, weight, score, most versions) is sent once, as a run.
What each token could have been travels as `KeptSets.to_arrays`, of all tokens of all samples, where any sample has it.
What lies in files (`kitae.store.columns`) is read by the rank; the header has the folder and the file names.

Conditions of a batch and numbers of a step travel in the same frames.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from kitae.algorithms.control import Coefficients, Signal
from kitae.kept_sets import KeptSets, joined_sets
from kitae.observe.meter import Key, Kind, Sum, Totals
from kitae.store.columns import Filed, LazyColumn, column_files
from kitae.trainer.base import Conditions, Mark
from kitae.types import LazyArray, Sample, SampleKey
from kitae.workers.frames import Array

Header = dict[str, Any]
Arrays = dict[str, Array]

_PLAIN, _RUNS, _FILED = 0, 1, 2  # kinds of pieces
_TOKENS, _MASK, _WEIGHT = "tokens", "mask", "weight"
_OWN = "column "  # prefix for the columns of a loss, whose names might be one of those above


def samples_to_wire(rows: Sequence[Sequence[Sample]], observed: Collection[SampleKey] = ()) -> tuple[Header, Arrays]:
    """rows: the samples of each row. observed: the samples whose numbers of single tokens are wanted."""
    samples = [s for row in rows for s in row]
    prompts, places = dict[bytes, int](), _Places()
    table, columns = list[list[int]](), dict[str, _Sent]()
    for number, s in enumerate(samples):
        prompt = prompts.setdefault(s.prompt_T.astype(np.int32).tobytes(), len(prompts))
        table.append([s.group, s.index, s.chain, prompt, s.length])
        for name, kind, parts in _columns(s):
            column = columns.setdefault(name, _Sent(kind, places))
            for part in parts:
                column.add(number, part)
    arrays: Arrays = {
        "samples": np.array(table, dtype=np.int64).reshape(-1, 5),
        "prompts": np.frombuffer(b"".join(prompts), dtype=np.int32),
        "prompt_lengths": np.array([len(prompt) // 4 for prompt in prompts], dtype=np.int64),
    }
    for name, column in columns.items():
        arrays |= column.arrays(name)
    kept = joined_sets([(s.kept, s.length) for s in samples])
    arrays |= {} if kept is None else kept.to_arrays()
    watched = [list(s.key) for s in samples if s.key in observed]
    files = {"folder": places.folder, "files": list(places.files)}
    return {"rows": [len(row) for row in rows], "columns": list(columns), "observed": watched, **files}, arrays


def samples_of_wire(header: Header, arrays: Mapping[str, Array]) -> tuple[list[list[Sample]], set[SampleKey]]:
    """The samples of each row, and which of them are observed."""
    cuts = np.cumsum(arrays["prompt_lengths"])[:-1]
    prompts = np.split(arrays["prompts"], cuts)
    table = arrays["samples"].tolist()
    places = _Places(header["folder"], {name: number for number, name in enumerate(header["files"])})
    columns = {name: _received(name, arrays, len(table), places) for name in header["columns"]}
    kept, ends = KeptSets.of_arrays(arrays), np.cumsum([0, *(numbers[4] for numbers in table)]).tolist()
    samples = iter(
        _sample(
            numbers,
            prompts[numbers[3]],
            {name: found[n] for name, found in columns.items()},
            kept and kept[ends[n] : ends[n + 1]],
        )
        for n, numbers in enumerate(table)
    )
    rows = [[next(samples) for _ in range(count)] for count in header["rows"]]
    return rows, {(group, index, chain) for group, index, chain in header["observed"]}


def _columns(s: Sample) -> Iterable[tuple[str, str, Sequence[Any]]]:
    """Name, dtype and parts of each column of a sample."""
    yield _TOKENS, "<i4", s.tokens_T.parts[1:] if isinstance(s.tokens_T, LazyArray) else [s.tokens_T[s.prompt_length :]]
    yield _MASK, "?", [s.mask_T]
    yield _WEIGHT, "<f4", [s.weight_T[s.mask_T]]
    for name, values in s.columns.items():
        yield _OWN + name, "<f4", _at_loss(values, s) if isinstance(values, LazyArray) else [s.loss(name)]


def _at_loss(values: LazyArray, s: Sample) -> list[Any]:
    """The parts of a column at loss tokens, left unread where possible; at least one."""
    found, at = [], 0
    for part in values.parts:
        mask, at = s.mask_T[at : at + len(part)], at + len(part)
        if mask.any():
            found.append(part if mask.all() else np.asarray(part)[mask])
    return found or [np.zeros(0, dtype=np.float32)]


def _sample(
    numbers: Sequence[int], prompt: Array, columns: Mapping[str, "Array | None"], kept: KeptSets | None
) -> Sample:
    group, index, chain, _, length = numbers
    tokens, mask_T, weight_N = columns[_TOKENS], columns[_MASK], columns[_WEIGHT]
    assert tokens is not None and mask_T is not None and weight_N is not None
    tokens_T = np.concatenate([prompt, tokens]).astype(np.int64)
    assert len(tokens_T) == len(mask_T) == length, f"sample {group}/{index} has {length} tokens, got {len(tokens_T)}"
    blank = Sample(group, index, tokens_T, len(prompt), mask_T, np.zeros(0, dtype=np.float32), chain=chain)
    own = {name.removeprefix(_OWN): v for name, v in columns.items() if name.startswith(_OWN) and v is not None}
    return Sample(
        group,
        index,
        tokens_T,
        len(prompt),
        mask_T,
        blank.spread(weight_N),
        {name: blank.spread(values_N) for name, values_N in own.items()},
        chain,
        kept=kept,
    )


@dataclass(slots=True)
class _Places:
    """The files that samples lie in, each with a number."""

    folder: str = ""
    files: dict[str, int] = field(default_factory=dict)

    def numbers(self, kept: LazyColumn[Any]) -> list[list[int]]:
        self.folder = str(kept.files.folder)
        return [
            [self.files.setdefault(filed.file, len(self.files)), *filed.record[1:], start, stop]
            for filed, start, stop in kept.stretches
        ]

    def read(self, column: str, numbers: Sequence[int]) -> Array:
        file, offset, tokens, letters, checksum, start, stop = numbers
        filed = Filed(list(self.files)[file], offset, tokens, letters, checksum)
        contents = column_files(Path(self.folder)).read(filed)
        return (contents.tokens if column == _TOKENS else contents.logprobs)[start:stop]


class _Sent:
    """One column of all samples while it is being encoded."""

    def __init__(self, kind: str, places: _Places) -> None:
        self._kind = kind
        self._places = places
        self._pieces: list[tuple[int, int, int]] = []
        self._values: list[Array] = []
        self._counts: list[Array] = []
        self._stretches: list[list[int]] = []

    def add(self, sample: int, part: Any) -> None:
        if isinstance(part, LazyColumn):
            self._pieces.append((sample, _FILED, len(part.stretches)))
            self._stretches += self._places.numbers(part)
            return
        values = np.asarray(part, dtype=self._kind)
        starts = _run_starts(values)
        if 2 * len(starts) < len(values):
            self._counts.append(np.diff(starts, append=len(values)))
            self._piece(sample, _RUNS, values[starts])
        else:
            self._piece(sample, _PLAIN, values)

    def _piece(self, sample: int, kind: int, values: Array) -> None:
        self._pieces.append((sample, kind, len(values)))
        self._values.append(values)

    def arrays(self, name: str) -> Arrays:
        return {
            f"{name}.pieces": np.array(self._pieces, dtype=np.int64),
            f"{name}.values": np.concatenate([np.zeros(0, dtype=self._kind), *self._values]),
            f"{name}.counts": np.concatenate([np.zeros(0, dtype=np.int64), *self._counts]),
            f"{name}.stretches": np.array(self._stretches, dtype=np.int64).reshape(-1, 7),
        }


def _received(name: str, arrays: Mapping[str, Array], samples: int, places: _Places) -> "list[Array | None]":
    """The column of each sample; None: the sample has no such column."""
    values, counts = arrays[f"{name}.values"], arrays[f"{name}.counts"]
    stretches = arrays[f"{name}.stretches"].tolist()
    found: list[list[Array]] = [[] for _ in range(samples)]
    at = run = read = 0
    for sample, kind, count in arrays[f"{name}.pieces"].tolist():
        if kind == _FILED:
            found[sample] += [places.read(name, numbers) for numbers in stretches[read : read + count]]
            read += count
            continue
        own, at = values[at : at + count], at + count
        if kind == _RUNS:
            own, run = np.repeat(own, counts[run : run + count]), run + count
        found[sample].append(own)
    return [np.concatenate(parts) if parts else None for parts in found]


def _run_starts(values: Array) -> Array:
    """Where each run of values that are equal bit for bit begins."""
    bits = np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")
    starts: Array = np.flatnonzero(np.concatenate([[True], bits[1:] != bits[:-1]])[: len(values)])
    return starts


_KEYS: dict[str, type[Enum]] = {"mark": Mark, "signal": Signal}


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
