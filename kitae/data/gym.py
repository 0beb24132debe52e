"""Prompts from any data set of `reasoning-gym`, an optional package of procedural puzzles.

A prompt is a pure function of (data sets, config, seed, split, index). Whether a question is held out depends on its
text alone, as for the built-in tasks. The context of a prompt says how to make its entry again, so that the verifier
`gym` can hand it to the data set's own scorer without its metadata having to survive a trip through JSON.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Any

from kitae.data.tasks import HELD_OUT, MAX_DRAWS, Split
from kitae.errors import DataError
from kitae.plugins import nearest
from kitae.types import Message, Prompt

INSTALL = "pip install reasoning-gym"
CHUNK = 500
"""Entries that are made under one seed: some data sets have no more."""


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
        entry_seed = _seed(name, seed, split, chunk, draw)
        entry = gym_entry(name, spelled, entry_seed, entry_index)
        question = str(entry["question"])
        if _split_of(name, question) == split and question not in taken:
            made_from = {"dataset": name, "config": spelled, "seed": entry_seed, "index": entry_index}
            context = {"gym": made_from}
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


def gym_entry(name: str, config: str, seed: int, index: int) -> dict[str, Any]:
    """One entry, made from what a prompt's context says: its question, its answer (or None) and its metadata."""
    entry: dict[str, Any] = gym_dataset(name, config, seed)[index]
    return entry


@lru_cache(maxsize=64)
def gym_dataset(name: str, config: str, seed: int) -> Any:
    """A data set of reasoning-gym; `config` is JSON text. `DataError` where there is none."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise DataError(f"data sets of reasoning-gym need the package: {INSTALL}") from None
    if name not in DATASETS:
        raise DataError(f"reasoning-gym has no data set {name!r}{nearest(name, DATASETS)}")
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=CHUNK, **json.loads(config))
    except Exception as error:  # its configs assert, and raise whatever dataclasses and json do
        raise DataError(f"reasoning-gym data set {name!r} refuses the config {config}: {error}") from error


def _seed(name: str, seed: int, split: Split, chunk: int, draw: int) -> int:
    """A seed far from its neighbours: reasoning-gym adds the index to it."""
    digest = hashlib.sha256(f"{name}/{seed}/{split}/{chunk}/{draw}".encode()).digest()
    return int.from_bytes(digest[:4]) & 0x7FFF_FFFF


def _split_of(name: str, question: str) -> Split:
    digest = hashlib.sha256(f"{name}\n{question}".encode(errors="replace")).digest()
    return "eval" if digest[0] % HELD_OUT == 0 else "train"
