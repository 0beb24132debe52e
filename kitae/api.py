"""Kitae from Python: `from kitae import train, resume, evaluate, sample, load`. docs/api.md says what stays as it is.

Each function works in a script, in a thread, and where an event loop is running already, as in a notebook: there the
work happens in a thread of its own. Whatever is wrong with what is asked for is a `KitaeError`, raised before a model
is loaded.
"""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, overload

from kitae.config.recipe import find_recipe, find_run, make_config, model_settings, read_recipe
from kitae.config.root import RLConfig, Root, reinforcement
from kitae.engines.base import SamplingParams
from kitae.errors import ConfigError, Interrupted
from kitae.evaluation.measure import Evaluation
from kitae.evaluation.run_suites import evaluate_on, evaluate_own
from kitae.evaluation.targets import asked_suites, is_model, suite_names, without_recipe
from kitae.models.load import trained_model
from kitae.observe.observer import Audience, Observer, audience_of
from kitae.offline.answer_selection import Keep, Selection
from kitae.offline.loaded_model import Asked, LoadedModel
from kitae.offline.sampling import SampleOrder, SampleWatcher, Tally, check_output
from kitae.run import train_run
from kitae.run.interrupts import stop_elsewhere
from kitae.run.plan import check_settings
from kitae.run.sample_run import sample_file, sample_groups
from kitae.store.run_folder import Result, is_run, read_config
from kitae.types import Group

T = TypeVar("T")

Recipe = str | Path | Mapping[str, Any] | Root
"""The name of a shipped recipe, the path of one, its values as nested dicts, or settings that are resolved already."""

Settings = Mapping[str, Any]
"""The keys of a section: `training={"steps": 20, "lr": 1e-5}`."""

_NO_SETTINGS: Settings = MappingProxyType({})


def train(
    recipe: Recipe,
    *,
    overrides: Sequence[str] = (),
    observer: Observer | Audience | None = None,
    **settings: Settings,
) -> Result:
    """Train a new run to its end: `train("quickstart", training={"steps": 5}).after`.

    overrides: as on the command line, `["training.steps=5"]`; settings: the same by section. observer: who is told what
    happens (`kitae.Observer`); nobody, unless given. Raises `Interrupted` after Ctrl-C, when everything is saved:
    `resume(folder)` goes on.
    """
    config = as_config(recipe, overrides, settings)
    audience = audience_of(observer)
    return _ended(outside_a_loop(lambda: train_run.train(config, audience)))


def resume(
    run: str | Path,
    *,
    overrides: Sequence[str] = (),
    checkpoint: str | None = None,
    forget: bool = False,
    observer: Observer | Audience | None = None,
) -> Result:
    """Go on with a run that was stopped or killed, or beyond its end with `overrides=["training.steps=40"]`. A finished
    one is left as it is."""
    folder, audience = find_run(Path(run)), audience_of(observer)
    return _ended(outside_a_loop(lambda: train_run.resume(folder, audience, overrides, checkpoint, forget)))


@overload
def evaluate(
    target: Recipe | Result,
    *,
    suites: None = None,
    data: str | Path | None = None,
    model: str | Path | None = None,
    overrides: Sequence[str] = (),
    **settings: Settings,
) -> Evaluation: ...


@overload
def evaluate(
    target: Recipe | Result,
    *,
    suites: str | Sequence[str],
    data: str | Path | None = None,
    model: str | Path | None = None,
    overrides: Sequence[str] = (),
    **settings: Settings,
) -> dict[str, Evaluation]: ...


def evaluate(
    target: Recipe | Result,
    *,
    suites: str | Sequence[str] | None = None,
    data: str | Path | None = None,
    model: str | Path | None = None,
    overrides: Sequence[str] = (),
    **settings: Settings,
) -> Evaluation | dict[str, Evaluation]:
    """Measure a model on the held-out prompts of a recipe: `evaluate("runs/quickstart-001").avg`. Or on suites, which
    are found by their names then: `evaluate("smollm2-135m", suites=["gsm8k", "sort"])["sort"].avg`.

    target: a run (its trained model), a recipe (its untrained one), or with suites a model alone. model: another one in
    its place. suites: as `kitae suites` lists them, with all their problems unless `eval={"prompts": 64}` says how
    many; `own` is the task of the target. data: the folder that has their files, else they come from the hub.
    """
    names = suite_names(suites if suites is None or isinstance(suites, str) else ",".join(suites))
    alone = _model_alone(target)
    if alone is not None:
        path = str(model or alone)
        config = without_recipe(path, names, str(data) if data else None, overrides, settings, how="suites=[…]")
    else:
        config = reinforcement(of_target(target, model, overrides, settings), "evaluate")
    if config.eval.prompts == 0:
        raise ConfigError("eval.prompts must be at least 1 for an evaluation, got 0")
    if alone is None:
        check_settings(config)
    if suites is None:
        return outside_a_loop(lambda: evaluate_own(config))
    limited = "prompts" in settings.get("eval", {}) or any(o.startswith("eval.prompts=") for o in overrides)
    asked = asked_suites(names, str(data) if data else None, config, own=alone is None, limited=limited)
    return outside_a_loop(lambda: evaluate_on(config, asked))


def _model_alone(target: Recipe | Result) -> str | None:
    """The model, where the target has no task: because it is one, or a run that learnt from examples."""
    found = target.folder if isinstance(target, Result) else target
    if not isinstance(found, str | Path):
        return None
    if is_run(folder := find_run(Path(found))):
        return None if isinstance(read_config(folder), RLConfig) else str(trained_model(folder))
    return str(found) if is_model(str(found)) else None


def sample(
    target: Recipe | Result,
    prompts: int | Sequence[Asked] = 8,
    n: int = 1,
    *,
    model: str | Path | None = None,
    overrides: Sequence[str] = (),
    **settings: Settings,
) -> list[Group]:
    """n answers to each prompt, as one `Group` for each: `sample("quickstart", prompts=4, n=8)[0].rewards_G`.

    target: a recipe or a run. prompts: how many of its training prompts, whose answers are verified; or your own, as
    texts or messages, which nobody judges. `sample_to_file` writes a file to train on.
    """
    config = reinforcement(of_target(target, model, overrides, settings), "sample")
    if isinstance(prompts, str):  # a sequence too: of letters
        raise ConfigError(f"prompts must be a number or a list of prompts, got the text {prompts!r}")
    if isinstance(prompts, int):
        SampleOrder(prompts, n, Selection("all"))  # refuses numbers that make no sense
        return outside_a_loop(lambda: sample_groups(config, prompts, n))
    s = config.sampling
    params = SamplingParams(s.temperature, s.max_tokens, stop_strings=s.stop)
    with LoadedModel(config.model, config.engine, config.run.seed) as loaded:
        return loaded.sample(prompts, n, params, seed=config.run.seed)


def sample_to_file(
    target: Recipe | Result,
    output: str | Path,
    *,
    keep: Keep | Selection = "correct",
    prompts: int | None = None,
    n: int | None = None,
    first: int = 0,
    model: str | Path | None = None,
    overrides: Sequence[str] = (),
    watcher: SampleWatcher | None = None,
    **settings: Settings,
) -> Tally:
    """Sample, verify, and write what is kept as a file that stages train on: `keep="pairs"` for preferences, say.

    keep: best, correct, all or pairs; or `kitae.Selection("pairs", min_margin=0.5)`, which says more. prompts: all of a
    file, unless given. n: the recipe's training.group_size, unless given. first: prompts to pass over. Call it again
    with the same arguments after it was killed, and it goes on.
    """
    config = reinforcement(of_target(target, model, overrides, settings), "sample")
    select = keep if isinstance(keep, Selection) else Selection(keep)
    check_output(Path(output))
    order = SampleOrder(prompts, config.training.group_size if n is None else n, select, first)
    return outside_a_loop(lambda: sample_file(config, order, Path(output), watcher))


def load(model: str | Path | Result, *, engine: Settings | None = None, **settings: Any) -> LoadedModel:
    """A model that answers: `with load("runs/quickstart-001") as model: model.generate("Reverse 1, 2, 3", n=4)`.

    model: a run, a folder, a hub id or a short name; settings: those of `[model]`, such as `device="cpu"`; engine:
    those of `[engine]`.
    """
    path = model.folder if isinstance(model, Result) else find_run(Path(model))
    config = model_settings(str(path), settings={"model": settings, "engine": dict(engine or {})})
    return LoadedModel(config.model, config.engine)


def as_config(recipe: Recipe, overrides: Sequence[str] = (), settings: Settings = _NO_SETTINGS) -> Root:
    """The settings of a recipe, with others in place of some of them."""
    if isinstance(recipe, Root):
        return make_config(recipe.given(), overrides, settings) if overrides or settings else recipe
    if not isinstance(recipe, str | Path | Mapping):
        raise ConfigError(f"a recipe is a name, a path, nested dicts or settings, got {recipe!r}")
    values = dict(recipe) if isinstance(recipe, Mapping) else read_recipe(find_recipe(str(recipe)))
    return make_config(values, overrides, settings)


def of_target(target: Recipe | Result, model: str | Path | None, overrides: Sequence[str], settings: Settings) -> Root:
    """The settings of a recipe, or of a run with its trained model."""
    chosen: dict[str, Any] = {"path": str(model)} if model is not None else {}
    if isinstance(target, Result):
        target = target.folder
    if isinstance(target, str | Path) and is_run(folder := find_run(Path(target))):
        chosen = chosen or {"path": str(trained_model(folder)), "lora_rank": 0}
        target = read_config(folder)
    return as_config(target, overrides, {**settings, "model": {**chosen, **settings.get("model", {})}})


def outside_a_loop(work: Callable[[], T]) -> T:
    """What `work` returns or raises. Where an event loop is running, it is called in another thread.

    Ctrl-C then stops a run at its next safe point, like elsewhere; a second one gives up waiting for that.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    done: Future[T] = Future()

    def call() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    with _stopping_by_signal():
        threading.Thread(target=call, name="kitae-run", daemon=True).start()
        return done.result()


@contextmanager
def _stopping_by_signal() -> Iterator[None]:
    """While the main thread waits for another: Ctrl-C stops what runs there; if nothing does, or again, it raises."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = False

    def interrupted(number: int, frame: object) -> None:
        nonlocal asked
        if asked or not stop_elsewhere(number):
            raise KeyboardInterrupt
        asked = True

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _ended(result: Result) -> Result:
    if result.stopped_by is not None:
        raise Interrupted(
            f"stopped after step {result.step}; everything is saved. Go on with:\n    kitae resume {result.folder}",
            result.stopped_by,
        )
    return result
