"""Let a model answer the problems of a suite, and turn the verdicts into numbers.

Samples vote by a canonical form of their answers, for verifiers that look for one final answer. Numbers are compared
as numbers ("18", "$18.00"), formulas as text, so 1/2 and 0.5 are different answers: a vote needs no proof of equality,
and may lose a little by that.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Any

import numpy as np

from kitae.envs.base import World
from kitae.envs.environment_registry import limits_of
from kitae.envs.episode_context import ResponseVerifier, Running
from kitae.envs.rollouts import Episodes
from kitae.errors import DataError, RequestError, root_cause
from kitae.evaluation.statistics import Interval, interval_of, is_binary, maj_at_k, pass_at_k
from kitae.evaluation.suites import Scoring, Suite
from kitae.rl.config import EvalConfig
from kitae.store.journal import Journal
from kitae.types import Group, Prompt, Rollout
from kitae.verifiers.final_answer import DEFAULT_ORDER, find_answers, parse_order
from kitae.verifiers.math.cleanup import text_key
from kitae.verifiers.plain_text import after_thought, final_number, only_number

OnGroup = Callable[[Group], None]


@dataclass(frozen=True, slots=True)
class Marks:
    """A model's results on a suite by one scoring.

    `avg`: the mean score of all samples. `passed[k]`: the estimated chance that at least one of k samples scores 1.
    `voted[k]`: the score of the answer that most of k samples give; empty if samples cannot vote. partial: whether some
    scores are neither 0 nor 1, so that their mean is no share of right answers. values: the mean score of each judged
    problem, by its position.
    """

    label: str
    avg: Interval
    passed: Mapping[int, Interval]
    voted: Mapping[int, Interval]
    partial: bool
    values: Mapping[int, float]

    def row(self) -> dict[str, float]:
        found = {"avg": self.avg}
        found |= {f"pass@{k}": estimate for k, estimate in self.passed.items()}
        found |= {f"maj@{k}": estimate for k, estimate in self.voted.items()}
        return {
            f"{key}{end}": number
            for key, estimate in found.items()
            for end, number in (("", estimate.mean), ("_low", estimate.low), ("_high", estimate.high))
        }


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One model on one suite. The first of `marks` is the suite's main score.

    length: mean tokens of an answer. truncated: share of answers that were cut off. errors: answers that could not be
    judged; they are left out of the marks.
    """

    prompts: int
    samples: int
    marks: tuple[Marks, ...]
    length: float
    truncated: float
    errors: int
    groups: tuple[Group, ...]

    @property
    def avg(self) -> Interval:
        return self.marks[0].avg

    @property
    def passed(self) -> Mapping[int, Interval]:
        return self.marks[0].passed

    @property
    def judged(self) -> int:
        """How many problems have at least one verdict."""
        return len(self.marks[0].values)

    def row(self) -> dict[str, float]:
        """The numbers as one flat row for the metrics file; those of further scorings are named like `last/avg`."""
        numbers = self.marks[0].row()
        for marks in self.marks[1:]:
            numbers |= {f"{marks.label}/{key}": value for key, value in marks.row().items()}
        return numbers | {
            "partial": self.marks[0].partial,
            "prompts": self.prompts,
            "samples": self.samples,
            "length": self.length,
            "truncated": self.truncated,
            "errors": self.errors,
        }


def suite_episodes(
    episodes: Episodes, suite: Suite, pool: ResponseVerifier, world: World, settings: EvalConfig
) -> Episodes:
    """Episodes on a suite, derived from those of a run, with their own world, verifier, sampling and random streams."""
    sampling = replace(
        episodes.sampling,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        max_tokens=settings.max_tokens or suite.max_tokens,
        stop_strings=suite.stop,
    )
    limits = limits_of(suite.env, episodes.limits.context)
    return replace(
        episodes,
        verifier=pool,
        environment=world.make,
        sampling=sampling,
        label=suite.label,
        limits=limits,
        running=Running(),
        experts=False,
        trains=False,
    )


async def evaluate(
    runner: Episodes,
    prompts: Sequence[Prompt],
    samples: int,
    scorings: Sequence[Scoring] = (),
    journal: Journal | None = None,
    on_group: OnGroup | None = None,
) -> Evaluation:
    """Sample every prompt and score the answers. Answers that could not be judged are counted and left out.

    If the engine refuses a prompt (because it is longer than the context, say), all its answers count as such. Answers
    in the journal are not generated again. on_group: receives each problem's group when all its answers exist.
    """

    async def one(index: int, prompt: Prompt) -> Group:
        try:
            group = await runner.group(index, prompt, samples, journal)
        except (RequestError, DataError):
            group = Group(index, prompt, ())
        if on_group:
            on_group(group)
        return group

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(i, prompt)) for i, prompt in enumerate(prompts)]
    except BaseExceptionGroup as problem:
        raise root_cause(problem) from None
    return measure([task.result() for task in running], samples, scorings)


def measure(groups: Sequence[Group], samples: int, scorings: Sequence[Scoring] = ()) -> Evaluation:
    """The numbers of judged answers. scorings: those of the suite; without any, samples do not vote."""
    rollouts = [r for g in groups for r in g.rollouts]
    first, *others = scorings or (Scoring("score", ""),)
    return Evaluation(
        prompts=len(groups),
        samples=samples,
        marks=(
            _marks(groups, samples, first, lambda r: r.score.value if r.score else 0.0),
            *(_marks(groups, samples, other, _component(other.label)) for other in others),
        ),
        length=float(np.mean([r.response_length for r in rollouts])) if rollouts else 0.0,
        truncated=float(np.mean([r.finish == "length" for r in rollouts])) if rollouts else 0.0,
        errors=len(groups) * samples - sum(len(g.valid) for g in groups),
        groups=tuple(groups),
    )


def _component(label: str) -> Callable[[Rollout], float]:
    return lambda rollout: rollout.score.components[label] if rollout.score else 0.0


def _marks(groups: Sequence[Group], samples: int, scoring: Scoring, score: Callable[[Rollout], float]) -> Marks:
    scores = {g.id: [score(r) for r in g.valid] for g in groups if g.valid}
    ks = sorted({1, *(2**i for i in range(1, 12) if 2**i <= samples), samples}) if samples > 1 else [1]
    enough = {k: [id for id, found in scores.items() if len(found) >= k] for k in ks}
    passed = {k: [pass_at_k(len(scores[i]), sum(s >= 1 for s in scores[i]), k) for i in enough[k]] for k in ks}
    voted: dict[int, list[float]] = {}
    if samples > 1 and (vote := find_vote(scoring.verifier, scoring.params)) is not None:
        answers = {g.id: [vote(str(r.text)) for r in g.valid] for g in groups}
        voted = {k: [maj_at_k(answers[i], scores[i], k) for i in enough[k]] for k in ks if k > 1}
    everything = np.array([s for found in scores.values() for s in found], dtype=np.float32)
    values = {id: float(np.mean(found)) for id, found in scores.items()}
    return Marks(
        label=scoring.label,
        avg=interval_of(np.array(list(values.values()), dtype=np.float32)),
        passed={k: interval_of(np.array(chances, dtype=np.float32)) for k, chances in passed.items()},
        voted={k: interval_of(np.array(found, dtype=np.float32)) for k, found in voted.items()},
        partial=not is_binary(everything),
        values=values,
    )


_LONGEST = 300  # characters; longer answers are never shared by two samples
_DIGITS = 300

Vote = Callable[[str], str | None]
"""Returns the answer of a response: `vote("So it is \\boxed{1,200}.")` → `"1200"`; None: it has none."""


def find_vote(verifier: str, params: Mapping[str, Any]) -> Vote | None:
    """How samples vote under a verifier; None if they cannot, as for programs, letters and instructions."""
    if verifier == "math":
        order = parse_order(params.get("extract", DEFAULT_ORDER), strict=bool(params.get("strict", False)))
        return partial(_of_math, order)
    if verifier == "number":
        return partial(_of_number, bool(params.get("strict", False)))
    return _of_text if verifier == "exact" else None


def _of_math(order: tuple[str, ...], response: str) -> str | None:
    answer = next(find_answers(response, order), None)
    if answer is None or len(answer) > _LONGEST:
        return None
    key = text_key(answer)
    try:
        return _plain(Decimal(key.replace("\\$", "").replace("$", "").replace(",", "")))
    except InvalidOperation:
        return key


def _of_number(strict: bool, response: str) -> str | None:
    found = only_number(response) if strict else final_number(response)
    return None if found is None else _plain(found)


def _of_text(response: str) -> str | None:
    return after_thought(response).strip()[:_LONGEST] or None


def _plain(number: Decimal) -> str:
    """`"1200"`, without superfluous zeros. Numbers that are far too large or small are left as they are."""
    if not number.is_finite() or abs(number.adjusted()) > _DIGITS:
        return str(number)
    return f"{number.normalize() + 0:f}"  # + 0: no -0
