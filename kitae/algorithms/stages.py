"""The eight stages by name: the built-in choices of each, and any function in a file of the user's own.

A stage function takes a fixed list of arguments by position. Its keyword-only parameters are settings: each is the name
of a key of `[algorithm]`, or of the table `algorithm.params` that belongs to the user's own functions. So the signature
of the chosen functions says which settings a run reads, and a setting that nothing reads can be refused.
"""

import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

from kitae.algorithms.advantages import ADVANTAGES
from kitae.algorithms.aggregation import AGGREGATIONS
from kitae.algorithms.corrections import CORRECTIONS
from kitae.algorithms.filters import FILTERS
from kitae.algorithms.gates import GATES
from kitae.algorithms.ratios import RATIOS
from kitae.algorithms.regularisers import REGULARISERS
from kitae.algorithms.requirements import Trait, traits_of
from kitae.algorithms.reward_shaping import SHAPINGS
from kitae.errors import ConfigError
from kitae.plugins import is_plugin, load_function, nearest

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Stage:
    """One place of the pipeline and what may stand there.

    `Stage("gate", "S5", …, arguments=("ratio_N", "tokens"), returns="loss_N", choices=GATES)`; `combines`: several
    choices may be joined by "+".
    """

    key: str
    number: str
    purpose: str
    arguments: tuple[str, ...]
    returns: str
    choices: Mapping[str, Function]
    combines: bool = False

    def names(self, value: str) -> list[str]:
        return [name.strip() for name in value.split("+")] if self.combines and not is_plugin(value) else [value]

    def check(self, value: str) -> None:
        """Refuse a name that is neither built in nor `file.py:function`; the file itself is not touched."""
        if is_plugin(value) and "+" in value and value.split("+")[0] in self.choices:
            raise ValueError(f"algorithm.{self.key}: a function of your own stands alone, got {value!r}")
        joined = ", several joined by +" if self.combines else ""
        for name in self.names(value):
            if name not in self.choices and not is_plugin(name):
                raise ValueError(
                    f"algorithm.{self.key} must be one of {', '.join(self.choices)}{joined}, or file.py:function, "
                    f"got {name!r}{nearest(name, self.choices)}"
                )

    def settings(self, value: str) -> set[str] | None:
        """The settings that these choices read; None: only a user's file would tell."""
        if any(is_plugin(name) for name in self.names(value)):
            return None
        return {key for name in self.names(value) for key in keyword_settings(self.choices[name])}

    def traits(self, value: str | None) -> Trait:
        """What these choices declare; of a user's own, nothing is known before its file is executed."""
        found = Trait(0)
        for name in self.names(value) if value is not None else ():
            found |= traits_of(self.choices[name]) if name in self.choices else Trait(0)
        return found

    def resolve(self, value: str, settings: Mapping[str, Any]) -> dict[str, Function]:
        """The chosen functions by name, with their settings filled in. Executes a user's file."""
        return {name: self._bind(name, settings) for name in self.names(value)}

    def _bind(self, name: str, settings: Mapping[str, Any]) -> Function:
        function = self.choices.get(name)
        if function is None:
            what = f"{self.key} function"
            function = load_function(name, what, self.arguments, ConfigError)
            required = _required(function)
            if len(required) != len(self.arguments):
                raise ConfigError(
                    f"{what} {name!r} must take ({', '.join(self.arguments)}) by position and everything else by "
                    f"keyword (after a *), got {tuple(required)}"
                )
            function = _guarded(function, what)
        filled: dict[str, Any] = {}
        for key, parameter in keyword_settings(function).items():
            if settings.get(key) is not None:
                filled[key] = settings[key]
                if isinstance(filled[key], bool) and parameter.annotation in (int, float, "int", "float"):
                    raise ConfigError(f"{self.key} {name!r}: {key} must be a number, got {filled[key]}")
            elif parameter.default is parameter.empty:
                raise ConfigError(
                    f"{self.key} {name!r} needs the setting {key!r}: give algorithm.{key} if that is a key, else "
                    f"algorithm.params.{key}"
                )
        return partial(function, **filled)


STAGES: Mapping[str, Stage] = {
    s.key: s
    for s in (
        Stage("shaping", "S1", "raw scores → rewards", ("step",), "rewards_B", SHAPINGS),
        Stage("filter", "S2", "which samples are trained on", ("scores_G",), "keep_G", FILTERS, combines=True),
        Stage("advantage", "S3", "what a reward is compared with", ("group",), "advantages_G", ADVANTAGES),
        Stage("ratio", "S4", "level of the importance ratio", ("log_ratio_N", "tokens"), "ratio_N", RATIOS),
        Stage("gate", "S5", "how the ratio is kept in bounds", ("ratio_N", "tokens"), "loss_N", GATES),
        Stage(
            "correction", "S6", "weight for the engine–trainer gap", ("tokens",), "weight_N", CORRECTIONS, combines=True
        ),
        Stage(
            "aggregation", "S7", "how token losses are averaged", ("lengths_B", "groups_B"), "weight_B", AGGREGATIONS
        ),
        Stage("kl", "S8", "the regulariser, times kl_coef", ("tokens",), "penalty_N", REGULARISERS),
    )
}


def resolve_stages(settings: Mapping[str, Any]) -> dict[str, dict[str, Function]]:
    """All functions of a resolved algorithm by stage and name, ready to call; `settings` are its keys with `params`."""
    params = settings.get("params") or {}
    known = {**settings, **params}
    stages = {
        key: stage.resolve(value, known) for key, stage in STAGES.items() if (value := settings.get(key)) is not None
    }
    taken = {name for functions in stages.values() for f in functions.values() for name in keyword_settings(f)}
    for name in params:
        if name in settings:
            raise ConfigError(f"algorithm.params.{name} must be given as algorithm.{name}: it is a key of its own")
        if name not in taken:
            raise ConfigError(
                f"algorithm.params.{name} is read by no function of this algorithm{nearest(name, taken)} "
                "(a setting is a keyword parameter after a *)"
            )
    return stages


def _guarded(function: Function, what: str) -> Function:
    """A user's own function: what it raises says where it came from."""

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


def keyword_settings(function: Function) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}


def _required(function: Function) -> list[str]:
    """Parameters that a call must fill by position."""
    parameters = inspect.signature(function).parameters.values()
    return [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
