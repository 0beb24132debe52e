"""Kitae from Python: `from kitae import train, start, resume, evaluate, sample, load`. docs/api.md says what stays as
it is.

Each function works in a script, in a thread, and where an event loop is running already, as in a notebook: there the
work happens in a thread of its own. Whatever is wrong with what is asked for is a `KitaeError`, raised before a model
is loaded.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, overload

from kitae.config.locate import find_recipe, find_run
from kitae.config.recipe import model_settings, override_config, read_recipe
from kitae.config.root import RLConfig, Root, reinforcement
from kitae.engines.base import Constraint, SamplingParams
from kitae.errors import ConfigError
from kitae.evaluation.measure import Evaluation
from kitae.evaluation.run_suites import evaluate_on, evaluate_own
from kitae.evaluation.targets import asked_suites, is_model, suite_names, without_recipe
from kitae.models.load import trained_model, trained_settings
from kitae.observe.observer import Audience, Observer, Silent, audience_of
from kitae.observe.shown import Shown
from kitae.offline.answer_selection import Keep, Selection
from kitae.offline.loaded_model import Asked, LoadedModel
from kitae.offline.sampling import SampleOrder, SampleWatcher, Tally, check_output
from kitae.run import train_run
from kitae.run.plan import check_settings
from kitae.run.sample_run import sample_file, sample_groups
from kitae.scripting.carry_out import ended, outside_a_loop, refuse_in_workers, resume_with, train_order, work_on
from kitae.scripting.live_run import LiveRun
from kitae.scripting.run_order import Rewards, RunOrder, make_order
from kitae.store.run_folder import Result, is_run, read_config
from kitae.types import Group

Recipe = str | Path | Mapping[str, Any] | Root
"""The name of a shipped recipe, the path of one, its values as nested dicts, or settings that are resolved already."""

Rows = Iterable[Any]
"""Mappings from columns to values: a list, a generator, a data frame, a data set of the library `datasets`."""

_NONE: Mapping[str, Any] = MappingProxyType({})


def train(
    recipe: Recipe | Rows | None = None,
    *,
    model: str | Path | Result | Mapping[str, Any] | None = None,
    data: Rows | str | Path | Mapping[str, Any] | None = None,
    eval_data: Rows | str | Path | None = None,
    reward: Rewards | None = None,
    method: str | Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    observer: Observer | Audience | None = None,
    quiet: bool = False,
    **settings: Any,
) -> Result:
    """Train a new run to its end: `train(model="smollm2-135m", data=rows, reward=f, steps=50).after`, or by a recipe:
    `train("quickstart", steps=5)`.

    data: rows, which are kept in the run folder; or a file, a task, a data set on the hub; or the section. The prompt
    and its reference are found by the names of their columns. eval_data: the same, held out. reward: who judges an
    answer; docs/api.md says how functions are called. method: "sft", "dpo", … with rows of examples. settings: keys of
    training, sampling, model, algorithm, data and run (`lr=1e-5`), and other sections as mappings
    (`eval={"prompts": 16}`). overrides: as on the command line, `["training.steps=5"]`. observer: who is told what
    happens (`kitae.Observer`), in place of the screen; quiet: nobody. Raises `Interrupted` after Ctrl-C, when
    everything is saved: `resume(folder)` goes on.
    """
    order = _order(recipe, model, data, eval_data, reward, method, overrides, settings)
    audience = _audience(observer, quiet)
    return ended(outside_a_loop(lambda: train_order(order, audience)), order.functions)


def start(
    recipe: Recipe | Rows | None = None,
    *,
    model: str | Path | Result | Mapping[str, Any] | None = None,
    data: Rows | str | Path | Mapping[str, Any] | None = None,
    eval_data: Rows | str | Path | None = None,
    reward: Rewards | None = None,
    method: str | Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    observer: Observer | Audience | None = None,
    quiet: bool = False,
    **settings: Any,
) -> LiveRun:
    """Begin a run as `train` does, and take its steps one at a time:

    run = start(model="smollm2-135m", data=rows, reward=f)
    for step in run:                                  nothing is trained while the body works
        print(step.number, step.reward, run.model.generate("2 + 2 ="))
        if step.reward > 0.9:
            break                                     a clean stop, with a checkpoint
    run.result
    """
    order = _order(recipe, model, data, eval_data, reward, method, overrides, settings)
    return LiveRun(lambda hands, audience: train_order(order, audience, hands), _audience(observer, quiet), order)


def resume(
    run: str | Path | Result,
    *,
    reward: Rewards | None = None,
    overrides: Sequence[str] = (),
    checkpoint: str | None = None,
    forget: bool = False,
    observer: Observer | Audience | None = None,
    quiet: bool = False,
) -> Result:
    """Go on with a run that was stopped or killed, or beyond its end with `overrides=["training.steps=40"]`. A finished
    one is left as it is. reward: its reward functions again, where no file has them; they must be what they were."""
    folder, audience = find_run(run.folder if isinstance(run, Result) else Path(run)), _audience(observer, quiet)
    return resume_with(folder, reward, lambda: train_run.resume(folder, audience, overrides, checkpoint, forget))


def _order(
    recipe: Recipe | Rows | None,
    model: Any,
    data: Any,
    eval_data: Any,
    reward: Any,
    method: Any,
    overrides: Sequence[str],
    settings: Mapping[str, Any],
) -> RunOrder:
    refuse_in_workers()
    if isinstance(recipe, Iterable) and not isinstance(recipe, str | Mapping | Root):
        if data is not None:
            raise ConfigError(f"a recipe is a name, a path, nested dicts or settings, got {_short(recipe)}")
        recipe, data = None, recipe
    if recipe is None and data is None and model is None and not overrides and not settings:
        raise ConfigError("train needs a recipe, or a model, data and a reward, got none")
    given = {"model": model, "data": data, "eval_data": eval_data, "reward": reward, "method": method}
    if isinstance(recipe, Root) and not overrides and not settings and not any(v is not None for v in given.values()):
        return RunOrder(recipe, {})
    return make_order(_values(recipe), overrides=overrides, keywords=settings, **given)


def _audience(observer: Observer | Audience | None, quiet: bool) -> Audience:
    return audience_of(observer or Silent()) if quiet or observer is not None else Shown()


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:99]}…"


@overload
def evaluate(
    target: Recipe | Result,
    *,
    suites: None = None,
    data: Rows | str | Path | None = None,
    reward: Rewards | None = None,
    model: str | Path | None = None,
    overrides: Sequence[str] = (),
    **settings: Any,
) -> Evaluation: ...


@overload
def evaluate(
    target: Recipe | Result,
    *,
    suites: str | Sequence[str],
    data: str | Path | None = None,
    model: str | Path | None = None,
    overrides: Sequence[str] = (),
    **settings: Any,
) -> dict[str, Evaluation]: ...


def evaluate(
    target: Recipe | Result,
    *,
    suites: str | Sequence[str] | None = None,
    data: Rows | str | Path | None = None,
    reward: Rewards | None = None,
    model: str | Path | None = None,
    overrides: Sequence[str] = (),
    **settings: Any,
) -> Evaluation | dict[str, Evaluation]:
    """Measure a model on the held-out prompts of a recipe: `evaluate("runs/quickstart-001").avg`. Or on suites, which
    are found by their names then: `evaluate("smollm2-135m", suites=["gsm8k", "sort"])["sort"].avg`. Or on rows of your
    own: `evaluate("smollm2-135m", data=rows, reward=f).avg`.

    target: a run (its trained model), a recipe (its untrained one), or with suites a model alone. model: another one in
    its place. suites: as `kitae suites` lists them, with all their problems unless `eval={"prompts": 64}` says how
    many; `own` is the task of the target. data: the folder that has their files, else they come from the hub; without
    suites, rows or a file of them, all of which are asked, and judged by `reward` or as the target judges.
    """
    if suites is None and data is not None:
        return _evaluate_rows(target, data, reward, model, overrides, settings)
    if reward is not None or not (data is None or isinstance(data, str | Path)):
        raise ConfigError("rows and reward are for an evaluation without suites, which have their own")
    names = suite_names(suites if suites is None or isinstance(suites, str) else ",".join(suites))
    alone = _model_alone(target)
    if alone is not None:
        path = str(model or alone)
        config = without_recipe(path, names, str(data) if data else None, overrides, settings, how="suites=[…]")
    else:
        config = reinforcement(of_target(target, model, overrides, settings), "evaluate")
    if config.eval.prompts == 0:
        raise ConfigError(
            "eval.prompts must be at least 1 for an evaluation, got 0, as where a file has nothing held out beside it "
            "(data.eval_path)"
        )
    if alone is None:
        check_settings(config)
    if suites is None:
        return outside_a_loop(lambda: evaluate_own(config))
    limited = "prompts" in settings.get("eval", {}) or any(o.startswith("eval.prompts=") for o in overrides)
    asked = asked_suites(names, str(data) if data else None, config, own=alone is None, limited=limited)
    return outside_a_loop(lambda: evaluate_on(config, asked))


def _evaluate_rows(
    target: Recipe | Result,
    data: Rows | str | Path,
    reward: Rewards | None,
    model: str | Path | None,
    overrides: Sequence[str],
    settings: Mapping[str, Any],
) -> Evaluation:
    values = _target_values(target, model, alone=True)
    order = make_order(values, eval_data=data, reward=reward, overrides=overrides, keywords=settings)
    config = reinforcement(order.config, "evaluate")
    if "eval_path" in order.rows and "prompts" not in settings.get("eval", {}):
        order = replace(order, config=override_config(config, [f"eval.prompts={len(order.rows['eval_path'].lines)}"]))

    def work(config: RLConfig) -> Evaluation:
        check_settings(config)
        return evaluate_own(config)

    return work_on(order, work)


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
    data: Rows | str | Path | Mapping[str, Any] | None = None,
    reward: Rewards | None = None,
    model: str | Path | None = None,
    overrides: Sequence[str] = (),
    constraint: Constraint | None = None,
    **settings: Any,
) -> list[Group]:
    """n answers to each prompt, as one `Group` for each: `sample("quickstart", prompts=4, n=8)[0].rewards_G`.

    target: a recipe or a run. prompts: how many of its training prompts, whose answers are verified; or your own, as
    texts or messages, which nobody judges. data, reward: in place of the target's, as for `train`; the target may be a
    model alone then. constraint: what answers to prompts of your own must match, such as
    `kitae.Constraint.schema({"type": "object"})`. `sample_to_file` writes a file to train on.
    """
    values = _target_values(target, model, alone=data is not None)
    order = make_order(values, data=data, reward=reward, overrides=overrides, keywords=settings)
    config = reinforcement(order.config, "sample")
    if isinstance(prompts, str):  # a sequence too: of letters
        raise ConfigError(f"prompts must be a number or a list of prompts, got the text {prompts!r}")
    if isinstance(prompts, int):
        if constraint is not None:
            raise ConfigError("a constraint is for prompts of your own; the recipe's are asked as in training")
        SampleOrder(prompts, n, Selection("all"))  # refuses numbers that make no sense
        return work_on(order, lambda placed: sample_groups(placed, prompts, n))
    s = config.sampling
    params = SamplingParams(s.temperature, s.max_tokens, s.top_p, s.top_k, s.min_p, stop_strings=s.stop)
    params = replace(params, constraint=constraint)
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
    **settings: Any,
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


def load(model: str | Path | Result, *, engine: Mapping[str, Any] | None = None, **settings: Any) -> LoadedModel:
    """A model that answers: `with load("runs/quickstart-001") as model: model.generate("Reverse 1, 2, 3", n=4)`.

    model: a run, a folder, a hub id or a short name; settings: those of `[model]`, such as `device="cpu"`; engine:
    those of `[engine]`.
    """
    path = model.folder if isinstance(model, Result) else find_run(Path(model))
    config = model_settings(str(path), settings={"model": settings, "engine": dict(engine or {})})
    return LoadedModel(config.model, config.engine)


def as_config(recipe: Recipe, overrides: Sequence[str] = (), settings: Mapping[str, Any] = _NONE) -> Root:
    """The settings of a recipe, with others in place of some of them."""
    if isinstance(recipe, Root) and not overrides and not settings:
        return recipe
    return make_order(_values(recipe), overrides=overrides, keywords=settings).config


def of_target(
    target: Recipe | Result, model: str | Path | None, overrides: Sequence[str], settings: Mapping[str, Any]
) -> Root:
    """The settings of a recipe, or of a run with its trained model."""
    return make_order(_target_values(target, model), overrides=overrides, keywords=settings).config


def _values(recipe: Recipe | None) -> dict[str, Any]:
    if recipe is None:
        return {}
    if isinstance(recipe, Root):
        return recipe.given()
    if not isinstance(recipe, str | Path | Mapping):
        raise ConfigError(f"a recipe is a name, a path, nested dicts or settings, got {_short(recipe)}")
    return dict(recipe) if isinstance(recipe, Mapping) else read_recipe(find_recipe(str(recipe)))


def _target_values(target: Recipe | Result, model: str | Path | None, *, alone: bool = False) -> dict[str, Any]:
    """Of a recipe, of a run with its trained model, or of a model alone, whose data is yet to be given. alone: a run
    that learnt from examples stands for its model."""
    chosen: dict[str, Any] = {"path": str(model)} if model is not None else {}
    target = target.folder if isinstance(target, Result) else target
    if isinstance(target, str | Path) and is_run(folder := find_run(Path(target))):
        chosen = chosen or trained_settings(folder)
        target = read_config(folder)
        if alone and not isinstance(target, RLConfig):
            target = str(chosen["path"])
    if isinstance(target, str | Path) and is_model(str(target)):
        return {"model": {"path": str(target), **chosen}, "data": {"task": "reverse"}}
    values = _values(target)
    section = values.get("model", {})
    return {**values, "model": {**section, **chosen} if isinstance(section, Mapping) else section}
