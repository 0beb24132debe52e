"""Numbers of single tokens, for a share of the samples of each step, in files of their own.

    RUN/tokens/step-000012.npz
        keys     int32 [S, 3]  group, index and chain of each sample
        lengths  int32 [S]     loss tokens of each
        version  int32 [N]     the policy version that sampled the token
        others   fp16  [N]     one array for each of `COLUMNS` that the run has; N tokens, sample after sample

The loss tokens of a sample are those that the model generated, in order; the journal has the tokens themselves. The
numbers are those that training computed anyway, without a second pass. If several updates train on a sample, those of
the last one are recorded. The choice of samples depends only on seed and step, so a step that is trained again writes
the same file.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from kitae.errors import StoreError
from kitae.types import FloatArray, Sample, SampleKey

FOLDER = "tokens"
MOST_TOKENS = 65_536  # recorded of one step
TOKENS_MB = 256.0  # recorded of a run; beyond that the oldest steps are removed

COLUMNS = {
    "logp": "log-prob under the policy that is trained",
    "logp_old": "log-prob under the policy before the updates of the step",
    "logp_mu": "log-prob that the engine gave when it sampled the token; NaN: none",
    "logp_ref": "log-prob under the reference, where there is one",
    "entropy": "of the distribution that the token is from, in nats",
    "value": "of the critic, where there is one",
    "advantage": "of the token",
    "ratio": "as the algorithm's ratio stage gave it; at most 65,504",
    "gate": "weight that the gate left to the token: 0 where it was clipped, NaN where the advantage is 0",
    "correction": "weight for the gap between engine and trainer",
}

_FROM_SAMPLE = ("logp_mu", "logp_ref", "value", "advantage", "version")
_LARGEST = float(np.finfo(np.float16).max)
_NAME = re.compile(r"step-(\d{6,})\.npz")

Columns = Mapping[str, FloatArray]


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """Which samples of a step are recorded: `TokenChoice(share=0.05, most=65536, seed=0)`. most: tokens."""

    share: float
    most: int
    seed: int

    def among(self, step: int, samples: Sequence[Sample]) -> frozenset[SampleKey]:
        """The chosen samples: at least one if any is wanted and fits, and of each rollout all chains or none."""
        lengths: dict[tuple[int, int], int] = {}
        for s in samples:
            lengths[s.group, s.index] = lengths.get((s.group, s.index), 0) + s.loss_tokens
        wanted, left = max(1, round(self.share * len(lengths))) if self.share else 0, self.most
        rollouts = list(lengths)
        chosen: set[tuple[int, int]] = set()
        for i in np.random.default_rng((self.seed, step)).permutation(len(rollouts)):
            if len(chosen) == wanted:
                break
            if lengths[rollouts[i]] <= left:
                chosen.add(rollouts[i])
                left -= lengths[rollouts[i]]
        return frozenset(s.key for s in samples if (s.group, s.index) in chosen and s.loss_tokens)


def with_samples(found: Mapping[SampleKey, Columns], samples: Sequence[Sample]) -> dict[SampleKey, Columns]:
    """The numbers that ranks computed for observed samples, with columns that the driver has."""
    return {
        s.key: {**found[s.key], **{name: s.loss(name) for name in _FROM_SAMPLE if name in s.columns}}
        for s in samples
        if s.key in found
    }


class TokenFiles:
    """Writes the records of a run. An error is reported once, and does not stop the run."""

    def __init__(self, run: Path, limit_mb: float, note: Callable[[str], None]) -> None:
        self._folder = run / FOLDER
        self._limit = int(limit_mb * 1e6)
        self._note = note
        self._broken = False

    def write(self, step: int, records: Mapping[SampleKey, Columns]) -> None:
        if not records or self._broken:
            return
        try:
            self._folder.mkdir(exist_ok=True)
            scratch = self._folder / f".step-{step:06d}.partial"
            with scratch.open("wb") as file:
                np.savez_compressed(file, **_arrays(records))  # type: ignore[arg-type]
            os.replace(scratch, self._folder / f"step-{step:06d}.npz")
            self._make_room(step)
        except OSError as error:
            self._broken = True
            self._note(f"no more tokens are recorded: {error}")

    def forget_after(self, step: int) -> None:
        """Remove the records of later steps, which are discarded."""
        for number, path in _files(self._folder):
            if number > step:
                path.unlink(missing_ok=True)

    def _make_room(self, newest: int) -> None:
        files = [(number, path, path.stat().st_size) for number, path in _files(self._folder)]
        excess = sum(size for _, _, size in files) - self._limit
        for number, path, size in files:
            if excess > 0 and number != newest:
                path.unlink(missing_ok=True)
                excess -= size


def recorded_steps(run: Path) -> list[int]:
    """The recorded steps, in order."""
    return [step for step, _ in _files(run / FOLDER)]


def read_tokens(run: Path, step: int) -> dict[tuple[int, int], dict[str, npt.NDArray[Any]]]:
    """For each sample, by group and index: `version`, `chain` (ints) and those of `COLUMNS` that the run has (fp16).

    Each array has one number for each loss token. Those of several chains are concatenated, and `chain` has the chain
    of each.
    """
    path = run / FOLDER / f"step-{step:06d}.npz"
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as found:
            arrays = {name: found[name] for name in found.files}
        keys, lengths = arrays.pop("keys"), arrays.pop("lengths")
    except FileNotFoundError:
        there = ", ".join(map(str, recorded_steps(run))) or "none"
        raise StoreError(f"step must be one whose tokens {run} has recorded ({there}), got {step}") from None
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    arrays["chain"] = np.repeat(keys[:, 2], lengths)
    cuts = np.cumsum(lengths)[:-1]
    pieces = {name: np.split(values, cuts) for name, values in arrays.items()}
    tokens: dict[tuple[int, int], dict[str, npt.NDArray[Any]]] = {}
    for i, (group, index, _) in enumerate(keys.tolist()):
        before = tokens.get((group, index))
        own = {name: parts[i] for name, parts in pieces.items()}
        tokens[group, index] = own if before is None else {n: np.concatenate([before[n], own[n]]) for n in own}
    return tokens


def _arrays(records: Mapping[SampleKey, Columns]) -> dict[str, npt.NDArray[Any]]:
    keys = sorted(records)
    lengths = [len(records[key]["logp"]) for key in keys]
    found: dict[str, npt.NDArray[Any]] = {
        "keys": np.array(keys, dtype=np.int32),
        "lengths": np.array(lengths, dtype=np.int32),
    }
    for name in ("version", *COLUMNS):
        if all(name in records[key] for key in keys):
            values = np.concatenate([records[key][name] for key in keys])
            found[name] = values.astype(np.int32) if name == "version" else _half(values)
    return found


def _half(values: FloatArray) -> npt.NDArray[np.float16]:
    """The values in fp16. Infinities are kept; finite values are limited to the range of fp16."""
    clamped = np.where(np.isinf(values), values, values.clip(-_LARGEST, _LARGEST))
    found: npt.NDArray[np.float16] = clamped.astype(np.float16)
    return found


def _files(folder: Path) -> list[tuple[int, Path]]:
    found = ((_NAME.fullmatch(path.name), path) for path in folder.glob("step-*.npz"))
    return sorted((int(match[1]), path) for match, path in found if match)
