"""Settings of another trainer as a recipe, and what became of every key.

An importer is a table from the peer's keys to rules, and a function that makes choices of several keys together. Each
key that was given ends as one line of the report: mapped; near (mapped, with a difference that the line names); nothing
(it changes nothing that is learned here); refused (with what to do instead); or unknown. Where a key was not given and
the peer's default is not Kitae's, the recipe sets the peer's, and a line says both.
"""

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from kitae.algorithms.config import AlgorithmConfig
from kitae.config.root import ROOTS

Outcome = Literal["mapped", "default", "near", "nothing", "refused", "unknown"]
OUTCOMES: tuple[Outcome, ...] = ("mapped", "default", "near", "nothing", "refused", "unknown")


@dataclass(frozen=True, slots=True)
class To:
    """The same setting under another name: `To("training.lr", 1e-6)`.

    default: what the peer does where nobody says anything; None: nothing is set then. convert: its value as Kitae's;
    None leaves the setting alone.
    """

    path: str
    default: Any = None
    convert: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True, slots=True)
class Joint:
    """A key that the importer reads together with others: `Joint(8)` with the peer's default."""

    default: Any = None


@dataclass(frozen=True, slots=True)
class Nothing:
    """A key that changes nothing that is learned here: how fast, where, or what is printed."""

    why: str


@dataclass(frozen=True, slots=True)
class No:
    """A key that Kitae has nothing for; values in `unless` are those that ask for nothing."""

    why: str
    unless: tuple[Any, ...] = (None, False)


Rule = To | Joint | Nothing | No
Rules = Mapping[str, Rule]


@dataclass(frozen=True, slots=True)
class Unread:
    """A value that only running the script would give: `Unread("make_prompts()")`."""

    text: str


@dataclass(frozen=True, slots=True)
class KeyLine:
    """One key of the report: `KeyLine("beta", "0.04", "mapped", "algorithm.kl.coef = 0.04")`."""

    key: str
    value: str
    outcome: Outcome
    here: str


@dataclass(slots=True)
class Translation:
    """A recipe in the making: `Translation("TRL", RULES, {"beta": 0.04})`, then `simple()`, then choices by `set`.

    files: further files that the recipe needs, by name. kind: of run.
    """

    peer: str
    rules: Rules
    given: Mapping[str, Any]
    kind: str = "rl"
    files: dict[str, str] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    _sources: dict[str, str] = field(default_factory=dict)  # of each path, the key that it comes from
    _places: dict[str, list[str]] = field(default_factory=dict)  # of each key, what it has set
    _verdicts: dict[str, tuple[Outcome, str]] = field(default_factory=dict)
    _notes: list[str] = field(default_factory=list)

    def __getitem__(self, key: str) -> Any:
        """The value of a key: as it was given, or the peer's default."""
        if key in self.given:
            return self.given[key]
        rule = self.rules.get(key)
        return rule.default if isinstance(rule, To | Joint) else None

    def simple(self) -> None:
        """All keys that stand for one setting each."""
        for key, rule in self.rules.items():
            if isinstance(rule, To) and (key in self.given or rule.default is not None):
                value = self[key]
                if isinstance(value, Unread):
                    self.refuse(key, f"only running the script would tell it; set {rule.path}")
                elif (converted := rule.convert(value)) is not None:
                    self.set(rule.path, converted, of=key)

    def set(self, path: str, value: Any, *, of: str) -> None:
        """Put a setting into the recipe. of: the peer's key that it follows from."""
        if isinstance(value, Mapping) and path.startswith("algorithm."):
            for key, inner in value.items():
                self.set(f"{path}.{key}", inner, of=of)
            return
        self._sources[path] = of
        self._places.setdefault(of, []).append(path)
        place = self.recipe
        *tables, last = path.split(".")
        for table in tables:
            place = place.setdefault(table, {})
        place[last] = value

    def refuse(self, key: str, why: str) -> None:
        self._verdicts[key] = ("refused", why)

    def near(self, key: str, how: str) -> None:
        """Mapped, but not the same: `how` says what differs."""
        self._verdicts[key] = ("near", how)

    def idle(self, key: str, why: str) -> None:
        self._verdicts[key] = ("nothing", why)

    def note(self, text: str) -> None:
        self._notes.append(text)

    @property
    def notes(self) -> list[str]:
        return list(dict.fromkeys(self._notes))

    def lines(self) -> list[KeyLine]:
        """The report: all that was given in its order, then the defaults that the recipe spells out."""
        found = [self._line(key, value) for key, value in self.given.items()]
        silent = [key for key in (*self._places, *self._verdicts) if key not in self.given]
        for key in dict.fromkeys(silent):
            paths = [p for p in self._places.get(key, ()) if self._value(p) != usual(self.kind, p)]
            outcome, how = self._verdicts.get(key, ("default", ""))
            if not paths and not how:
                continue
            what = [f"{p} = {spelled(self._value(p))} (Kitae's: {spelled(usual(self.kind, p))})" for p in paths]
            default = f"{spelled(self[key])} is {self.peer}'s default" if key in self.rules else ""
            found.append(KeyLine(key, default, outcome, "; ".join([*what, *([how] if how else [])])))
        return sorted(found, key=lambda line: OUTCOMES.index(line.outcome))

    def _line(self, key: str, value: Any) -> KeyLine:
        shown, paths = spelled(value), self._places.get(key, [])
        here = ", ".join(f"{path} = {spelled(self._value(path))}" for path in paths)
        rule = self.rules.get(key)
        if key in self._verdicts:
            outcome, why = self._verdicts[key]
            return KeyLine(key, shown, outcome, f"{here}: {why}" if here else why)
        if rule is None:
            near = difflib.get_close_matches(key, self.rules, 1, 0.7)
            return KeyLine(
                key, shown, "unknown", f"did you mean {near[0]}?" if near else f"{self.peer} has no such key"
            )
        if isinstance(rule, Nothing):
            return KeyLine(key, shown, "nothing", rule.why)
        if isinstance(rule, No):
            asked = value not in rule.unless
            return KeyLine(key, shown, "refused" if asked else "nothing", rule.why if asked else "off here too")
        if isinstance(rule, To) and not here:
            here = f"{rule.path} = {spelled(usual(self.kind, rule.path))}"
        return KeyLine(key, shown, "mapped", here or "with the others")

    def _value(self, path: str) -> Any:
        place: Any = self.recipe
        for key in path.split("."):
            place = place[key]
        return place

    def toml(self) -> str:
        """The recipe; each setting with the key that it comes from, and all that could not be kept at the top."""
        lines = [f"# From {self.peer}, by kitae import. What follows a # is the key that a setting comes from."]
        for found in self.lines():
            if found.outcome in ("near", "refused", "unknown"):
                lines.append(f"# {found.outcome}: {found.key} = {found.value}: {found.here}")
        lines += [f"# {note}" for note in self.notes]
        for section in sorted(self.recipe, key=_place):
            lines += ["", f"[{section}]"]
            for key, value in self.recipe[section].items():
                sources = dict.fromkeys(
                    of for path, of in self._sources.items() if path == f"{section}.{key}" or
                    path.startswith(f"{section}.{key}.")
                )  # fmt: skip
                lines.append(f"{key} = {spelled(value)}  # {', '.join(sources)}")
        return "\n".join(line if len(line) < 2000 else f"{line[:2000]}…" for line in lines) + "\n"


_ORDER = ("run", "method", "model", "data", "env", "verifier", "sampling", "engine", "algorithm", "training")


def _place(section: str) -> tuple[int, str]:
    return (_ORDER.index(section) if section in _ORDER else len(_ORDER), section)


def usual(kind: str, path: str) -> Any:
    """Kitae's default of a setting; of the algorithm, that of the preset grpo. None where there is none."""
    known = _usual(kind)
    return known.get(path, known.get(f"{path}.name"))


@cache
def _usual(kind: str) -> Mapping[str, Any]:
    return {**dict(ROOTS[kind].usual()), **dict(AlgorithmConfig().leaves("algorithm."))}


def spelled(value: Any) -> str:
    """A value as TOML has it, on one line."""
    match value:
        case None:
            return "not set"
        case Unread(text):
            return " ".join(text.split())[:120]
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case Mapping():
            return "{ " + ", ".join(f"{_key(k)} = {spelled(v)}" for k, v in value.items()) + " }" if value else "{}"
        case list() | tuple():
            return "[" + ", ".join(map(spelled, value)) + "]"
        case _:
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(key: object) -> str:
    text = str(key)
    return text if text.replace("_", "").replace("-", "").isalnum() and text.isascii() else json.dumps(text)


def all_of(names: str, rule: Rule) -> dict[str, Rule]:
    """The same rule for several keys, by their names between spaces."""
    return dict.fromkeys(names.split(), rule)


def whole(value: float, what: str, translation: Translation, key: str, least: int = 1) -> int:
    """A count that must come out whole; what does not is rounded, and said."""
    rounded = max(least, round(value))
    if rounded != value:
        translation.near(key, f"{what} comes to {value:g}, rounded to {rounded}")
    return rounded


TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")


def trackers(value: Any) -> list[str] | None:
    """Those of a list that Kitae sends metrics to as well."""
    names: Iterable[Any] = [value] if isinstance(value, str) else value or ()
    found = [str(name) for name in names if name in TRACKERS]
    return found or None
