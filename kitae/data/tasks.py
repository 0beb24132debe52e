"""Generated tasks: endless problems with a known answer and a dial for the difficulty.

A problem is a pure function of (seed, split, params, index), so a stream over a task needs no state. Whether a
question is held out depends on its text alone: no seed or parameter can move it from one split to the other. The
example turns are made with the same parameters as the question and are the same in every prompt of a run.
"""

import difflib
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Any, Literal

from kitae.data.instructions import draw_instructions
from kitae.data.picture_tasks import PICTURE_TASKS
from kitae.data.pictures import SHELF, as_data, image_part, name_of
from kitae.data.puzzle_tasks import draw_countdown, draw_knights_and_knaves
from kitae.errors import DataError
from kitae.types import Message

Split = Literal["train", "eval"]
Params = Mapping[str, Any]
Problem = tuple[tuple[Message, ...], str]
"""The messages, of which the last is the question, and the reference answer."""

HELD_OUT = 8
"""One question in so many belongs to the eval split."""

EXAMPLES_SEED = 91
"""Chosen by hand: by default no reversed list looks sorted, no sorted one reversed, and both signs are shown."""

MAX_DRAWS = 10_000
"""Draws after which a split counts as too small for one more problem."""


@dataclass(frozen=True, slots=True)
class Task:
    """One kind of problem: `TASKS["reverse"].problem(seed=0, split="train", params={"count": 4}, index=17)`.

    `draw` makes one question and its answer. `limits` holds, for each of the `defaults`, the smallest and the largest
    whole number, or the characters that a text may consist of.
    """

    name: str
    summary: str
    verifier: str
    defaults: Params
    limits: Mapping[str, tuple[int, int] | str]
    draw: Callable[[random.Random, Params], tuple[str, str]]

    def resolve(self, params: Params) -> Params:
        """The defaults with `params` on top, all within their limits."""
        for name, value in params.items():
            if name not in self.defaults:
                raise DataError(f"task {self.name!r} has no parameter {name!r}{_nearest(name, self.defaults)}")
            self._check(name, value)
        return {**self.defaults, **params}

    def make(self, rng: random.Random, params: Params) -> Problem:
        """One problem from either split; `params` are resolved."""
        shots = random.Random(f"{self.name}/examples/{EXAMPLES_SEED}")
        turns = [Message("system", "Answer only.")]
        for _ in range(params["examples"]):
            question, answer = self.ask(shots, params)
            turns += question, Message("assistant", answer)
        question, answer = self.ask(rng, params)
        return (*turns, question), answer

    def ask(self, rng: random.Random, params: Params) -> tuple[Message, str]:
        question, answer = self.draw(rng, params)
        return Message("user", question), answer

    def problem(
        self, seed: int, split: Split, params: Params, index: int, taken: AbstractSet[str] = frozenset()
    ) -> Problem:
        """Problem `index` of the split; its question is none of the examples and not in `taken`."""
        params = self.resolve(params)
        rng = random.Random(f"{self.name}/{split}/{seed}/{index}")
        for _ in range(MAX_DRAWS):
            messages, answer = self.make(rng, params)
            *shown, question = map(said, messages)
            if self.split_of(question) == split and question not in shown and question not in taken:
                return messages, answer
        few = f"only {len(taken)} different problems" if taken else "no problem"
        raise DataError(
            f"task {self.name!r} with {_spell(params)} has {few} for the {split} split in {MAX_DRAWS} draws; "
            "make the problems larger or ask for fewer"
        )

    def held_out(self, seed: int, params: Params, count: int) -> list[Problem]:
        """The first `count` problems of the eval split, all different; a longer list begins with the shorter one."""
        problems: list[Problem] = []
        taken: set[str] = set()
        for index in range(count):
            problems.append(self.problem(seed, "eval", params, index, taken))
            taken.add(said(problems[-1][0][-1]))
        return problems

    def split_of(self, question: str) -> Split:
        digest = hashlib.sha256(f"{self.name}\n{question}".encode()).digest()
        return "eval" if digest[0] % HELD_OUT == 0 else "train"

    def _check(self, name: str, value: object) -> None:
        limit, default = self.limits[name], self.defaults[name]
        nearest: object = default
        if isinstance(limit, str):
            rule = f"text made of {' '.join(limit)}"
            valid = isinstance(value, str) and value != "" and set(value) <= set(limit)
            if isinstance(value, str):
                nearest = "".join(c for c in value if c in limit) or default
        else:
            low, high = limit
            rule = f"a whole number from {low} to {high}"
            valid = type(value) is int and low <= value <= high
            if type(value) is int:
                nearest = min(max(value, low), high)
        if not valid:
            raise DataError(f"{name} of task {self.name!r} must be {rule}, got {value!r}; nearest valid: {nearest!r}")


@dataclass(frozen=True, slots=True)
class PictureTask(Task):
    """A task whose questions show a picture, which `paint` draws beside question and answer."""

    paint: Callable[[random.Random, Params], tuple[str, str, bytes]] = lambda rng, params: ("", "", b"")

    def ask(self, rng: random.Random, params: Params) -> tuple[Message, str]:
        question, answer, content = self.paint(rng, params)
        part = image_part(name_of(SHELF.put(as_data(content))))
        return Message("user", parts=(part, {"type": "text", "text": question})), answer


def said(message: Message) -> str:
    """What makes a question this one and no other: its text, and the pictures that it shows."""
    return json.dumps([dict(part) for part in message.parts]) if message.parts else message.content


def find_task(name: str) -> Task:
    if name not in TASKS:
        raise DataError(f"no task {name!r}{_nearest(name, TASKS)}")
    return TASKS[name]


def _nearest(word: str, valid: Iterable[str]) -> str:
    names = list(valid)
    near = difflib.get_close_matches(word, names, 1)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(names)}"


def _spell(params: Params) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in params.items())


def _span(params: Params) -> range:
    low, high = params["low"], params["high"]
    if low > high:
        raise DataError(f"low must be at most high = {high}, got {low}; nearest valid: {high}")
    return range(low, high + 1)


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _reverse(rng: random.Random, params: Params) -> tuple[str, str]:
    numbers = rng.choices(_span(params), k=params["count"])
    return f"Reverse {_listed(numbers)}", _listed(reversed(numbers))


def _sort(rng: random.Random, params: Params) -> tuple[str, str]:
    span, count = _span(params), params["count"]
    if count > len(span):
        raise DataError(
            f"count must be at most the {len(span)} different numbers from {span[0]} to {span[-1]}, got {count}; "
            f"nearest valid: {len(span)}"
        )
    numbers = rng.sample(span, count)
    return f"Sort {_listed(numbers)}", _listed(sorted(numbers))


def _arithmetic(rng: random.Random, params: Params) -> tuple[str, str]:
    digits = params["digits"]
    low, high = 10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1
    text, summands = "", list[int]()
    for position in range(params["terms"]):
        number = rng.randint(low, high)
        operator = rng.choice(params["ops"]) if position else ""
        text += f" {operator} {number}" if operator else str(number)
        if operator == "*":
            summands[-1] *= number
        else:
            summands.append(-number if operator == "-" else number)
    return f"Compute {text}", str(sum(summands))


def _count(rng: random.Random, params: Params) -> tuple[str, str]:
    letters = rng.sample(ascii_lowercase, params["letters"])
    word = "".join(rng.choices(letters, k=params["length"]))
    letter = rng.choice(letters)
    return f"Count the letter {letter} in {word}", str(word.count(letter))


def _episode(rng: random.Random, params: Params) -> tuple[str, str]:
    seed = str(rng.randrange(params["seeds"]))
    return f"Episode {seed}", seed


_LIST_DEFAULTS = {"count": 3, "low": 10, "high": 99, "examples": 2}
_LIST_LIMITS = {"count": (1, 100), "low": (0, 10**9), "high": (0, 10**9), "examples": (0, 16)}

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("reverse", "Write numbers in reverse order.", "exact", _LIST_DEFAULTS, _LIST_LIMITS, _reverse),
        Task("sort", "Sort different numbers, smallest first.", "exact", _LIST_DEFAULTS, _LIST_LIMITS, _sort),
        Task(
            "arithmetic",
            "Add, subtract and multiply whole numbers; products come first.",
            "number",
            {"digits": 2, "terms": 2, "ops": "+-", "examples": 2},
            {"digits": (1, 18), "terms": (2, 32), "ops": "+-*", "examples": (0, 16)},
            _arithmetic,
        ),
        Task(
            "count",
            "Count how often a letter occurs in a random word.",
            "number",
            {"length": 6, "letters": 3, "examples": 2},
            {"length": (1, 200), "letters": (1, 26), "examples": (0, 16)},
            _count,
        ),
        Task(
            "knights-and-knaves",
            "Find out who tells the truth.",
            "knights_knaves",
            {"people": 3, "depth": 2, "examples": 0},
            {"people": (2, 10), "depth": (1, 3), "examples": (0, 16)},
            draw_knights_and_knaves,
        ),
        Task(
            "countdown",
            "Reach a target with given numbers.",
            "countdown",
            {"count": 3, "low": 2, "high": 50, "max_target": 500, "examples": 0},
            {"count": (2, 5), "low": (1, 1000), "high": (2, 1000), "max_target": (1, 10**6), "examples": (0, 16)},
            draw_countdown,
        ),
        Task(
            "instructions",
            "Write about a topic and follow verifiable instructions.",
            "instructions",
            {"constraints": 2, "examples": 0},
            {"constraints": (1, 5), "examples": (0, 0)},
            draw_instructions,
        ),
        Task(
            "episodes",
            "Seeds, one for each episode of a game.",
            "exact",
            {"seeds": 10**9, "examples": 0},
            {"seeds": (16, 10**9), "examples": (0, 0)},
            _episode,
        ),
        *(
            PictureTask(name, summary, "number", defaults, limits, _episode, paint)
            for name, (summary, defaults, limits, paint) in PICTURE_TASKS.items()
        ),
    )
}
"""All tasks by name; a task of your own is one more entry."""
