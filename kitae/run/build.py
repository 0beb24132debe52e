"""From the settings of a run of any kind to something that can be started: the one place that knows every kind.

Everything that can go wrong is found here, before a run folder is made or touched.
"""

from collections.abc import Callable
from pathlib import Path

from kitae.config.recipe import override_config
from kitae.config.root import DistilConfig, DistilFileConfig, RewardConfig, RLConfig, Root, StageConfig, reinforcement
from kitae.errors import ConfigError
from kitae.observe.observer import Observer
from kitae.store.run_folder import Result, RunStore

Note = Callable[[str], None]

Start = Callable[[RunStore, Observer, str | None, bool], Result]
"""Trains: the run, who watches, a checkpoint to go on from, whether to forget what came after it."""


def prepare(config: Root, note: Note) -> tuple[Root, Start]:
    """The settings with what the data decides, and how to train by them."""
    from kitae.models.classifier import check_reward_start
    from kitae.models.load import check_model
    from kitae.observe.trackers import check_installed
    from kitae.store.run_folder import is_run

    check_installed(config.observe.trackers)
    if isinstance(config, StageConfig):
        folder = check_model(config.model, reward=isinstance(config, RewardConfig))
        if isinstance(config, RewardConfig):
            check_reward_start(config.model)
        config, start = _prepare_stage(config, note)
    else:
        start = _prepare_rl(reinforcement(config, "kitae train"), note)
        folder = check_model(config.model)
    _check_structure(config)
    if is_run(Path(config.model.path).expanduser()):
        note(f"{config.model.path} is a run: its trained model {folder} is taken")
    return config, start


def _prepare_rl(config: RLConfig, note: Note) -> Start:
    from kitae.run.prepare import prepare
    from kitae.run.rl_session import train

    sources = prepare(config, note)
    return lambda store, observer, checkpoint, forget: train(store, sources, observer, checkpoint, forget=forget)


def _prepare_stage(config: StageConfig, note: Note) -> tuple[StageConfig, Start]:
    from kitae.offline.example_batches import StageData
    from kitae.run.offline_session import train

    if isinstance(config, DistilFileConfig):
        from kitae.trainer.teacher.frozen_teacher import check_teacher

        check_teacher(config.model, config.method.teacher)
    note(f"reading {config.data.source}: every example is rendered and measured once")
    data = StageData(config)
    for text in data.notes:
        note(text)
    if not config.training.steps:
        config = override_config(config, [f"training.steps={data.steps(config.training.epochs)}"])
    return config, lambda store, observer, checkpoint, _: train(store, data, observer, checkpoint)


def check(config: Root) -> None:
    """What can be refused without loading a model: tasks, data files, verifiers and their options."""
    from kitae.models.load import find_model

    check_data(config)
    find_model(config.model.path, download=False)
    _check_structure(config)


def _check_structure(config: Root) -> None:
    """Whether the model has experts where a setting is about them, the layers that are to get adapters, and what the
    engine needs."""
    from kitae.engines.native.limits import check_engine
    from kitae.models.load import check_adapters, check_mixture

    check_adapters(config.model)
    if not isinstance(config, RLConfig):
        return
    check_engine(config.engine, config.model, here=config.cluster.backend == "none")
    if setting := config.algorithm.of_mixtures:
        check_mixture(config.model, setting)


def check_data(config: Root) -> None:
    """The same without the model, which may not be there yet."""
    if isinstance(config, StageConfig):
        from kitae.data.examples import held_out_examples
        from kitae.offline.example_batches import opened
        from kitae.offline.methods import shape_of

        opened(config)
        held_out_examples(config.data, config.run.seed, config.eval.examples, shape_of(config))
    else:
        check_rl(reinforcement(config, "kitae train"))


def check_rl(config: RLConfig) -> None:
    from kitae.algorithms.stages import resolve_stages
    from kitae.data.prompt_stream import open_stream
    from kitae.data.tasks import find_task
    from kitae.evaluation.suites import find_suites
    from kitae.models.load import find_model
    from kitae.verifiers.score_calls import check_params
    from kitae.verifiers.verifier_registry import resolve

    resolve_stages(config.algorithm.model_dump())
    if isinstance(config, DistilConfig) and config.method.teacher:
        find_model(config.method.teacher, download=False)
    if config.data.task is not None:
        find_task(config.data.task).resolve(config.data.params)
    if ":" not in config.verifier.name:  # a user's own file is loaded by a worker, never here
        check_params(resolve(config.verifier.name), config.verifier.params)
    elif not Path(config.verifier.name.rpartition(":")[0]).expanduser().is_file():
        raise ConfigError(
            f"verifier.name must be a known name or file.py:function, got {config.verifier.name!r}: no such file"
        )
    if config.data.path is not None:
        open_stream(config.data, config.run.seed)
    find_suites(config.eval.suites, config.eval.data, config)
