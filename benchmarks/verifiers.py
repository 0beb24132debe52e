"""Checks per second of the verifiers, and what a share of inputs that hang does to them.

    python benchmarks/verifiers.py [--workers 2] [--checks 4000] [--hanging 0.05] [--timeout 10] [--rounds 5]

Inputs are made here: answers in the notations of MATH and GSM8K, small Python programs with three asserts each (a
third of them wrong), and texts of up to 200 words with one to five instructions. `hanging` replaces that share of the
inputs by ones that never end: an endless loop in the checker of mathematics, in code that keeps no state or in a
library that does, or in the program. The time is that until the last of the other checks has its score. Rounds with and
without hanging ones alternate; figures are medians, and the loss is that of each round beside the one before it.
"""

import argparse
import asyncio
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from kitae.data.instructions import TOPICS, WORDS, draw_instructions
from kitae.verifiers.pool import VerifierPool

Case = tuple[str, Any]

ANSWERS = (
    ("42", "42"), ("3/4", r"\frac{3}{4}"), ("1,234", "1234"), (r"2\sqrt{3}", r"\sqrt{12}"), ("x=5", "5"), ("7", "8"),
    (r"\left(3, \frac{\pi}{2}\right)", r"(3, \pi/2)"), ("x^2+2x+1", "(x+1)^2"), ("[2,5)", "[2, 5)"), ("50\\%", "0.5"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"), (r"\text{Tuesday}", "Tuesday"),
    (r"\{1, 2, 3\}", r"\{3,2,1\}"), (r"-\frac{1}{2}", "-0.5"), (r"90^\circ", "90"), ("p - q", "q - p"), ("(B)", "B"),
    (r"2\pi", "6.28"), ("18", "18 \\text{ cm}"), (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"), ("1+2i", "2i+1"),
)  # fmt: skip
PROGRAMS = (
    ("def double(x):\n    return 2 * x", "double({0}) == 2 * {0}"),
    ("def total(xs):\n    return sum(xs)", "total([{0}, 1]) == {0} + 1"),
    ("def is_even(n):\n    return n % 2 == 0", "is_even(2 * {0})"),
    ("def back(s):\n    return s[::-1]", "back(str({0})) == str({0})[::-1]"),
    ("def largest(xs):\n    return sorted(xs)[-1]", "largest([{0}, {0} + 1]) == {0} + 1"),
    ("def squares(n):\n    return [i * i for i in range(n)]", "len(squares({0})) == {0}"),
)
HANGING_MATH = """
from contextlib import nullcontext

from kitae.verifiers.base import repeatable
from kitae.workers.interruptible_calls import foreign
from kitae.verifiers.math import math
from kitae.verifiers.verifier_registry import VERIFIERS

math(*VERIFIERS["math"].example, {})  # loads what it needs, as the pool does for the verifier itself

def check(response, reference, context, around):
    with around():
        while response == "hang":
            pass
    return math(response, reference, context)

@repeatable
def score(response, reference, context):
    return check(response, reference, context, nullcontext)

@repeatable
def score_in_library(response, reference, context):
    return check(response, reference, context, foreign if response == "hang" else nullcontext)
"""


def math_case(rng: random.Random) -> Case:
    answer, reference = rng.choice(ANSWERS)
    steps = " ".join(rng.choices(WORDS, k=80))
    return f"{steps} The answer is $\\boxed{{{answer}}}$.", reference


def code_case(rng: random.Random) -> Case:
    source, check = rng.choice(PROGRAMS)
    if rng.random() < 1 / 3:
        source = source.replace("return", "return 1 if True else", 1)
    asserts = [f"assert {check.format(rng.randint(2, 99))}" for _ in range(3)]
    return f"Here it is:\n```python\n{source}\n```", {"tests": {"kind": "asserts", "asserts": asserts}}


def instructions_case(rng: random.Random) -> Case:
    text = " ".join(rng.choices((*WORDS, *TOPICS, "the", "of", "is.", "and,", "A", "to"), k=rng.randint(20, 200)))
    return text.capitalize(), draw_instructions(rng, {"constraints": 5})[1]


def hang(name: str, case: Case) -> Case:
    _, reference = case
    return ("while True: pass" if name == "code" else "hang"), reference


async def seconds(verifier: str, cases: list[Case], hanging: set[int], workers: int, timeout: float) -> float:
    """Until the last check that does not hang has its score; the others are given up."""
    async with VerifierPool(verifier, workers=workers, timeout=timeout) as pool:
        await pool.score(*cases[next(i for i in range(len(cases)) if i not in hanging)])
        began = perf_counter()
        tasks = [asyncio.create_task(pool.score(*case)) for case in cases]
        scores = await asyncio.gather(*(task for i, task in enumerate(tasks) if i not in hanging))
        taken = perf_counter() - began
        assert all(score.valid for score in scores), next(score for score in scores if not score.valid)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return taken


def measure(name: str, verifier: str, make: Callable[[random.Random], Case], count: int, given: Any) -> None:
    rng = random.Random(0)
    plain = [make(rng) for _ in range(count)]
    stuck = set(rng.sample(range(count), round(given.hanging * count)))
    mixed = [hang(name, case) if i in stuck else case for i, case in enumerate(plain)]
    rates: list[float] = []
    slowed: list[float] = []
    for _ in range(given.rounds):
        rates.append(count / asyncio.run(seconds(verifier, plain, set(), given.workers, given.timeout)))
        if name != "instructions":  # they cannot hang
            taken = asyncio.run(seconds(verifier, mixed, stuck, given.workers, given.timeout))
            slowed.append((count - len(stuck)) / taken)
    text = f"{name:18} {count:8,} {median(rates):10,.0f}"
    if slowed:
        losses = [1 - slow / rate for slow, rate in zip(slowed, rates, strict=True)]
        text += f" {median(slowed):19,.0f} {median(losses):7.0%}   {min(losses):.0%} to {max(losses):.0%}"
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--checks", type=int, default=4_000, help="of math; instructions get twice, code a tenth of it")
    parser.add_argument("--hanging", type=float, default=0.05)
    parser.add_argument("--timeout", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="the name of one of the lines")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "hanging.py"
        own.write_text(HANGING_MATH)
        kinds: tuple[tuple[str, str, Callable[[random.Random], Case], int], ...] = (
            ("math", f"{own}:score", math_case, given.checks),
            ("math, in a library", f"{own}:score_in_library", math_case, given.checks),
            ("code", "code", code_case, given.checks // 10),
            ("instructions", "instructions", instructions_case, given.checks * 2),
        )
        print("verifier             checks   a second   with hanging ones    loss")
        for kind in kinds:
            if given.only in ("", kind[0]):
                measure(*kind, given)


if __name__ == "__main__":
    main()
