"""Prompts from any data set of `reasoning-gym`, an optional package of procedural puzzles.

A prompt is a pure function of (data sets, config, seed, split, index). Whether a question is held out depends on its
text alone, as for the built-in tasks. The context of a prompt says how to make its entry again, so that the verifier
`gym` can hand it to the data set's own scorer without its metadata having to survive a trip through JSON.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Protocol, Self, TypedDict

from kitae.data.tasks import HELD_OUT, MAX_DRAWS, Split
from kitae.errors import DataError
from kitae.plugins import nearest
from kitae.types import Message, Prompt

INSTALL = "pip install reasoning-gym"
CHUNK = 500
"""Entries that are made under one seed: some data sets have no more."""


class GymEntry(TypedDict):
    """One puzzle: `{"question": "1 + 1 = ?", "answer": "2", "metadata": {…}}`."""

    question: str
    answer: str | None
    metadata: dict[str, Any]


class Dataset(Protocol):
    """A data set of reasoning-gym, as far as it is used here."""

    def __getitem__(self, index: int) -> GymEntry: ...

    def score_answer(self, answer: str, entry: GymEntry) -> float: ...


@dataclass(frozen=True, slots=True)
class Origin:
    """How an entry is made again: `Origin("chain_sum", '{"max_terms": 4}', seed=7, index=17)`.

    A prompt's context holds it as a mapping, under "gym"; `config` is JSON text.
    """

    dataset: str
    config: str
    seed: int
    index: int

    @classmethod
    def of(cls, context: Mapping[str, Any]) -> Self:
        """What a prompt's context says; `DataError` where it does not."""
        match context.get("gym"):
            case {"dataset": dataset, "config": config, "seed": seed, "index": index}:
                with suppress(TypeError, ValueError):
                    return cls(str(dataset), str(config), int(seed), int(index))
        found = f"{context.get('gym')!r}"[:200]
        raise DataError(f"context['gym'] must hold dataset, config, seed and index, got {found}")

    def entry(self) -> GymEntry:
        return gym_dataset(self.dataset, self.config, self.seed)[self.index]


def gym_prompt(
    names: Sequence[str],
    seed: int,
    split: Split,
    index: int,
    config: Mapping[str, Any] | None = None,
    taken: AbstractSet[str] = frozenset(),
) -> Prompt:
    """Prompt `index` of the split; several data sets take turns. Its question is not in `taken`.

    `gym_prompt(["chain_sum"], seed=0, split="train", index=17, config={"max_terms": 4})`; the config goes to every data
    set. `DataError` where the package is missing, a name or the config is refused, or the questions have run out.
    """
    if not names:
        raise DataError("names must hold at least one data set of reasoning-gym, got none")
    turn, name = index // len(names), names[index % len(names)]
    spelled = json.dumps(dict(config or {}), sort_keys=True)
    for draw in range(MAX_DRAWS):
        chunk, entry_index = divmod(turn, CHUNK)
        origin = Origin(name, spelled, _seed(name, seed, split, chunk, draw), entry_index)
        entry = origin.entry()
        question = str(entry["question"])
        if _split_of(name, question) == split and question not in taken:
            context = {"gym": asdict(origin)}
            return Prompt(f"gym/{name}/{split}/{turn}", (Message("user", question),), entry["answer"], context)
    raise DataError(f"reasoning-gym data set {name!r} has no further question for the {split} split")


def gym_prompts(names: Sequence[str], seed: int, count: int, config: Mapping[str, Any] | None = None) -> list[Prompt]:
    """The first `count` held-out prompts, all different."""
    prompts: list[Prompt] = []
    taken: set[str] = set()
    for index in range(count):
        prompts.append(gym_prompt(names, seed, "eval", index, config, taken))
        taken.add(prompts[-1].messages[-1].content)
    return prompts


@lru_cache(maxsize=64)
def gym_dataset(name: str, config: str, seed: int) -> Dataset:
    """A data set of reasoning-gym; `config` is JSON text. `DataError` where there is none."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise DataError(f"data sets of reasoning-gym need the package: {INSTALL}") from None
    if name not in DATASETS:
        raise DataError(f"reasoning-gym has no data set {name!r}{nearest(name, DATASETS)}")
    try:
        dataset: Dataset = reasoning_gym.create_dataset(name, seed=seed, size=CHUNK, **json.loads(config))
    except Exception as error:  # its configs assert, and raise whatever dataclasses and json do
        raise DataError(f"reasoning-gym data set {name!r} refuses the config {config}: {error}") from error
    return dataset


def _seed(name: str, seed: int, split: Split, chunk: int, draw: int) -> int:
    """A seed far from its neighbours: reasoning-gym adds the index to it."""
    digest = hashlib.sha256(f"{name}/{seed}/{split}/{chunk}/{draw}".encode()).digest()
    return int.from_bytes(digest[:4]) & 0x7FFF_FFFF


def _split_of(name: str, question: str) -> Split:
    digest = hashlib.sha256(f"{name}\n{question}".encode(errors="replace")).digest()
    return "eval" if digest[0] % HELD_OUT == 0 else "train"
