"""Evaluate several models on several suites, with answers stored on disk, and compare the models.

entrants, suites = [Entrant("smollm2-135m", ModelConfig())], find_suites(["svamp"], "data", None)
report = evaluate_models(entrants, suites, EvaluationSettings(), Path("evaluations"))
"""

import asyncio
import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kitae.config.root import RLConfig
from kitae.data.chat import Chat
from kitae.engines.base import SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.envs.base import EpisodeLimits, SingleTurn, World
from kitae.envs.environment_registry import open_world
from kitae.envs.rollouts import Episodes
from kitae.errors import ConfigError, root_cause
from kitae.evaluation.measure import Evaluation, evaluate, measure, suite_episodes
from kitae.evaluation.statistics import Difference, compare
from kitae.evaluation.storage import Answers, fingerprint, how_asked
from kitae.evaluation.suites import Suite, own_suite
from kitae.models.config import ModelConfig
from kitae.models.load import check_model, load_policy, pick_device, pick_dtype
from kitae.rl.config import EvalConfig
from kitae.store.journal import Journal
from kitae.types import Group, Prompt
from kitae.verifiers.pool import VerifierPool


@dataclass(frozen=True, slots=True)
class Entrant:
    """A model and its name in tables: `Entrant("quickstart-001", ModelConfig(path="runs/…/model"))`."""

    name: str
    model: ModelConfig


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """How all models are queried: samples and sampling, the engine, and the seed of prompts and answers."""

    eval: EvalConfig = field(default_factory=EvalConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """One model compared with the first, by one scoring of one suite."""

    suite: str
    scoring: str
    first: str
    second: str
    difference: Difference

    def as_json(self) -> dict[str, Any]:
        d = self.difference
        numbers = {"difference": d.interval.mean, "low": d.interval.low, "high": d.interval.high, "p": d.p}
        return {
            "suite": self.suite,
            "scoring": self.scoring,
            "first": self.first,
            "second": self.second,
            "problems": d.problems,
            **{name: _finite(value) for name, value in numbers.items()},
            "test": d.test,
        }


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """The results: `report.evaluations["smollm2-135m", "svamp"].avg`.

    comparisons: of each model with the first one, on the problems that both were judged on.
    """

    models: tuple[str, ...]
    suites: tuple[str, ...]
    settings: EvaluationSettings
    evaluations: Mapping[tuple[str, str], Evaluation]
    comparisons: tuple[Comparison, ...]

    def as_json(self) -> dict[str, Any]:
        """The report as plain values; missing numbers are None."""
        e = self.settings.eval
        return {
            "models": list(self.models),
            "suites": list(self.suites),
            "settings": {
                **{name: getattr(e, name) for name in ("samples", "temperature", "top_p", "top_k", "min_p")},
                "seed": self.settings.seed,
            },
            "results": [
                {"model": model, "suite": suite, **{k: _finite(v) for k, v in found.row().items()}}
                for (model, suite), found in self.evaluations.items()
            ],
            "comparisons": [comparison.as_json() for comparison in self.comparisons],
        }


class EvaluationWatcher:
    """Receives the progress of an evaluation; subclasses override what they need."""

    def note(self, text: str) -> None:
        """A message that should stay on the screen."""

    def asked(self, model: str, suite: str, done: int, total: int) -> None:
        """`done` problems of a suite have all their answers."""

    def evaluated(self, model: str, suite: str, found: Evaluation) -> None:
        """A model has answered all problems of a suite."""


def evaluate_models(
    entrants: Sequence[Entrant],
    suites: Sequence[Suite],
    settings: EvaluationSettings,
    output: Path | None = None,
    watcher: EvaluationWatcher | None = None,
) -> EvaluationReport:
    """Give every model the same problems of every suite, and compare each model with the first.

    output: the folder that stores answers; answers that it has are not generated again. None: nothing is stored. Data,
    models and verifiers are checked before the first model is loaded. Each model is loaded once, or not at all if all
    its answers are stored.
    """
    return asyncio.run(_evaluate_models(entrants, suites, settings, output, watcher or EvaluationWatcher()))


def evaluate_own(config: RLConfig) -> Evaluation:
    """Evaluate the model of these settings on the held-out prompts of their own task. Nothing is stored."""
    (found,) = evaluate_on(config, [replace(own_suite(config), count=config.eval.prompts)]).values()
    return found


def evaluate_on(config: RLConfig, suites: Sequence[Suite]) -> dict[str, Evaluation]:
    """Evaluate the model of these settings on each suite. The results, by name. Nothing is stored."""
    entrant = Entrant(config.model.path, config.model)
    settings = EvaluationSettings(config.eval, config.engine, config.run.seed)
    found = evaluate_models([entrant], suites, settings).evaluations
    return {suite.name: found[entrant.name, suite.name] for suite in suites}


async def _evaluate_models(
    entrants: Sequence[Entrant],
    suites: Sequence[Suite],
    settings: EvaluationSettings,
    output: Path | None,
    watcher: EvaluationWatcher,
) -> EvaluationReport:
    _check(entrants, suites)
    folders = {entrant.name: check_model(entrant.model) for entrant in entrants}
    prompts = {suite.name: suite.prompts(settings.seed) for suite in suites}
    found: dict[tuple[str, str], Evaluation] = {}
    async with AsyncExitStack() as stack:

        async def paper(entrant: Entrant, suite: Suite) -> _Paper:
            if output is None:
                return _Paper(suite, prompts[suite.name], None, None)
            identity = _identity(entrant.model, folders[entrant.name], suite, settings)
            answers = Answers(output, entrant.name, suite.name, identity)
            stack.callback(answers.close)
            await answers.begin(prompts[suite.name])
            known = answers.complete(prompts[suite.name], settings.eval.samples)
            return _Paper(suite, prompts[suite.name], answers.journal, known)

        papers = {entrant.name: [await paper(entrant, suite) for suite in suites] for entrant in entrants}
        wanted = {p.suite.name: p.suite for each in papers.values() for p in each if p.known is None}
        pools = {name: await stack.enter_async_context(suite.pool(watcher.note)) for name, suite in wanted.items()}
        hidden = [*([output] if output else []), *(file for suite in suites for file in suite.data.files)]
        worlds = {name: await stack.enter_async_context(open_world(s.env, hidden)) for name, s in wanted.items()}
        for entrant in entrants:
            answered = await _ask(entrant, papers[entrant.name], pools, worlds, settings, watcher)
            for suite in suites:
                found[entrant.name, suite.name] = answered[suite.name]
                watcher.evaluated(entrant.name, suite.name, answered[suite.name])
    names = tuple(entrant.name for entrant in entrants)
    by_suite = {(name, suite.name): found[name, suite.name] for suite in suites for name in names}
    compared = _comparisons(names, suites, by_suite)
    return EvaluationReport(names, tuple(suite.name for suite in suites), settings, by_suite, compared)


@dataclass(frozen=True, slots=True)
class _Paper:
    """A suite for one model. known: its answers, if all are stored already."""

    suite: Suite
    prompts: list[Prompt]
    journal: Journal | None
    known: list[Group] | None


async def _ask(
    entrant: Entrant,
    papers: Sequence[_Paper],
    pools: Mapping[str, VerifierPool],
    worlds: Mapping[str, World],
    settings: EvaluationSettings,
    watcher: EvaluationWatcher,
) -> dict[str, Evaluation]:
    """Let a model answer all suites at once, so that the engine does not idle at the end of each suite."""
    samples = settings.eval.samples
    found = {p.suite.name: measure(p.known, samples, p.suite.scorings) for p in papers if p.known is not None}
    left = [paper for paper in papers if paper.known is None]
    if not left:
        return found
    watcher.note(f"loading {entrant.model.path}")
    policy = load_policy(entrant.model, settings.seed)
    engine = NativeEngine(policy, settings.engine)
    chat = Chat(policy.tokenizer, policy.base.generation_config)
    sampling = SamplingParams(stop_tokens=chat.stop_tokens)
    limits = EpisodeLimits(turns=1, context=policy.max_context)
    episodes = Episodes(engine, chat, None, SingleTurn, sampling, settings.seed, limits=limits)

    def counter(suite: str, total: int) -> Callable[[Group], None]:
        done = 0

        def count(group: Group) -> None:
            nonlocal done
            done += 1
            watcher.asked(entrant.name, suite, done, total)

        return count

    try:
        async with asyncio.TaskGroup() as tasks:
            running = {
                paper.suite.name: tasks.create_task(
                    evaluate(
                        suite_episodes(
                            episodes, paper.suite, pools[paper.suite.name], worlds[paper.suite.name], settings.eval
                        ),
                        paper.prompts,
                        samples,
                        paper.suite.scorings,
                        paper.journal,
                        counter(paper.suite.name, len(paper.prompts)),
                    )
                )
                for paper in left
            }
    except BaseExceptionGroup as problem:
        raise root_cause(problem) from None
    finally:
        await engine.close()
        del policy, engine, episodes
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return found | {name: task.result() for name, task in running.items()}


def _check(entrants: Sequence[Entrant], suites: Sequence[Suite]) -> None:
    if not entrants or not suites:
        raise ConfigError(
            f"an evaluation needs at least one model and one suite, got {len(entrants)} and {len(suites)}"
        )
    names = [entrant.name for entrant in entrants]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ConfigError(f"each model is asked once, got {twice[0]!r} twice")


def _identity(model: ModelConfig, folder: Path, suite: Suite, settings: EvaluationSettings) -> dict[str, Any]:
    """Everything that an answer and its verdict depend on."""
    return {
        "weights": fingerprint(folder),
        "dtype": str(pick_dtype(model.dtype, pick_device(model.device))).removeprefix("torch."),
        "exact": model.exact,
        **settings.engine.rounding,
        **how_asked(suite, settings.eval, settings.seed),
    }


def _comparisons(
    models: Sequence[str], suites: Sequence[Suite], found: Mapping[tuple[str, str], Evaluation]
) -> tuple[Comparison, ...]:
    first, *others = models
    made = []
    for suite in suites:
        for other in others:
            for a, b in zip(found[first, suite.name].marks, found[other, suite.name].marks, strict=True):
                both = sorted(a.values.keys() & b.values.keys())
                scores = (np.array([m.values[i] for i in both], dtype=np.float32) for m in (a, b))
                made.append(Comparison(suite.name, a.label, first, other, compare(*scores)))
    return tuple(made)


def _finite(value: float) -> float | None:
    return value if value == value else None
