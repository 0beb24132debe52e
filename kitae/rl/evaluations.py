"""The evaluations of a run: on the held-out prompts of its own task, and on other suites beside it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kitae.config.root import RLConfig
from kitae.envs.base import World
from kitae.envs.environment_registry import open_world
from kitae.envs.episode_context import ResponseVerifier
from kitae.envs.rollouts import Episodes
from kitae.evaluation.held_out import answers_of
from kitae.evaluation.measure import evaluate, suite_episodes
from kitae.evaluation.storage import how_asked
from kitae.evaluation.suites import Suite, own_suite
from kitae.observe.observer import Observer
from kitae.store.run_folder import Metrics
from kitae.types import Prompt


@dataclass(frozen=True, slots=True)
class RunEvaluations:
    """Evaluates once per step: a resumed run finds what is in the metrics already. Answers are kept in the run folder.

    An evaluation in which no answer could be judged is no result: a resumed run makes it again. pool, world, held_out:
    of the run's own task; suites: what is asked beside it.
    """

    config: RLConfig
    folder: Path
    metrics: Metrics
    observer: Observer
    episodes: Episodes
    pool: ResponseVerifier
    world: World
    held_out: Sequence[Prompt]
    suites: Sequence[tuple[Suite, Sequence[Prompt]]] = ()
    _failed: dict[tuple[int, str | None], dict[str, Any]] = field(default_factory=dict)  # of this process

    async def at(self, step: int) -> dict[str, Any]:
        """Evaluate the weights of this step. Returns the row of the run's own task; the metrics have it and those of
        the other suites."""
        own = await self._once(step, None, self.pool, self.world, own_suite(self.config), self.held_out)
        for suite, prompts in self.suites:
            if self.found(step, suite.name) is None:
                # Training has the memory of their workers in between.
                hidden = [self.folder, *self.config.data.files, *suite.data.files]
                async with suite.pool(self.observer.note) as pool, open_world(suite.env, hidden) as world:
                    await self._once(step, suite.name, pool, world, suite, prompts)
        return own

    def found(self, step: int, name: str | None = None) -> dict[str, Any] | None:
        """The row of an evaluation that was made. name: of a suite; None: the run's own task."""
        for row in self.metrics.rows("eval"):
            if (row["step"], row.get("suite")) == (step, name) and row["avg"] is not None:
                return row
        return self._failed.get((step, name))

    async def _once(
        self,
        step: int,
        name: str | None,
        pool: ResponseVerifier,
        world: World,
        suite: Suite,
        prompts: Sequence[Prompt],
    ) -> dict[str, Any]:
        if (known := self.found(step, name)) is not None:
            return known
        what = "held-out prompts" if name is None else f"prompts of {name}"
        self.observer.note(f"evaluating on {len(prompts)} {what}")
        e = self.config.eval
        asked = suite_episodes(self.episodes, suite, pool, world, e)
        answers = answers_of(self.folder, step, suite.name, name is None, how_asked(suite, e, self.config.run.seed))
        try:
            await answers.begin(prompts)
            found = await evaluate(asked, prompts, e.samples, suite.scorings, answers.journal)
        finally:
            answers.close()
        row: dict[str, Any] = {"kind": "eval", "step": step, **({"suite": name} if name else {}), **found.row()}
        self.metrics.append(row)
        self.observer.evaluated(row)
        if not found.judged:
            row |= {key: None for key, value in row.items() if value != value}  # as the metrics have it
            self._failed[step, name] = row
        return row
