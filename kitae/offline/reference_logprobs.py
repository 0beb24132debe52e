"""Log-probs of the reference: computed once by the policy before its first step, kept in the folder of the run.

So there is no second model in memory, a run that goes on finds what it had, and every epoch reads the same numbers. A
sequence is known by its tokens and its mask: what the data calls it may change. A part has a checksum of what it says
and of the model that it is of; one whose checksum does not match is removed, and computed again.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kitae.config.root import StageConfig
from kitae.observe.observer import Observer
from kitae.store.disk import flush
from kitae.store.sealed import seal
from kitae.trainer.base import Column, Trainer
from kitae.types import FloatArray, Sample

FOLDER = "reference"
COLUMN = Column.REFERENCE.value

_TENSORS = ("keys", "lengths", "logp")
_KEY = 16  # bytes
_PART = 1024  # units computed between two files
_TOLD = 64  # units computed between two words on how far it is


class ReferenceLogProbs:
    """`folder` is that of the run; its `reference/00000.safetensors`, … hold a part of the sequences each.

    observer: receives the progress. config: of the run.
    """

    def __init__(self, folder: Path, observer: Observer, config: StageConfig) -> None:
        self._folder = folder / FOLDER
        self._observer = observer
        self._of = f"{config.run.seed} {config.model.model_dump_json()}"
        self._known: dict[bytes, FloatArray] = {}
        self._parts = 0
        for part in sorted(self._folder.glob("[0-9][0-9][0-9][0-9][0-9].safetensors")):
            self._read(part)

    async def add(self, trainer: Trainer, units: Iterable[Sequence[Sample]]) -> None:
        """Compute what is missing, with the weights that the trainer has now. Samples of a unit share their prompt."""
        missing = (unit for unit in units if any(_key(s) not in self._known for s in unit))
        done = 0
        while unknown := list(islice(missing, _PART)):
            if not done:
                self._observer.note("computing the log-probs of the reference, once, before the first step")
            found: dict[bytes, FloatArray] = {}
            for some in (unknown[i : i + _TOLD] for i in range(0, len(unknown), _TOLD)):
                scored = await trainer.annotate([s for unit in some for s in unit], [Column.OLD])
                found |= {_key(s): s.loss(Column.OLD.value) for s in scored}
                done += len(scored)
                self._observer.status(f"computing the log-probs of the reference: {done} answers so far")
            self._write(found)
        if done:
            self._observer.note(f"the reference has scored {done} answers, which are kept in {self._folder}")

    def annotated(self, sample: Sample) -> Sample:
        """With the column `logp_ref`."""
        return sample.with_columns(**{COLUMN: sample.spread(self._known[_key(sample)])})

    def _write(self, found: dict[bytes, FloatArray]) -> None:
        """A part is there as a whole or not at all."""
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"{self._parts:05}.safetensors"
        scratch = path.with_suffix(".partial")
        tensors: dict[str, npt.NDArray[Any]] = {
            "keys": np.frombuffer(b"".join(found), dtype=np.uint8),
            "lengths": np.array([len(x) for x in found.values()], dtype=np.int64),
            "logp": np.concatenate(list(found.values())).astype(np.float32),
        }
        save_file(tensors, scratch, {"seal": self._seal(tensors)})
        flush(scratch)
        scratch.rename(path)
        flush(self._folder)
        self._parts += 1
        self._known |= found

    def _read(self, path: Path) -> None:
        self._parts = int(path.stem) + 1
        try:
            with safe_open(path, "numpy") as file:
                tensors = {name: file.get_tensor(name) for name in _TENSORS}
                whole = (file.metadata() or {}).get("seal") == self._seal(tensors)
        except (SafetensorError, OSError, ValueError, TypeError, AttributeError):
            whole = False
        if not whole:
            self._observer.note(f"damage: {path} is not what was written, and is computed again")
            path.unlink()
            return
        keys = tensors["keys"].tobytes()
        ends = np.cumsum(tensors["lengths"])[:-1]
        for number, logp in enumerate(np.split(tensors["logp"], ends)):
            self._known[keys[number * _KEY : (number + 1) * _KEY]] = logp

    def _seal(self, tensors: Mapping[str, npt.NDArray[Any]]) -> str:
        values = (part for name in _TENSORS for part in (str(tensors[name].dtype), tensors[name].tobytes()))
        return seal("reference", self._of, *values).hex()


def _key(sample: Sample) -> bytes:
    content = np.asarray(sample.tokens_T, dtype=np.int64).tobytes() + sample.mask_T.tobytes()
    return hashlib.blake2b(content, digest_size=_KEY).digest()
