"""Samples on their way to ranks, which lay them out into rows: in a few arrays, whatever the number of samples.

    samples         int64 [S, 5]  group, index and chain, which of the prompts, how many tokens
    prompts         int32         each once, one after the other; `prompt_lengths`
    NAME.pieces     int64 [P, 3]  of a column: which sample, kind of the piece, how many values it has
    NAME.values     of all pieces, one after the other
    NAME.counts     int64         of runs: how often each value stands

A column is that of the tokens after the prompt, the mask, the weights of the loss tokens, or one that a loss reads.
What is one number over all tokens of an answer (advantage, weight, score, most versions) travels as that number.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kitae.processes.frames import Array
from kitae.trainer.wire import Arrays, Header
from kitae.types import Sample, SampleKey

_PLAIN, _RUNS = 0, 1  # kinds of pieces
_TOKENS, _MASK, _WEIGHT = "tokens", "mask", "weight"
_OWN = "column "  # how names of a loss begin, which might be those above too


def samples_to_wire(rows: Sequence[Sequence[Sample]], observed: Collection[SampleKey] = ()) -> tuple[Header, Arrays]:
    """rows: the samples of each. observed: whose numbers of single tokens are wanted."""
    samples = [s for row in rows for s in row]
    prompts = dict[bytes, int]()
    table, columns = list[list[int]](), dict[str, _Sent]()
    for number, s in enumerate(samples):
        prompt = prompts.setdefault(s.tokens_T[: s.prompt_length].astype(np.int32).tobytes(), len(prompts))
        table.append([s.group, s.index, s.chain, prompt, s.length])
        for name, values in _columns(s):
            columns.setdefault(name, _Sent()).add(number, values)
    arrays: Arrays = {
        "samples": np.array(table, dtype=np.int64).reshape(-1, 5),
        "prompts": np.frombuffer(b"".join(prompts), dtype=np.int32),
        "prompt_lengths": np.array([len(prompt) // 4 for prompt in prompts], dtype=np.int64),
    }
    for name, column in columns.items():
        arrays |= column.arrays(name)
    watched = [list(s.key) for s in samples if s.key in observed]
    return {"rows": [len(row) for row in rows], "columns": list(columns), "observed": watched}, arrays


def samples_of_wire(header: Header, arrays: Mapping[str, Array]) -> tuple[list[list[Sample]], set[SampleKey]]:
    """The samples of each row, and which of them are observed."""
    cuts = np.cumsum(arrays["prompt_lengths"])[:-1]
    prompts = np.split(arrays["prompts"], cuts)
    table = arrays["samples"].tolist()
    columns = {name: _received(name, arrays, len(table)) for name in header["columns"]}
    samples = iter(
        _sample(numbers, prompts[numbers[3]], {name: found[n] for name, found in columns.items()})
        for n, numbers in enumerate(table)
    )
    rows = [[next(samples) for _ in range(count)] for count in header["rows"]]
    return rows, {(group, index, chain) for group, index, chain in header["observed"]}


def _columns(s: Sample) -> Iterable[tuple[str, Array]]:
    yield _TOKENS, s.tokens_T[s.prompt_length :].astype(np.int32)
    yield _MASK, s.mask_T
    yield _WEIGHT, s.weight_T[s.mask_T]
    for name in s.columns:
        yield _OWN + name, s.loss(name)


def _sample(numbers: Sequence[int], prompt: Array, columns: Mapping[str, "Array | None"]) -> Sample:
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
    )


class _Sent:
    """A column of all samples, as it is gathered."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, int, int]] = []
        self._values: list[Array] = []
        self._counts: list[Array] = []

    def add(self, sample: int, values: Array) -> None:
        starts = _run_starts(values)
        if 2 * len(starts) < len(values):
            self._counts.append(np.diff(np.append(starts, len(values))))
            self._piece(sample, _RUNS, values[starts])
        else:
            self._piece(sample, _PLAIN, values)

    def _piece(self, sample: int, kind: int, values: Array) -> None:
        self._pieces.append((sample, kind, len(values)))
        self._values.append(values)

    def arrays(self, name: str) -> Arrays:
        counts: Array = np.concatenate(self._counts) if self._counts else np.zeros(0, dtype=np.int64)
        return {
            f"{name}.pieces": np.array(self._pieces, dtype=np.int64),
            f"{name}.values": np.concatenate(self._values),
            f"{name}.counts": counts,
        }


def _received(name: str, arrays: Mapping[str, Array], samples: int) -> "list[Array | None]":
    """Of each sample; None: it has no such column."""
    values, counts = arrays[f"{name}.values"], arrays[f"{name}.counts"]
    found: list[list[Any]] = [[] for _ in range(samples)]
    at = run = 0
    for sample, kind, count in arrays[f"{name}.pieces"].tolist():
        own, at = values[at : at + count], at + count
        if kind == _RUNS:
            own, run = np.repeat(own, counts[run : run + count]), run + count
        found[sample].append(own)
    return [np.concatenate(parts) if parts else None for parts in found]


def _run_starts(values: Array) -> Array:
    """Where a value begins that is not, bit for bit, the one before."""
    bits = np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")
    starts: Array = np.flatnonzero(np.concatenate([[True], bits[1:] != bits[:-1]])[: len(values)])
    return starts
