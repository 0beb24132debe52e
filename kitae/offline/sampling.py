"""Sample a recipe's prompts with a model, have the answers verified, and write what is kept into a file.

What was sampled is journalled beside the file, in `.NAME.partial`, before it is judged. A command that was killed goes
on from there when it is given again; the file itself appears when it is complete.
"""

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kitae.config.root import RLConfig
from kitae.data.prompt_stream import PromptStream
from kitae.engines.start_engine import EngineOrder, start_engine
from kitae.envs.base import World
from kitae.envs.episode_context import ResponseVerifier
from kitae.envs.rollouts import Episodes, episodes_of
from kitae.errors import (
    ConfigChangedError,
    ConfigError,
    DataError,
    RequestError,
    StoreError,
    VerifierError,
    root_cause,
)
from kitae.models.facts import ModelFacts
from kitae.models.load import load_policy
from kitae.offline.answer_selection import Row, Selection
from kitae.store.disk import write_whole
from kitae.store.journal import Journal
from kitae.store.run_folder import lock
from kitae.types import Group, Prompt

Note = Callable[[str], None]

_SETTINGS = ("model", "data", "env", "sampling")
_SINGLE = ("run.seed", "verifier.name", "verifier.params", "engine.weights_dtype", "engine.cache_dtype")
"""What decides which prompts are asked and how answers are sampled and judged: it must stay while a file is sampled."""


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """What is wanted: `SampleOrder(prompts=64, n=8, select=Selection("correct"))`.

    prompts: how many are asked; None: all of a file. first: how many of the recipe's stream are passed over. Ask for
    another part of it, or for more answers, and what is there already is used.
    """

    prompts: int | None
    n: int
    select: Selection
    first: int = 0

    def __post_init__(self) -> None:
        for name, least in (("prompts", 1), ("n", 1), ("first", 0)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")
        if self.select.keep == "pairs" and self.n < 2:
            raise ConfigError(f"n must be at least 2 for keep = 'pairs', got {self.n}")


@dataclass(slots=True)
class Tally:
    """What came of an order: `Tally(prompts=64, answers=512, errors=3, rows=60, …)`.

    impossible: prompts that the model cannot read, such as too long ones. errors: answers that could not be judged.
    truncated, empty: answers that were cut off, or say nothing. score: the mean of those that were judged.
    without: prompts of which nothing was kept. tokens: sampled.
    """

    prompts: int = 0
    answers: int = 0
    impossible: int = 0
    errors: int = 0
    truncated: int = 0
    empty: int = 0
    rows: int = 0
    without: int = 0
    tokens: int = 0
    score: float | None = None
    first_error: str = ""
    _sum: float = field(default=0.0, repr=False)

    def count(self, group: Group, rows: int) -> None:
        self.prompts += 1
        self.impossible += not group.rollouts
        self.answers += len(group.rollouts)
        self.errors += len(group.rollouts) - len(group.valid)
        self.truncated += sum(r.finish == "length" for r in group.rollouts)
        self.empty += sum(not str(r.text).strip() for r in group.rollouts)
        self.tokens += sum(r.response_length for r in group.rollouts)
        self.rows += rows
        self.without += not rows
        self._sum += float(group.rewards_G.sum())
        judged = self.answers - self.errors
        self.score = self._sum / judged if judged else None
        for r in group.rollouts:
            if not self.first_error and r.score is not None and not r.score.valid:
                self.first_error = r.score.detail

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if not key.startswith("_")}


class SampleWatcher:
    """Receives the progress of sampling; this one ignores it."""

    def note(self, text: str) -> None:
        pass

    def sampled(self, done: int, total: int) -> None:
        pass


async def sample_file(
    config: RLConfig,
    stream: PromptStream,
    order: SampleOrder,
    output: Path,
    verifier: ResponseVerifier,
    world: World,
    watcher: SampleWatcher,
) -> Tally:
    """Write the rows that the order asks for into `output`, which must not exist."""
    total = order.prompts
    assert total is not None, "who has the stream knows how many prompts it has"
    if stream.size is not None and total > stream.size:
        watcher.note(f"the data has {stream.size} prompts: asking for {total} repeats some of them")
    store = PartialFile(output, config)
    try:
        asked = ((position, stream.at(position)) for position in range(order.first, order.first + total))
        groups = await sample_groups(config, asked, total, order.n, verifier, world, watcher, store.journal)
        tally, rows = Tally(), list[Row]()
        for group in groups:
            kept = order.select.rows(group)
            rows += kept
            tally.count(group, len(kept))
        _check_errors(config, tally)
        store.finish(rows)
    finally:
        store.close()
    return tally


def check_output(output: Path) -> None:
    if output.exists() and not PartialFile.folder_of(output).exists():
        raise StoreError(f"{output} exists already; remove it, or name another file")
    if not output.parent.is_dir():
        raise StoreError(f"cannot write {output}: there is no folder {output.parent}")


async def sample_groups(
    config: RLConfig,
    prompts: Iterator[tuple[int, Prompt]],
    total: int,
    n: int,
    verifier: ResponseVerifier,
    world: World,
    watcher: SampleWatcher,
    journal: Journal | None = None,
) -> list[Group]:
    """n answers to each prompt, verified, in the order of the prompts. As many are under way as keep the engine full.

    prompts: with their positions in the stream, so many in `total`. journal: keeps what was sampled; None: nobody does.
    """
    found: dict[int, Group] = {}

    async def work(episodes: Episodes) -> None:
        for position, prompt in prompts:  # shared by all workers: each takes the next one
            try:
                found[position] = await episodes.group(position, prompt, n, journal)
            except (RequestError, DataError) as error:
                watcher.note(f"{prompt.id} cannot be asked: {error}")
                found[position] = Group(position, prompt, ())
            watcher.sampled(len(found), total)

    policy = load_policy(config.model, config.run.seed)
    engine = await start_engine(EngineOrder(config.model, config.engine, policy=policy))
    try:
        episodes = replace(
            episodes_of(config, engine, verifier, world, ModelFacts.of(policy)), label="sample", trains=False
        )
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(total, 1 + 2 * config.engine.max_batch // n)):
                tasks.create_task(work(episodes))
    except BaseExceptionGroup as problem:
        raise root_cause(problem) from None
    finally:
        await engine.close()
    return [found[position] for position in sorted(found)]


def _check_errors(config: RLConfig, tally: Tally) -> None:
    most = config.verifier.max_error_share
    if tally.answers and tally.errors > most * tally.answers:
        raise VerifierError(
            f"{tally.errors} of {tally.answers} answers could not be judged, more than verifier.max_error_share = "
            f"{most:g}; the first: {tally.first_error}. The same command judges them again"
        )


class PartialFile:
    """A file of rows while it is sampled: a journal, and the settings that it was begun with."""

    def __init__(self, output: Path, config: RLConfig) -> None:
        self._output = output
        self._folder = self.folder_of(output)
        self._done = self._folder.with_suffix(".done")
        shutil.rmtree(self._done, ignore_errors=True)
        try:
            self._folder.mkdir(exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot write beside {output}: {error}") from error
        self._lock = lock(self._folder)
        try:
            self._same_settings(_deciding(config))
            self.journal = Journal(self._folder / "journal.sqlite")
        except BaseException:
            self._lock.close()
            raise

    @staticmethod
    def folder_of(output: Path) -> Path:
        return output.with_name(f".{output.name}.partial")

    def _same_settings(self, now: dict[str, Any]) -> None:
        path = self._folder / "settings.json"
        if not path.exists():
            write_whole(path, json.dumps(now))
            return
        before = json.loads(path.read_text())
        changed = [f"{key}: was {before.get(key)!r}, is {now.get(key)!r}" for key in now if before.get(key) != now[key]]
        if changed:
            raise ConfigChangedError(
                f"{self._output} was begun with other settings:\n  " + "\n  ".join(changed) + "\nGo on without the "
                f"change, name another file, or begin anew by removing {self._folder}"
            )

    def finish(self, rows: Sequence[Row]) -> None:
        write_whole(self._output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        self.close()
        self._folder.rename(self._done)  # at once: half a journal would have the rest sampled again
        shutil.rmtree(self._done)

    def close(self) -> None:
        self.journal.close()
        self._lock.close()


def _deciding(config: RLConfig) -> dict[str, Any]:
    return {k: v for k, v in config.flat().items() if k.partition(".")[0] in _SETTINGS or k in _SINGLE}
