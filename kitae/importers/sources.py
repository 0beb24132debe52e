"""Where a peer's data is, as a recipe names it: a file of this machine, or a data set on the hub."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kitae.data.data_files import local_file, read_rows
from kitae.errors import KitaeError
from kitae.importers.translation import Translation

_SUFFIXES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True, slots=True)
class DataSource:
    """`DataSource("trl-lib/DeepMath-103K")`, `DataSource("data/train.jsonl")`.

    config and split: of a data set on the hub. changes: what code does to its rows that a recipe cannot repeat. reader:
    a function that reads a row, `file.py:function`, where code that changes rows could be kept.
    """

    name: str
    config: str = ""
    split: str = "train"
    changes: tuple[str, ...] = ()
    reader: str = ""

    @classmethod
    def named(cls, name: str, config: object = None, split: object = None) -> "DataSource":
        return cls(name, str(config or ""), str(split or "train"))

    def __str__(self) -> str:
        return self.name

    @property
    def is_hub(self) -> bool:
        return not self.name.endswith((*_SUFFIXES, ".csv"))

    @property
    def pattern(self) -> str:
        """The files of its split, as most data sets on the hub are laid out."""
        return f"{self.config or 'data'}/{self.split.partition('[')[0]}-*.parquet"

    def put(self, t: Translation, key: str) -> None:
        if self.is_hub:
            t.set("data.hub", self.name, of=key)
            t.set("data.hub_files", self.pattern, of=key)
            if t.kind != "rl":
                return
            t.note(f"data.hub_files = {self.pattern!r} is where most data sets on the hub have their files: check it.")
        else:
            t.set("data.path", self.name, of=key)
            if not Path(self.name).expanduser().exists():
                t.note(f"{self.name} is not here.")
        if "[" in self.split:
            t.near(key, f"the whole split is trained on, not {self.split!r}")

    def put_held_out(self, t: Translation, key: str, train: "DataSource") -> None:
        if not self.is_hub:
            t.set("data.eval_path", self.name, of=key)
        elif self.name == train.name:
            t.set("data.hub_eval_files", self.pattern, of=key)
        else:
            t.refuse(key, f"held-out rows must be a file or of {train.name}: download them and set data.eval_path")


def count_rows(source: DataSource) -> int | None:
    """How many rows a file of this machine has; None where that is not known."""
    if source.is_hub:
        return None
    try:
        return sum(1 for _ in read_rows(local_file("data.path", source.name)))
    except KitaeError:
        return None


def source_of(value: Any) -> DataSource | None:
    """A path or the name of a data set, or a list with one of them."""
    names = [value] if isinstance(value, str) else list(value or ())
    return DataSource(str(names[0])) if len(names) == 1 else None
