"""What comes before a model loads, and what episodes are made of: data, verifier, sampling."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from itertools import chain

from kitae.algorithms.functions import Functions
from kitae.algorithms.requirements import Trait
from kitae.config.root import DistilConfig, RLConfig
from kitae.data.chat import Chat
from kitae.data.fingerprint import fingerprint
from kitae.data.prompt_stream import PromptStream, eval_prompts, open_stream
from kitae.engines.base import Engine, SamplingParams
from kitae.envs.base import World
from kitae.envs.environment_registry import limits_of, open_world
from kitae.envs.episode_context import ResponseVerifier
from kitae.envs.rollouts import Episodes
from kitae.errors import ConfigError, VerifierError
from kitae.evaluation.suites import Suite, find_suites
from kitae.models.facts import ModelFacts
from kitae.models.load import load_tokenizer
from kitae.trainer.teacher.choose_teacher import served_teacher
from kitae.trainer.teacher.frozen_teacher import check_teacher
from kitae.types import Prompt
from kitae.verifiers.pool import VerifierPool, validate
from kitae.verifiers.remote_pool import HostedPool
from kitae.workers.base import Cluster

_GOLD_CHECKS = 16


@dataclass(frozen=True, slots=True)
class Sources:
    """What a run reads: its prompts, those held out, and those of suites that it is evaluated on beside them."""

    stream: PromptStream
    held_out: list[Prompt]
    suites: tuple[tuple[Suite, list[Prompt]], ...] = ()

    def fingerprint(self) -> str:
        """Of the rows of a file, and of what is held out of it. What is generated follows from the settings."""
        return fingerprint(chain(self.stream.all(), self.held_out if self.stream.size else ()))


def prepare(config: RLConfig, note: Callable[[str], None]) -> Sources:
    """Open data and environment, try the verifier on reference answers, load stages: all that can fail before a model
    loads."""
    functions = Functions(config.algorithm, config.sampling.max_tokens)  # finds a user's own, checks their signatures
    _check_teacher(config, functions.traits)
    a, stale = config.algorithm, config.pipeline.max_staleness
    if stale and a.correction == "none" and a.anchor != "behaviour":
        note(
            f"pipeline.max_staleness is {stale} and algorithm.correction is 'none': stale samples are trained on as if "
            "the policy had just sampled them"
        )
    held_out = eval_prompts(config.data, config.run.seed, config.eval.prompts) if config.eval.prompts else []
    sources = Sources(open_stream(config.data, config.run.seed), held_out, _open_suites(config))
    if sources.stream.skipped:
        note(sources.stream.skipped)

    async def try_out() -> None:
        async with open_world(config.env):
            pass
        async with make_pool(config, note, workers=1) as pool:
            if config.verifier.check_gold:
                await _check_gold(pool, [sources.stream.at(i) for i in range(_GOLD_CHECKS)], note)

        for suite, _ in sources.suites:
            async with suite.pool(note, workers=1):
                pass

    asyncio.run(try_out())
    return sources


def _open_suites(config: RLConfig) -> tuple[tuple[Suite, list[Prompt]], ...]:
    """The suites beside the run's own task, each with as many prompts as are held out of that."""
    e = config.eval
    if not e.prompts:
        return ()
    suites = [replace(suite, count=e.prompts) for suite in find_suites(e.suites, e.data, config)]
    return tuple((suite, suite.prompts(config.run.seed)) for suite in suites)


def _check_teacher(config: RLConfig, read: Trait) -> None:
    """A user's own stages say only now what they need. Then whether there is such a teacher, for this student."""
    if not isinstance(config, DistilConfig):
        if (Trait.TEACHER | Trait.DIVERGENCE) & read:
            raise ConfigError("a stage of the algorithm reads a teacher: it needs method.kind = 'distil', got 'rl'")
        return
    m = config.method
    if (Trait.DIVERGENCE in read) != (m.loss == "jsd") or not (Trait.TEACHER | Trait.DIVERGENCE) & read:
        reads = "the divergence from a teacher" if Trait.DIVERGENCE in read else "none of a teacher"
        reads = "log-probs of a teacher" if Trait.TEACHER in read and Trait.DIVERGENCE not in read else reads
        raise ConfigError(f"method.loss = {m.loss!r} must be what the stages read, got stages that read {reads}")
    if (served := served_teacher(config)) is not None:
        asyncio.run(served.check(load_tokenizer(config.model)[0]))
    else:
        check_teacher(config.model, m.teacher, m.teacher_device)


def make_pool(config: RLConfig, note: Callable[[str], None] | None = None, workers: int | None = None) -> VerifierPool:
    v = config.verifier
    return VerifierPool(v.name, v.params, workers or v.workers, v.timeout, note)


def place_pool(
    config: RLConfig, cluster: Cluster | None, note: Callable[[str], None]
) -> AbstractAsyncContextManager[VerifierPool | HostedPool]:
    """The verifier of a run: on `cluster.verifiers` posts of its cluster, or beside the controller."""
    if cluster is None or not config.cluster.verifiers:
        return make_pool(config, note)
    return HostedPool(config.verifier, cluster, config.cluster.verifiers, 10 * config.cluster.patience, note)


def make_episodes(
    config: RLConfig, engine: Engine, pool: ResponseVerifier, world: World, model: ModelFacts
) -> Episodes:
    chat = Chat(model.tokenizer, model.generation)
    sampling = SamplingParams(
        temperature=config.sampling.temperature,
        max_tokens=config.sampling.max_tokens,
        stop_tokens=chat.stop_tokens,
        stop_strings=config.sampling.stop,
    )
    limits = limits_of(config.env, model.max_context)
    experts = config.algorithm.routing == "engine"
    return Episodes(engine, chat, pool, world.make, sampling, config.run.seed, limits=limits, experts=experts)


async def _check_gold(pool: VerifierPool, prompts: list[Prompt], note: Callable[[str], None]) -> None:
    """The gold answers must score 1, and references must be readable: anything else would teach nonsense."""
    bad = await validate(pool, prompts)
    if not bad:
        return
    prompt, score = bad[0]
    verdict = f"{score.value:g} {score.detail}".strip() if score.valid else f"not judged: {score.detail}"
    message = (
        f"{len(bad)} of {len(prompts)} reference answers do not score 1 under this verifier; the first: "
        f"{prompt.id} with reference {str(prompt.reference)[:80]!r} → {verdict}"
    )
    if len(bad) == len(prompts):
        raise VerifierError(f"{message}. If references are no answers, set verifier.check_gold=false")
    note(message)
