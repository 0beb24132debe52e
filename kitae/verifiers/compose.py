r"""The `compose` verifier: several verifiers as one, with weights, gates and clipping.

    [verifier]
    name = "compose"

    [verifier.params]
    clip = [0.0, 1.0]
    parts = [
        { name = "tags", weight = 0.2, gate = 1.0, params = { names = "think answer" } },
        { name = "math", weight = 0.8, inside = "answer" },
        { name = "my_file.py:politeness", label = "polite", weight = 0.1 },
    ]

The value is the sum of weight times value, clipped. If the value of a part is below its `gate`, the sum ends: later
parts count 0 and are not run ("format first"). With `inside`, a part reads only the contents of the last tag of that
name, or an empty text if there is none. Every part logs its unweighted value under its label, and its components as
"label/component". An error of a part that ran is an error of the whole. A part that returns None does not apply to
that answer: it is left out of the sum and of the log, and where no part applies, the answer has no score. Parts run one
after the other in one worker, also those that wait for a server (`async def`). If one of them judges all answers to a
prompt together, the whole does, and that part gets those whose gates are open.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from kitae.errors import VerifierError
from kitae.plugins import is_plugin, nearest
from kitae.types import Score
from kitae.verifiers.base import ScoreFunction, TimeoutMeaning, Verifier
from kitae.verifiers.plain_text import inside_tag
from kitae.verifiers.score_calls import applied, check_params, judged, try_example

_KEYS = ("name", "label", "weight", "gate", "clip", "inside", "params")


@dataclass(frozen=True, slots=True)
class Part:
    """One entry of `parts`, checked: `Part(VERIFIERS["math"], "math", weight=0.8, …)`.

    `clip` bounds the value of this part before it is weighted and compared with its gate.
    """

    verifier: Verifier
    label: str
    weight: float
    gate: float | None
    clip: tuple[float, float] | None
    inside: str | None
    params: dict[str, Any]


Plan = tuple[tuple[Part, ...], tuple[float, float] | None]
"""The parts, and the bounds of their sum."""


class Composition:
    """The weighted sum of the parts; the module describes their form."""

    def __init__(self, find: Callable[[str], Verifier]) -> None:
        """`Composition(resolve)`; find: looks up the verifiers that parts name, which may be compositions too."""
        self._find = find
        self._read = lru_cache(maxsize=16)(self._read_parts)

    def __call__(
        self, response: str, reference: Any, context: Mapping[str, Any], *, parts: Any, clip: Any = None
    ) -> Score:
        try:
            planned, bounds = self.plan(parts, clip)
        except VerifierError as error:
            return Score.error(str(error))
        (score,) = _run(planned, bounds, [response], reference, [context])
        return score

    def prepare(self, params: Mapping[str, Any]) -> Verifier:
        """The composition as one verifier, after all checks that need no response.

        Raises `VerifierError` for unknown names, wrong params and senseless numbers, and if the example of a part is an
        error under its params: a missing library, a meaningless option. A check that is out of time counts as wrong
        only if that holds for every part.
        """
        planned, bounds = self.plan(params.get("parts"), params.get("clip"))
        for part in planned:
            if problem := try_example(part.verifier, part.params):
                raise VerifierError(f"part {part.label!r} of 'compose' {problem}")

        def score_one(response: str, reference: Any, context: Mapping[str, Any], **_: Any) -> Score:
            return _run(planned, bounds, [response], reference, [context])[0]

        def score_all(
            responses: Sequence[str], references: Sequence[Any], contexts: Sequence[Mapping[str, Any]], **_: Any
        ) -> list[Score]:
            return _run(planned, bounds, responses, references[0], contexts)

        meanings = {part.verifier.on_timeout for part in planned}
        on_timeout: TimeoutMeaning = "wrong" if meanings == {"wrong"} else "error"
        repeatable = all(part.verifier.repeatable for part in planned)
        together = any(part.verifier.grouped for part in planned)
        score: ScoreFunction = score_all if together else score_one
        return Verifier("compose", score, on_timeout, repeatable=repeatable, batched=together)

    def plan(self, parts: Any, clip: Any = None) -> Plan:
        """The checked parts and the bounds of the sum. Raises `VerifierError` for the first problem."""
        try:
            key = json.dumps([parts, clip])
        except (TypeError, ValueError) as error:
            raise VerifierError(f"parts of 'compose' must be plain values, got {parts!r}: {error}") from None
        return self._read(key)

    def _read_parts(self, key: str) -> Plan:
        entries, clip = json.loads(key)
        if not isinstance(entries, list) or not entries:
            raise VerifierError(f"parts of 'compose' must be a list of tables with a name, got {entries!r}")
        parts = tuple(self._part(entry, number) for number, entry in enumerate(entries, start=1))
        labels = [part.label for part in parts]
        if twice := {label for label in labels if labels.count(label) > 1}:
            raise VerifierError(f"labels of the parts of 'compose' must differ, got {min(twice)!r} twice; set label")
        if not any(part.weight for part in parts):
            raise VerifierError("at least one part of 'compose' must have a weight that is not 0, got none")
        return parts, _bounds(clip, "clip of 'compose'")

    def _part(self, entry: Any, number: int) -> Part:
        where = f"part {number} of 'compose'"
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise VerifierError(f"{where} must be a table with a name, got {entry!r}")
        where = f"part {number} ({entry['name']}) of 'compose'"
        for key in entry:
            if key not in _KEYS:
                raise VerifierError(f"{where} has no key {key!r}; it takes {', '.join(_KEYS)}{nearest(key, _KEYS)}")
        label, inside, params = entry.get("label", _short(entry["name"])), entry.get("inside"), entry.get("params", {})
        if not isinstance(label, str) or not label or "/" in label:
            raise VerifierError(f"label of {where} must be a text without '/', got {label!r}")
        if not (inside is None or (isinstance(inside, str) and inside)):
            raise VerifierError(f"inside of {where} must be the name of a tag, got {inside!r}")
        if not isinstance(params, dict):
            raise VerifierError(f"params of {where} must be a table, got {params!r}")
        weight = _number(entry.get("weight", 1.0), f"weight of {where}")
        gate = None if entry.get("gate") is None else _number(entry["gate"], f"gate of {where}")
        try:
            verifier = self._find(entry["name"])
            check_params(verifier, params)
            if verifier.score is self:
                self.plan(params.get("parts"), params.get("clip"))
            elif verifier.prepare is not None and (verifier := verifier.prepare(params)).companion is not None:
                raise VerifierError("a model that runs here cannot be a part; give it a server and base_url")
        except VerifierError as error:
            raise VerifierError(f"{where}: {error}") from None
        return Part(verifier, label, weight, gate, _bounds(entry.get("clip"), f"clip of {where}"), inside, params)


def _short(name: str) -> str:
    """`"rewards/mine.py:polite"` → `"polite"`."""
    return name.rpartition(":")[2] if is_plugin(name) else name


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise VerifierError(f"{what} must be a number, got {value!r}")
    return float(value)


def _bounds(value: Any, what: str) -> tuple[float, float] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise VerifierError(f"{what} must be a list of the lowest and the highest value, got {value!r}")
    low, high = (_number(bound, what) for bound in value)
    if low > high:
        raise VerifierError(f"{what} must begin with the lower value, got {value!r}")
    return low, high


@dataclass(slots=True)
class _Sum:
    """Of the parts that have judged one response. closed: the gate that ended it. problem: why there is no score."""

    value: float = 0.0
    components: dict[str, float] = field(default_factory=dict)
    details: list[str] = field(default_factory=list)
    applied: bool = False
    closed: str = ""
    problem: str = ""

    @property
    def is_open(self) -> bool:
        return not self.closed and not self.problem

    def add(self, part: Part, score: Score | None) -> None:
        if score is None:
            return
        if not score.valid:
            self.problem = f"part {part.label!r}: {score.detail}"
            return
        value = _clipped(score.value, part.clip)
        self.applied = True
        self.value += part.weight * value
        self.components[part.label] = value
        self.components |= {f"{part.label}/{name}": component for name, component in score.components.items()}
        if score.detail:
            self.details.append(f"{part.label}: {score.detail}")
        if part.gate is not None and value < part.gate:
            self.closed = part.label
            self.details.append(f"gate {part.label!r} is closed")

    def score(self, bounds: tuple[float, float] | None) -> Score:
        if self.problem:
            return Score.error(self.problem)
        if not self.applied:
            return judged(None)
        return Score(_clipped(self.value, bounds), self.components, detail="; ".join(self.details))


def _run(
    parts: tuple[Part, ...],
    bounds: tuple[float, float] | None,
    responses: Sequence[str],
    reference: Any,
    contexts: Sequence[Mapping[str, Any]],
) -> list[Score]:
    sums = [_Sum() for _ in responses]
    for part in parts:
        for each in sums:
            if each.closed:
                each.components[part.label] = 0.0
        chosen = [i for i, each in enumerate(sums) if each.is_open]
        if not chosen:
            continue
        texts = [responses[i] if part.inside is None else inside_tag(responses[i], part.inside) or "" for i in chosen]
        scores = applied(part.verifier, texts, reference, [contexts[i] for i in chosen], part.params)
        for i, score in zip(chosen, scores, strict=True):
            sums[i].add(part, score)
    return [each.score(bounds) for each in sums]


def _clipped(value: float, bounds: tuple[float, float] | None) -> float:
    return value if bounds is None else min(max(value, bounds[0]), bounds[1])
