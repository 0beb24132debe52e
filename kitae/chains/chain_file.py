"""A chain file into stages that can be run: what each is, where its model and its data come from.

    name = "raft"                  # of the chain's folder; default: the file's name
    rounds = 3                     # how often the stages are gone through; default: 1

    [evaluate]                     # what every model of the chain is measured by: a recipe with a verifier
    recipe = "quickstart"

    [[stage]]                      # samples and verifies answers
    name = "answers"
    recipe = "quickstart"
    sample = { keep = "correct", prompts = 64, n = 8 }     # model = "…": those of another model

    [[stage]]                      # trains, here on these answers
    name = "learn"
    method.kind = "sft"
    training = { lr = 1e-5, batch = 32 }

A stage has a recipe (a name or a path), settings of its own, or both. The first one has a model; each of the others
takes the model that was trained before it (reward models are passed over). One that samples may ask another model
instead. One that names no data takes the answers that were sampled before it.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kitae.config.locate import find_recipe
from kitae.config.recipe import make_config, read_recipe, with_settings
from kitae.config.root import RLConfig, Root, StageConfig, reinforcement
from kitae.data.examples import held_out_examples
from kitae.errors import ConfigError, KitaeError
from kitae.models.config import WHOLE, ModelConfig
from kitae.models.load import find_model
from kitae.offline.answer_selection import Selection
from kitae.offline.methods import shape_of
from kitae.offline.sampling import SampleOrder
from kitae.plugins import nearest
from kitae.run.plan import check

_TOP: dict[str, type] = {
    "name": str,
    "dir": str,
    "rounds": int,
    "keep_checkpoints": bool,
    "evaluate": dict,
    "stage": list,
}
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_ORDER = ("prompts", "n", "first")
_MODEL = "model"
_SELECTION = tuple(f.name for f in fields(Selection))

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChainStage:
    """One stage of one round: `ChainStage(4, round=2, name="learn", values={"method": {"kind": "sft"}, …})`.

    values: settings as they were given, without what comes from the stages before. order: what it samples, if it does
    not train; sampler: the model that it asks, if it is not the chain's own.
    """

    number: int
    round: int
    name: str
    values: Values
    order: SampleOrder | None = None
    sampler: str | None = None

    @property
    def label(self) -> str:
        return f"{self.number:02d}-{self.name}"

    @property
    def kind(self) -> str:
        """Of the run, or "sample"."""
        return "sample" if self.order is not None else str(self.values.get("method", {}).get("kind", "rl"))

    @property
    def trains(self) -> bool:
        """Whether its model is what the next stage takes. A reward model is none that could answer."""
        return self.kind not in ("sample", "reward")

    def given(self) -> Values:
        """What the user said, flat, to compare with what was said before: `{"training.lr": 1e-5, "sample.n": 8}`."""
        found = {f"{section}.{key}": value for section, keys in self.values.items() for key, value in keys.items()}
        found.pop("run.name", None)
        if self.order is not None:
            order = asdict(self.order)
            found |= {f"sample.{key}": value for key, value in {**order.pop("select"), **order}.items()}
        if self.sampler is not None:
            found[f"sample.{_MODEL}"] = self.sampler
        return found


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """`ChainPlan("raft", folder=Path("runs/raft"), stages=(…6 of them…))`. yardstick: settings of the evaluations.

    keep_checkpoints: of finished stages; else their trained model is all that is kept of their weights.
    """

    name: str
    folder: Path
    stages: tuple[ChainStage, ...]
    yardstick: Values | None = None
    keep_checkpoints: bool = False

    def run_folder(self, stage: ChainStage) -> Path:
        return self.folder / f"{stage.label}-001"

    def file(self, stage: ChainStage) -> Path:
        return self.folder / f"{stage.label}.jsonl"

    def model_before(self, stage: ChainStage) -> str | None:
        """The run whose model a stage takes; None: it takes that of the first stage."""
        trained = [s for s in self.stages if s.number < stage.number and s.trains]
        return str(self.run_folder(trained[-1])) if trained else None

    def sampled_before(self, stage: ChainStage) -> ChainStage | None:
        """The stage whose answers this one trains on; None: it has data of its own."""
        if stage.order is not None or _has_data(stage.values):
            return None
        return next((s for s in reversed(self.stages[: stage.number - 1]) if s.order is not None), None)

    @property
    def first_model(self) -> str:
        return str(self.stages[0].values.get("model", {}).get("path", ModelConfig().path))

    def named_models(self) -> list[tuple[ChainStage, str]]:
        """The models that the file names, and for which stage: they must be there before the first one starts."""
        samplers = [(stage, stage.sampler) for stage in self.stages if stage.sampler is not None and stage.round == 1]
        return [(self.stages[0], self.first_model), *samplers]

    def config(self, stage: ChainStage) -> Root:
        """The settings of a stage, with what comes from those before it."""
        before = stage.sampler or self.model_before(stage)
        links: Values = {"model": {"path": before, "adapter": ""} if before else {"path": self.first_model}}
        if stage.order is None:
            links["run"] = {"name": stage.label, "dir": str(self.folder)}
        if (sampled := self.sampled_before(stage)) is not None:
            links["data"] = {"path": str(self.file(sampled))}
        return make_config(stage.values, (), links)

    def evaluation(self, model: str) -> RLConfig:
        """What a model of the chain is measured by."""
        assert self.yardstick is not None
        given = make_config(self.yardstick, (), {"model": {**WHOLE, "path": model}})
        config = reinforcement(given, "the evaluation of a chain")
        if config.eval.prompts == 0:
            raise ConfigError("eval.prompts must be at least 1 for an evaluation, got 0")
        return config


def read_chain(path: Path, folder: Path | None = None, rounds: int | None = None) -> ChainPlan:
    """The chain that a file describes; folder, rounds: others than it says."""
    values = _read(path)
    problems = list(_problems(values))
    if problems:
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems))
    entries: Sequence[Values] = values["stage"]
    stages: list[ChainStage] = []
    for turn in range(rounds or values.get("rounds", 1)):
        for place, entry in enumerate(entries):
            with _about(problems, f"stage {place + 1}"):
                stages.append(_stage(entry, place, turn, len(entries)))
    yardstick = None
    if "evaluate" in values:
        with _about(problems, "[evaluate]"):
            yardstick = _with_recipe(values["evaluate"])
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(f"{path}: {problem}" for problem in problems)))
    name = values.get("name", path.stem)
    where = folder or Path(values.get("dir", "runs")) / name
    return ChainPlan(name, where, tuple(stages), yardstick, values.get("keep_checkpoints", False))


def check_chain(chain: ChainPlan) -> None:
    """Refuse whatever can be found wrong with any stage before the first one starts; all of it at once."""
    problems: list[str] = []
    for stage, model in chain.named_models():
        with _about(problems, f"stage {stage.label}"):
            find_model(model, download=False)
    for stage in chain.stages:
        if stage.round == 1:  # the others are these again
            with _about(problems, f"stage {stage.label}"):
                _check_stage(chain, stage)
    if chain.yardstick is not None:
        with _about(problems, "[evaluate]"):
            check(chain.evaluation(chain.first_model), model=False)
    if problems:
        raise ConfigError("\n".join(problems))


def _check_stage(chain: ChainPlan, stage: ChainStage) -> None:
    config = chain.config(stage)
    sampled = chain.sampled_before(stage)
    if stage.order is not None:
        check(reinforcement(config, "sample"), model=False)
    elif sampled is None:
        check(config, model=False)
    elif not isinstance(config, StageConfig):
        raise ConfigError(f"a stage of kind {config.method.kind!r} needs data of its own: prompts, not answers")
    else:
        assert sampled.order is not None
        keep, shape = sampled.order.select, shape_of(config)
        if not keep.serves(shape):
            raise ConfigError(
                f"method.kind = {config.method.kind!r} trains on a {shape} in each row, which the answers of "
                f"{sampled.label} with keep = {keep.keep!r} are not"
            )
        held_out_examples(config.data, config.run.seed, config.eval.examples, shape)


def _read(path: Path) -> Values:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigError(f"no chain file {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _problems(values: Values) -> Iterator[str]:
    """With the file as such."""
    for key, value in values.items():
        if key not in _TOP:
            yield f"unknown key {key!r}; valid are {', '.join(_TOP)}{nearest(key, _TOP)}"
        elif not isinstance(value, _TOP[key]):
            yield f"{key} must be {_KINDS[_TOP[key]]}, got {value!r}"
    if not isinstance(values.get("name", ""), str) or not _NAME.fullmatch(values.get("name", "chain")):
        yield f"name must be letters, digits, '.', '_' and '-', got {values['name']!r}"
    if isinstance(rounds := values.get("rounds", 1), bool) or (isinstance(rounds, int) and rounds < 1):
        yield f"rounds must be at least 1, got {rounds}"
    if not values.get("stage"):
        yield "a chain needs at least one [[stage]], got none"
    elif isinstance(values["stage"], list):
        yield from (f"a stage must be a table, got {s!r}" for s in values["stage"] if not isinstance(s, dict))


_KINDS = {str: "text", int: "a whole number", bool: "true or false", dict: "a table", list: "tables: [[stage]]"}


def _stage(entry: Values, place: int, turn: int, length: int) -> ChainStage:
    name = entry.get("name", f"stage-{place + 1}")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"name must be letters, digits, '.', '_' and '-', got {name!r}")
    if place and "path" in entry.get("model", {}):
        raise ConfigError(
            f"model.path is what the stages before have trained; only the first one names it, got "
            f"{entry['model']['path']!r}"
        )
    values = _with_recipe({key: value for key, value in entry.items() if key not in ("name", "sample")})
    number = turn * length + place + 1
    if "sample" not in entry:
        return ChainStage(number, turn + 1, name, values)
    return ChainStage(number, turn + 1, name, values, _order(entry["sample"], turn), _sampler(entry["sample"]))


def _with_recipe(entry: Values) -> Values:
    """The values of the recipe that it names, if it names one, with its own in place of some of them."""
    own = {key: value for key, value in entry.items() if key != "recipe"}
    if "recipe" not in entry:
        return with_settings({}, (), own)
    if not isinstance(entry["recipe"], str):
        raise ConfigError(f"recipe must be the name or path of one, got {entry['recipe']!r}")
    return with_settings(read_recipe(find_recipe(entry["recipe"])), (), own)


def _order(given: object, turn: int) -> SampleOrder:
    """Each round asks the prompts that follow those of the round before."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"sample must be a table such as {{ keep = 'correct', prompts = 64, n = 8 }}, got {given!r}")
    valid = (*_SELECTION, *_ORDER, _MODEL)
    if unknown := [key for key in given if key not in valid]:
        raise ConfigError(f"unknown key sample.{unknown[0]}; valid are {', '.join(valid)}{nearest(unknown[0], valid)}")
    if missing := [key for key in ("keep", "prompts", "n") if key not in given]:
        raise ConfigError(f"sample needs keep, prompts and n, got no {' and no '.join(missing)}")
    for key in _ORDER:
        if isinstance(given.get(key, 0), bool) or not isinstance(given.get(key, 0), int):
            raise ConfigError(f"sample.{key} must be a whole number, got {given[key]!r}")
    select = Selection(**{key: given[key] for key in _SELECTION if key in given})
    return SampleOrder(given["prompts"], given["n"], select, given.get("first", 0) + turn * given["prompts"])


def _sampler(given: Mapping[str, Any]) -> str | None:
    model = given.get(_MODEL)
    if _MODEL in given and (not isinstance(model, str) or not model):
        raise ConfigError(f"sample.{_MODEL} must be a folder, a run, a hub id or a short name, got {model!r}")
    return model


def _has_data(values: Values) -> bool:
    return any(values.get("data", {}).get(key) for key in ("task", "gym", "path", "hub", "mix"))


@contextmanager
def _about(problems: list[str], what: str) -> Iterator[None]:
    """Collects the complaints of what is tried inside."""
    try:
        yield
    except KitaeError as error:
        problems += _each(what, str(error).splitlines())


def _each(what: str, lines: Iterable[str]) -> list[str]:
    return [f"{what}: {line}" for line in lines]
