"""Run folders as the real classes write them, for those who read runs."""

import asyncio
import json
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from kitae.config.recipe import parse_config
from kitae.config.root import RLConfig
from kitae.store.columns import FOLDER, ColumnWriter, LazyColumn, column_files
from kitae.store.run_folder import RunStore
from kitae.types import Chain, Message, Prompt, Rollout, Runs, Score, Segment

HOSTILE = "<script>document.title='broken in'</script><img src=x onerror=\"document.title='broken in'\">"


def config_of(folder: Path, name: str, **sections: dict[str, object]) -> RLConfig:
    values: dict[str, dict[str, object]] = {
        "run": {"name": name, "dir": str(folder)},
        "model": {"path": "tiny"},
        "data": {"task": "reverse"},
        "training": {"steps": 4, "prompts_per_step": 2, "group_size": 4},
    }
    for section, keys in sections.items():
        values[section] = {**values.get(section, {}), **keys}
    return parse_config(values)


class WrittenRun:
    """A run in the making: `WrittenRun(tmp_path, "toy").step(rewards).finish()`. Each step has groups of samples."""

    def __init__(self, folder: Path, name: str = "toy", **sections: dict[str, object]) -> None:
        self.store = RunStore.create(config_of(folder, name, **sections))
        self.folder = self.store.folder
        self.steps = 0
        self.groups = 0
        self._do(self.store.begin(0))

    def step(
        self,
        rewards: Sequence[Sequence[float | None]],
        text: str = "",
        in_files: bool = False,
        **numbers: float | str,
    ) -> "WrittenRun":
        """One more step: for each group its rewards; None: an answer that could not be judged. in_files: where its
        answers lie."""
        self.steps += 1
        first = self.groups
        for group in rewards:
            self._group(group, text, in_files)
        self._do(self.store.journal.add_fates(self.steps, range(first, self.groups), []))
        judged = [r for group in rewards for r in group if r is not None]
        row = {"kind": "step", "step": self.steps, "reward": sum(judged) / len(judged), "step_seconds": 2.0}
        self.store.metrics.append({**row, "wait_seconds": 0.5, "train_seconds": 1.5, **numbers})
        with (self.folder / "timeline.jsonl").open("a") as file:
            start = 2.0 * self.steps
            for part, begin, end in (("generate", start, start + 0.5), ("train", start + 0.5, start + 2)):
                file.write(json.dumps({"part": part, "step": self.steps, "start": begin, "end": end}) + "\n")
        with (self.folder / "console.log").open("a") as file:
            file.write(f"step {self.steps} is done\n")
        return self

    def evaluate(self, mean: float) -> "WrittenRun":
        row = {"kind": "eval", "step": self.steps, "avg": mean, "avg_low": mean - 0.1, "avg_high": mean + 0.1}
        self.store.metrics.append(row)
        return self

    def finish(self) -> Path:
        self._do(self.store.journal.add_event("finished"))
        return self.close()

    def close(self) -> Path:
        """As a process that is killed leaves it, but for the files of a writer."""
        self.store.close()
        return self.folder

    def _group(self, rewards: Sequence[float | None], text: str, in_files: bool) -> None:
        number = self.groups
        self.groups += 1
        prompt = Prompt(f"reverse/{number % 3}", (Message("user", f"Reverse {number}"),), f"answer {number}")
        self._do(self.store.journal.add_prompt(number, prompt, self.steps - 1, number))
        for index, reward in enumerate(rewards):
            made = rollout(number, index, reward, text, self.steps - 1)
            self._do(self._add(made, self.folder / FOLDER if in_files else None))

    async def _add(self, made: Rollout, columns: Path | None) -> None:
        await self.store.journal.add_rollout(made if columns is None else await filed(columns, made))

    def _do(self, writing: Coroutine[Any, Any, None]) -> None:
        """In a thread of its own: where a browser is driven, this one has an event loop already."""
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, writing).result()


async def filed(columns: Path, made: Rollout) -> Rollout:
    """As an engine at a post would have filed it, in a file of its own."""
    (segment,) = made.segments
    place = await ColumnWriter(columns, "engine-0").add(segment.tokens, segment.logprobs, str(made.text))
    tokens, logprobs = column_files(columns.absolute()).lazy(((place, 0, place.tokens),))
    assert tokens.text is not None
    there = Segment("model", tokens, logprobs, Runs.of(segment.versions))
    return replace(made, chains=(Chain(made.chains[0].prompt_tokens, (there,)),), text=tokens.text)


def damage(run: Path, made: Rollout) -> str:
    """The first byte of an answer that lies in files; its file."""
    tokens = made.segments[0].tokens
    assert isinstance(tokens, LazyColumn)
    place = tokens.stretches[0][0]
    path = run / FOLDER / place.file
    data = bytearray(path.read_bytes())
    data[place.offset] ^= 1
    path.write_bytes(data)
    return place.file


def rollout(group: int, index: int, reward: float | None, text: str = "", version: int = 0) -> Rollout:
    """With 3 + index tokens, whose log-probs say which token of which sample they are."""
    tokens = tuple(72 + i for i in range(3 + index))
    logprobs = tuple(-(i + 1) / 8 - index / 64 for i in range(len(tokens)))
    segment = Segment("model", tokens, logprobs, (version,) * len(tokens))
    score = Score.error(f"exit {group} in 'x{index}'") if reward is None else Score(reward, {"exact": reward})
    said = text or f"answer {group}.{index}"
    return Rollout.of(group, index, (1, 2), (segment,), "length" if index == 3 else "stop", said, score)
