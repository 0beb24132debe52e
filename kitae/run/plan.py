"""What is known of a run before anything of it starts: settings that were checked, and data that is open.

    plan = make_plan(config, note)      # opens the data, once: a run, a stage of a chain and a file of samples use it
    with RunServices(plan, note): …     # starts the verifier, tries it on reference answers, fetches the model

Both find what can be found wrong before a run folder is made, the cheapest first. `check` is for those who only ask: it
downloads nothing and starts no process.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from kitae.algorithms.functions import Functions
from kitae.algorithms.requirements import Trait
from kitae.config.recipe import override_config
from kitae.config.root import DistilConfig, DistilFileConfig, RewardConfig, RLConfig, Root, StageConfig, reinforcement
from kitae.data.data_files import fingerprint
from kitae.data.examples import held_out_examples
from kitae.data.prompt_stream import PromptStream, eval_prompts, open_stream
from kitae.engines.native.limits import check_engine
from kitae.errors import ConfigError, ModelError
from kitae.evaluation.suites import Suite, find_suites
from kitae.models.classifier import check_reward_start
from kitae.models.load import check_adapters, check_mixture, check_model, find_model, load_tokenizer
from kitae.observe.trackers import check_installed
from kitae.offline.example_batches import ExampleBatches, opened
from kitae.offline.methods import shape_of
from kitae.run.doubts import doubts, doubts_of_prompts, doubts_of_start
from kitae.store.run_folder import is_run
from kitae.trainer.start_trainer import served_teacher
from kitae.trainer.teacher.frozen_teacher import check_teacher
from kitae.types import Prompt
from kitae.verifiers.verifier_registry import check_named

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RLPlan:
    """A run of reinforcement learning: its prompts, those that are held out, and those of suites beside them."""

    config: RLConfig
    prompts: PromptStream
    held_out: list[Prompt]
    suites: tuple[tuple[Suite, list[Prompt]], ...] = ()

    def fingerprint(self) -> str:
        """Of the rows of a file, and of what is held out of it. What is generated follows from the settings."""
        return fingerprint(chain(self.prompts.all(), self.held_out if self.prompts.size else ()))


@dataclass(frozen=True, slots=True)
class OfflinePlan:
    """A run that trains on a file of examples. The settings have a number of steps, which may follow from the data."""

    config: StageConfig
    data: ExampleBatches

    def fingerprint(self) -> str:
        return self.data.fingerprint


Plan = RLPlan | OfflinePlan


def make_plan(config: Root, note: Note) -> Plan:
    """Check the settings and open the data. Raises what is wrong with them; `note` gets what is only worth saying."""
    check_installed(config.observe.trackers)
    check_settings(config)
    for text in doubts(config):
        note(f"warning: {text}")
    if isinstance(config, StageConfig):
        return _offline_plan(config, note)
    return _rl_plan(reinforcement(config, "kitae train"), note)


def check(config: Root, *, model: bool = True) -> None:
    """Refuse what can be found wrong without a download, a process, or a model in memory: for `--dry-run`, and for the
    stages of a chain before the first of them starts. model: False where the model does not exist yet."""
    check_settings(config, model=model)
    if isinstance(config, StageConfig):
        opened(config)
        held_out_examples(config.data, config.run.seed, config.eval.examples, shape_of(config))
    elif isinstance(config, RLConfig) and (config.data.path or config.data.task):
        open_stream(config.data, config.run.seed)


def check_settings(config: Root, *, model: bool = True) -> None:
    """Whether what the settings name exists and takes the parameters that they give it: algorithm, teacher, verifier,
    suites, and the model as far as it is on this machine."""
    if isinstance(config, RLConfig):
        Functions(config.algorithm, config.sampling.max_tokens)
        if isinstance(config, DistilConfig) and config.method.teacher.path:
            try:
                find_model(config.method.teacher.path, download=False)
            except ModelError as error:
                raise ModelError(f"method.teacher: {error}") from None
        check_named(config.verifier.name, config.verifier.params)
        find_suites(config.eval.suites, config.eval.data, config)
    if model:
        find_model(config.model.path, download=False)
        _check_structure(config)


def fetch_model(config: Root, note: Note) -> Path:
    """The folder of the model, which is downloaded if need be, after all checks that need no weights."""
    folder = check_model(config.model, reward=isinstance(config, RewardConfig), here=config.cluster.backend != "ray")
    if isinstance(config, RewardConfig):
        check_reward_start(config.model)
    _check_structure(config)
    if is_run(Path(config.model.path).expanduser()):
        note(f"{config.model.path} is a run: its trained model {folder} is taken")
    for text in doubts_of_start(config.model, folder):
        note(text)
    return folder


def _check_structure(config: Root) -> None:
    """Whether the model has experts where a setting is about them, the layers that are to get adapters, and what the
    engine needs. A model that is not here yet passes."""
    check_adapters(config.model)
    if not isinstance(config, RLConfig):
        return
    check_engine(config.engine, config.model, here=config.cluster.backend == "none")
    if setting := config.algorithm.of_mixtures:
        check_mixture(config.model, setting)


def _offline_plan(config: StageConfig, note: Note) -> OfflinePlan:
    """Examples are counted in tokens, so the model's tokenizer must be here first."""
    fetch_model(config, note)
    if isinstance(config, DistilFileConfig):
        check_teacher(config.model, config.method.teacher.path)
    note(f"reading {config.data.source}: every example is rendered and measured once")
    data = ExampleBatches(config)
    for text in data.notes:
        note(text)
    if not config.training.steps:
        config = override_config(config, [f"training.steps={data.steps(config.training.epochs)}"])
    return OfflinePlan(config, data)


def _rl_plan(config: RLConfig, note: Note) -> RLPlan:
    functions = Functions(config.algorithm, config.sampling.max_tokens)  # finds a user's own, checks their signatures
    _check_teacher(config, functions.traits)
    a, stale = config.algorithm, config.pipeline.max_staleness
    if stale and a.correction.name == "none" and a.ratio.anchor != "behaviour":
        note(
            f"pipeline.max_staleness is {stale} and algorithm.correction is 'none': stale samples are trained on as if "
            "the policy had just sampled them"
        )
    e, seed = config.eval, config.run.seed
    prompts = open_stream(config.data, seed)
    held_out = eval_prompts(config.data, seed, e.prompts) if e.prompts else []
    suites = find_suites(e.suites, e.data, config) if e.prompts else []
    counted = [replace(suite, count=e.prompts) for suite in suites]  # as many as are held out of the run's own task
    for text in (*filter(None, [prompts.skipped]), *doubts_of_prompts(config, prompts)):
        note(text)
    return RLPlan(config, prompts, held_out, tuple((suite, suite.prompts(seed)) for suite in counted))


def _check_teacher(config: RLConfig, read: Trait) -> None:
    """Whether the stages of the algorithm read a teacher, which a user's own say only when they are loaded; then
    whether there is such a teacher, and whether it fits this student."""
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
        check_teacher(config.model, m.teacher.path, m.teacher.device)
