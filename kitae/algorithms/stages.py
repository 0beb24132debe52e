"""The eight stages by name: the built-in choices of each, and any function in a file of the user's own.

A stage function takes a fixed list of arguments by position. Its keyword-only parameters are its settings: annotations
give type, limits and description, defaults give the usual values. From these signatures the tables of `[algorithm]` are
made, one model for each choice, so that a table has the settings of the chosen function and no others.
"""

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, cast

from pydantic import Field, PydanticUserError, TypeAdapter, ValidationError, create_model, model_validator
from pydantic_core import PydanticUndefined

from kitae.algorithms.advantages import ADVANTAGES, Whitening
from kitae.algorithms.aggregation import AGGREGATIONS
from kitae.algorithms.corrections import CORRECTIONS
from kitae.algorithms.filters import FILTERS
from kitae.algorithms.gates import GATES
from kitae.algorithms.ratios import RATIOS
from kitae.algorithms.regularisers import REGULARISERS
from kitae.algorithms.requirements import Trait, rule_of, traits_of
from kitae.algorithms.reward_shaping import SHAPINGS
from kitae.algorithms.turn_advantages import TURN_ADVANTAGES
from kitae.errors import ConfigError
from kitae.plugins import is_plugin, load_function, nearest
from kitae.section import Table, is_number

Function = Callable[..., Any]


class ChoiceConfig(Table):
    """The table of one stage: the name of its function, and beside it the settings of that function.

    A class that is written here has what holds for every function of the stage. `Stage.table` makes the model of a
    choice from it. A name of None says that nothing reads what the stage gives.
    """

    main: ClassVar[str] = "name"
    checks_keys: ClassVar[bool] = True
    chosen: ClassVar[str | None] = None  # the value of `name` that a made model is for

    name: str | None = None

    @classmethod
    def stage(cls) -> "Stage":
        return next(stage for stage in STAGES.values() if issubclass(cls, stage.base))

    @classmethod
    def known_keys(cls) -> list[str]:
        settings = (key for function in cls.stage().choices.values() for key in keyword_settings(function))
        return [*dict.fromkeys((*cls.model_fields, *settings))]

    @model_validator(mode="wrap")
    @classmethod
    def _as_chosen(cls, value: Any, handler: Any) -> Self:
        """Validate with the model of the choice."""
        value = cls.spelled(value)
        if cls.chosen is not None or not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
            return handler(value)  # type: ignore[no-any-return]
        stage = cls.stage()
        stage.check(value["name"])
        if problems := [*stage.unknown(value), *stage.missing(value)]:
            raise ValueError("\n".join(problems))
        return stage.table(value["name"]).model_validate(value)  # type: ignore[return-value]

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if self.chosen is not None:
            for problem in self.stage().contradictions(self.chosen, dict(self)):
                raise ValueError(problem)
        return self

    def setting(self, key: str) -> Any:
        """A setting of the chosen function; None where it has no such setting."""
        return getattr(self, key, None)


class ShapingConfig(ChoiceConfig):
    """S1: raw scores → rewards."""

    norm: Literal["none", "batch", "running"] | None = Field(
        "none", description="z-score of the rewards over the step, or over the run so far."
    )
    norm_ddof: Literal[0, 1] | None = Field(
        0, description="Of norm 'batch': 1: deviation of a sample, 0: of the whole."
    )
    norm_epsilon: float | None = Field(0.0, ge=0, description="Of norm 'batch': added to the deviation.")


class FilterConfig(ChoiceConfig):
    """S2: which samples are trained on; several filters are joined by +."""


class AdvantageConfig(ChoiceConfig):
    """S3: what a reward is compared with."""

    whiten: Whitening = Field(
        "none",
        description="Normalise over the step: by token, by sample, by sample without centring, or by the share of "
        "samples whose reward is not 0.",
    )
    whiten_epsilon: float | None = Field(0.0, ge=0, description="Added to the deviation that whiten divides by.")


class RatioConfig(ChoiceConfig):
    """S4: level of the importance ratio."""

    anchor: Literal["old", "behaviour", "interpolated"] | None = Field(
        "old",
        description="The ratio's denominator: π_old; μ, which sampled; or π_old estimated from μ and the age of the "
        "token, which saves a forward pass.",
    )


class GateConfig(ChoiceConfig):
    """S5: how the ratio is kept in bounds."""


class CorrectionConfig(ChoiceConfig):
    """S6: weight of each token for the gap between engine and trainer; several corrections are joined by +."""


class AggregationConfig(ChoiceConfig):
    """S7: how token losses are averaged."""


class KLConfig(ChoiceConfig):
    """S8: estimator of the KL term against the reference policy, or a penalty per token of your own."""

    coef: float = Field(0.0, ge=0, description="Weight of the KL term; 0: no term, no reference.")
    into: Literal["loss", "reward"] | None = Field("loss", description="Where the KL term goes.")
    target: float | None = Field(0.0, ge=0, description="KL per response that coef is steered to; 0: coef is fixed.")
    horizon: float | None = Field(10_000.0, gt=0, description="Responses over which coef may move by 20 %.")


@dataclass(frozen=True, slots=True)
class Stage:
    """One place of the pipeline and what may stand there.

    `Stage("gate", "S5", …, arguments=("ratio_N", "tokens"), returns="loss_N", choices=GATES, base=GateConfig)`;
    `combines`: several choices may be joined by "+".
    """

    key: str
    number: str
    purpose: str
    arguments: tuple[str, ...]
    returns: str
    choices: Mapping[str, Function]
    base: type[ChoiceConfig]
    combines: bool = False

    def names(self, value: str) -> list[str]:
        return [name.strip() for name in value.split("+")] if self.combines and not is_plugin(value) else [value]

    def check(self, value: str) -> None:
        """Refuse a name that is neither built in nor `file.py:function`; the file itself is not opened."""
        if is_plugin(value) and "+" in value and value.split("+")[0] in self.choices:
            raise ValueError(f"algorithm.{self.key}: a function of your own stands alone, got {value!r}")
        joined = ", several joined by +" if self.combines else ""
        for name in self.names(value):
            if name not in self.choices and not is_plugin(name):
                raise ValueError(
                    f"algorithm.{self.key} must be one of {', '.join(self.choices)}{joined}, or file.py:function, "
                    f"got {name!r}{nearest(name, self.choices)}"
                )

    def table(self, value: str) -> type[ChoiceConfig]:
        """The model of a choice. Settings of a user's own function are anything until its file is executed."""
        return _table(self.key, value)

    def traits(self, value: str | None) -> Trait:
        """What these choices declare; of a user's own function nothing is known before its file is executed."""
        found = Trait(0)
        for name in self.names(value) if value is not None else ():
            found |= traits_of(self.choices[name]) if name in self.choices else Trait(0)
        return found

    def unknown(self, given: Mapping[str, Any]) -> Iterator[str]:
        """A complaint for each setting that the chosen functions do not have."""
        name = given["name"]
        own = self.table(name)
        for key in given if not is_plugin(name) else ():
            if key not in own.model_fields:
                has = [k for k in own.model_fields if k not in self.base.model_fields]
                others = ", ".join(f"{n!r}" for n, f in self.choices.items() if key in keyword_settings(f))
                yield (
                    f"algorithm.{self.key}.{key} is set to {given[key]!r}, but {self.key} {name!r} has no such "
                    f"setting: it has {', '.join(has) or 'none'}"
                    + (f"; {key} belongs to {self.key} {others}" if others else nearest(key, own.model_fields))
                )

    def missing(self, given: Mapping[str, Any]) -> Iterator[str]:
        """A complaint for each setting without a default that is not given."""
        for key, info in self.table(given["name"]).model_fields.items():
            if info.is_required() and key not in given:
                yield (
                    f"algorithm.{self.key} {given['name']!r} needs the setting algorithm.{self.key}.{key}: "
                    f"{info.description}"
                )

    def contradictions(self, value: str, settings: Mapping[str, Any]) -> Iterator[str]:
        """What the rules of the chosen built-in functions refuse."""
        for name in self.names(value):
            if (function := self.choices.get(name)) is not None:
                yield from self._refusals(function, settings)

    def _refusals(self, function: Function, settings: Mapping[str, Any]) -> Iterator[str]:
        rule = rule_of(function)
        for complaint in rule(settings) if rule is not None else ():
            yield f"algorithm.{self.key}.{complaint}"

    def resolve(self, table: ChoiceConfig, max_tokens: int) -> dict[str, Function]:
        """The chosen functions by name, with their settings filled in. Executes a user's file.

        The setting "max_tokens" is the number that sampling has.
        """
        assert table.name is not None
        settings = {key: max_tokens if x == "max_tokens" else x for key, x in table}
        return {name: self._filled(name, settings) for name in self.names(table.name)}

    def _filled(self, name: str, settings: Mapping[str, Any]) -> Function:
        if name in self.choices:
            function = self.choices[name]
            return partial(function, **{key: settings[key] for key in keyword_settings(function)})
        what = f"{self.key} function"
        function = load_function(name, what, self.arguments, ConfigError)
        required = _required(function)
        if len(required) != len(self.arguments):
            raise ConfigError(
                f"{what} {name!r} must take ({', '.join(self.arguments)}) by position and everything else by keyword "
                f"(after a *), got {tuple(required)}"
            )
        own = {key: x for key, x in settings.items() if key not in self.base.model_fields}
        filled = self._of_ones_own(name, function, own)
        if problem := next(self._refusals(function, filled), None):
            raise ConfigError(problem)
        return partial(_guarded(function, what), **filled)

    def _of_ones_own(self, name: str, function: Function, given: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a user's function, checked against its signature."""
        known = keyword_settings(function)
        for key in known:
            if key in self.base.model_fields:
                raise ConfigError(
                    f"{self.key} {name!r} must not have a setting {key!r}: every table algorithm.{self.key} has "
                    f"{', '.join(self.base.model_fields)}"
                )
        for key, value in given.items():
            if key not in known:
                raise ConfigError(
                    f"algorithm.{self.key}.{key} is set to {value!r}, but {self.key} {name!r} has no such setting: it "
                    f"has {', '.join(known) or 'none'}{nearest(key, known)} (settings are the parameters after a *)"
                )
        filled = {
            key: _checked(f"algorithm.{self.key}.{key}", annotation_of(function, known[key]), value)
            for key, value in given.items()
        }
        for key, parameter in known.items():
            if key not in filled and parameter.default is parameter.empty:
                raise ConfigError(f"{self.key} {name!r} needs the setting {key!r}: give algorithm.{self.key}.{key}")
        return {key: filled.get(key, parameter.default) for key, parameter in known.items()}


_LIST = (
    Stage("shaping", "S1", "raw scores → rewards", ("step",), "rewards_B", SHAPINGS, ShapingConfig),
    Stage("filter", "S2", "which samples are trained on", ("scores_G",), "keep_G", FILTERS, FilterConfig, True),
    Stage("advantage", "S3", "what a reward is compared with", ("group",), "advantages_G",
          {**ADVANTAGES, **TURN_ADVANTAGES}, AdvantageConfig),
    Stage("ratio", "S4", "level of the importance ratio", ("log_ratio_N", "tokens"), "ratio_N", RATIOS, RatioConfig),
    Stage("gate", "S5", "how the ratio is kept in bounds", ("ratio_N", "tokens"), "loss_N", GATES, GateConfig),
    Stage("correction", "S6", "weight for the engine–trainer gap", ("tokens",), "weight_N", CORRECTIONS,
          CorrectionConfig, True),
    Stage("aggregation", "S7", "how token losses are averaged", ("lengths_B", "groups_B"), "weight_B", AGGREGATIONS,
          AggregationConfig),
    Stage("kl", "S8", "the regulariser, times kl.coef", ("tokens",), "penalty_N", REGULARISERS, KLConfig),
)  # fmt: skip
STAGES: Mapping[str, Stage] = {stage.key: stage for stage in _LIST}


@cache
def _table(key: str, value: str) -> type[ChoiceConfig]:
    stage = STAGES[key]
    name = f"{stage.base.__name__}[{value}]"
    if is_plugin(value):

        class Own(stage.base, extra="allow"):  # type: ignore[name-defined, misc, call-arg]
            chosen = value

        return Own
    fields: dict[str, Any] = {}
    for choice in stage.names(value):
        for setting, parameter in keyword_settings(stage.choices[choice]).items():
            default = PydanticUndefined if parameter.default is parameter.empty else parameter.default
            fields[setting] = (annotation_of(stage.choices[choice], parameter), default)
    made = cast("type[ChoiceConfig]", create_model(name, __base__=stage.base, __doc__=stage.base.__doc__, **fields))
    made.chosen = value
    return made


def keyword_settings(function: Function) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}


def annotation_of(function: Function, parameter: inspect.Parameter) -> Any:
    """The type of a setting, with its limits and description; Any where the signature does not say a type."""
    found = parameter.annotation
    if isinstance(found, str):  # with `from __future__ import annotations`
        try:
            found = eval(found, inspect.unwrap(function).__globals__)
        except Exception:  # a name that is there for type checkers alone
            return Any
    return Any if found is parameter.empty else found


def _checked(path: str, kind: Any, value: Any) -> Any:
    """The value of a user's own setting, as its annotation says it."""
    if isinstance(value, bool) and is_number(kind):
        raise ConfigError(f"{path} must be a number, got {value}")
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise ConfigError(f"{path}: {reason[0].lower()}{reason[1:]}, got {value!r}") from None
    except PydanticUserError:  # an annotation that is no type of a value
        return value


def _guarded(function: Function, what: str) -> Function:
    """A user's own function; an exception that it raises names the function and the line."""

    @wraps(function)
    def call(*data: Any, **settings: Any) -> Any:
        try:
            return function(*data, **settings)
        except Exception as problem:
            frame = traceback.extract_tb(problem.__traceback__)[-1]
            where = f"{Path(frame.filename).name}:{frame.lineno}"
            name = getattr(function, "__name__", "?")
            raise ConfigError(f"the {what} {name} raised {type(problem).__name__} at {where}: {problem}") from problem

    return call


def _required(function: Function) -> Sequence[str]:
    """Parameters that a call must fill by position."""
    parameters = inspect.signature(function).parameters.values()
    return [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
