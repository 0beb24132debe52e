"""GSM8K with large numbers: problems as easy to set up as before, and hard to compute without a tool.

    python examples/gsm8k_large.py gsm8k/train.jsonl large/train.jsonl
    python examples/gsm8k_large.py gsm8k/test.jsonl large/test.jsonl

GSM8K's solutions note each computation, `<<48/2=24>>`. So numbers of a question can be replaced and the answer computed
anew: "clips to 48 of her friends" becomes "clips to 24362 of her friends". A problem is left out unless that is safe:
every number in its computations must come from the question, from an earlier computation, or from a word such as "half"
or "dozen"; numbers that could be confused must differ; and whole, positive results must stay so. Of 7,473 problems to
train on 2,095 are left, of 1,319 to test on 342.

What is not seen: that nobody has 24362 friends.
"""

import json
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?|\.\d+")
COMPUTATION = re.compile(r"<<([^=<>]+)=([^=<>]+)>>")
PART_OF_WORD = re.compile(r"[\w.:/-]")
NO_COUNT = re.compile(r"\s?(%|percent)|[\w:/-]|\.\d")
WORDS = {
    1: ".", 2: "half|halv|twice|doubl|two|coupl|pair|both", 3: "third|three|tripl|thrice", 4: "quarter|four",
    5: "five|fifth", 6: "six", 7: "week|seven", 8: "eight", 9: "nine", 10: "ten", 12: "dozen|year|month|twelve",
    24: "day|hour", 30: "month", 52: "year|week", 60: "hour|minute", 100: "%|percent|cent", 365: "year",
}  # fmt: skip
"""Numbers that a solution may have from words of the question, and these words. They are never replaced."""

TRIES = 500
GROWTH = (200, 999)  # how many times larger numbers become


@dataclass(frozen=True, slots=True)
class Spot:
    """A number in the text of a question: `Spot(22, 24, Fraction(48))` in "Natalia sold clips to 48 of her friends"."""

    start: int
    end: int
    value: Fraction


@dataclass(frozen=True, slots=True)
class Step:
    """A computation, and what it gave: `Step("48/2", Fraction(24))`."""

    expression: str
    result: Fraction


class Unfit(Exception):
    """A problem whose numbers cannot be replaced safely."""


def number(text: str) -> Fraction:
    """`number("1,200.50")` is 2401/2."""
    return Fraction(text.replace(",", ""))


def numbers(expression: str) -> list[Fraction]:
    return [number(found) for found in NUMBER.findall(expression)]


def spots(question: str) -> list[Spot]:
    return [Spot(found.start(), found.end(), number(found[0])) for found in NUMBER.finditer(question)]


def steps(solution: str) -> list[Step]:
    """The computations of a solution, each checked."""
    found = [Step(expression, _result(result)) for expression, result in COMPUTATION.findall(solution)]
    if not found or any(compute(step.expression, {}) != step.result for step in found):
        raise Unfit("a computation that is not exact, or none at all")
    return found


def _result(text: str) -> Fraction:
    try:
        return number(text)
    except ValueError:
        raise Unfit(f"no number: {text}") from None


def compute(expression: str, values: Mapping[Fraction, Fraction]) -> Fraction:
    """An expression with its numbers replaced: `compute("48/2", {48: 90})` is 45."""
    if not re.fullmatch(r"[\d.,+\-*/() ]+", expression) or "//" in expression or "**" in expression:
        raise Unfit(f"not plain arithmetic: {expression}")
    exact = NUMBER.sub(lambda m: f"Fraction('{values.get(number(m[0]), number(m[0]))}')", expression)
    try:
        return Fraction(eval(exact, {"__builtins__": {}, "Fraction": Fraction}))
    except (SyntaxError, TypeError, ZeroDivisionError):
        raise Unfit(f"cannot be computed: {expression}") from None


def replaceable(question: str, spot: Spot) -> bool:
    """Whether a number may become a large one: a count or a price; no share, ratio, time, or part of a word."""
    apart = not PART_OF_WORD.match(question[max(0, spot.start - 1) : spot.start])
    counts = apart and not NO_COUNT.match(question, spot.end)
    return counts and spot.value.denominator == 1 and spot.value >= 5 and spot.value not in WORDS


def variables(question: str, done: Sequence[Step]) -> list[Spot]:
    """The numbers to replace: each occurs once in the question, and is computed with as it is."""
    found = spots(question)
    values = [spot.value for spot in found]
    used = {value for step in done for value in numbers(step.expression)}
    return [s for s in found if s.value in used and values.count(s.value) == 1 and replaceable(question, s)]


def check_origins(question: str, done: Sequence[Step]) -> None:
    """Refuse a problem with a number that comes from nowhere, and one with a number that may come from two places."""
    words = {Fraction(value) for value, form in WORDS.items() if re.search(form, question, re.IGNORECASE)}
    known = words | {spot.value for spot in spots(question) if not question[spot.end : spot.end + 1].isalpha()}
    for step in done:
        if not known.issuperset(numbers(step.expression)):
            raise Unfit("a number that comes from nowhere")
        if step.result in known:
            raise Unfit(f"{step.result} may come from two places")
        known.add(step.result)


def replay(done: Sequence[Step], values: Mapping[Fraction, Fraction]) -> list[Fraction]:
    """The results of all computations with other numbers."""
    now = dict(values)
    for step in done:
        now[step.result] = compute(step.expression, now)
    return [now[step.result] for step in done]


def fits(old: Step, new: Fraction) -> bool:
    return new > 0 and (new.denominator == 1 or old.result.denominator != 1)


def enlarged(question: str, solution: str, dice: random.Random) -> dict[str, str]:
    """The problem with large numbers; `Unfit` where that is not safe."""
    done = steps(solution)
    final = _result(solution.rpartition("####")[2].strip())
    if final != done[-1].result:
        raise Unfit("the answer is not the last result")
    check_origins(question, done)
    if not (chosen := variables(question, done)):
        raise Unfit("no number can be replaced")
    for _ in range(TRIES):
        factor = dice.randint(*GROWTH)
        values = {spot.value: spot.value * factor + dice.randrange(factor) for spot in chosen}
        results = replay(done, values)
        if all(map(fits, done, results)) and results[-1].denominator == 1 and results[-1] != final:
            return {"question": _written(question, chosen, values), "answer": str(results[-1])}
    raise Unfit("no numbers found")


def _written(question: str, chosen: Sequence[Spot], values: Mapping[Fraction, Fraction]) -> str:
    for spot in reversed(chosen):
        question = f"{question[: spot.start]}{values[spot.value]}{question[spot.end :]}"
    return question


def made(lines: Iterator[str]) -> Iterator[str]:
    """A line for each problem that can be enlarged. The numbers depend on the problem alone."""
    for line in lines:
        row = json.loads(line)
        try:
            yield json.dumps(enlarged(row["question"], row["answer"], random.Random(row["question"])))
        except Unfit:
            continue


def main(source: Path, target: Path) -> None:
    with source.open(encoding="utf-8") as lines:
        rows = list(made(lines))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    print(f"{target}: {len(rows)} problems")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
