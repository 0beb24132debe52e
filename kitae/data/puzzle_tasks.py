"""Puzzles with exactly one solution: Knights and Knaves, and Countdown.

Each `draw_…` function makes a question and its answer from a random generator and the parameters of a generated task.
The verifier of the same puzzle scores the answer 1, and needs no other reference.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd
from typing import Any

from kitae.errors import DataError

Params = Mapping[str, Any]

# fmt: off
NAMES = (
    "Abel", "Ada", "Alice", "Amir", "Anna", "Bea", "Bob", "Carol", "Chen", "Clara", "David", "Diana",
    "Edith", "Elena", "Emil", "Felix", "Fatima", "Gina", "Hana", "Hugo", "Ines", "Ivan", "Jana", "Joao",
    "Karin", "Kofi", "Lars", "Lena", "Liam", "Maya", "Mia", "Nils", "Noor", "Olga", "Omar", "Pablo",
    "Petra", "Quinn", "Rosa", "Sara", "Tara", "Tom", "Uma", "Vera", "Wei", "Yara", "Zoe",
)
# fmt: on

MAX_PEOPLE = 10
MAX_NUMBERS = 5
_TRIES = 10_000


# Knights and Knaves: a statement is a text and its truth table, one bit for each way to give roles to the people.


@dataclass(frozen=True, slots=True)
class _Island:
    """The people and, for each of them, the assignments (as bits) in which they are a knight."""

    names: tuple[str, ...]
    knight: tuple[int, ...]

    @staticmethod
    def of(names: Sequence[str]) -> "_Island":
        worlds = range(2 ** len(names))
        return _Island(tuple(names), tuple(_bits(bool(w >> i & 1) for w in worlds) for i in range(len(names))))

    @property
    def everything(self) -> int:
        worlds: int = 2 ** len(self.names)
        return (1 << worlds) - 1


def _bits(flags: Iterator[bool]) -> int:
    return sum(1 << position for position, flag in enumerate(flags) if flag)


def draw_knights_and_knaves(rng: random.Random, params: Params) -> tuple[str, str]:
    """`people` on the island, and how involved their statements may be.

    `depth` 1: about one person, or two with "and" and "or"; 2: also "if", "the same kind", "but not both"; 3: also
    three people and "at least 2 of us".
    """
    people, depth = params["people"], params["depth"]
    if not 2 <= people <= MAX_PEOPLE:
        raise DataError(f"people must be from 2 to {MAX_PEOPLE}, got {people}")
    island = _Island.of(rng.sample(NAMES, people))
    for _ in range(_TRIES):
        roles = rng.getrandbits(people)
        statements = [_draw_statement(rng, island, speaker, depth, roles) for speaker in range(people)]
        worlds = _consistent(island, [table for _, table in statements])
        if worlds == 1 << roles:
            return _island_question(island.names, [text for text, _ in statements]), _island_answer(island.names, roles)
    raise DataError(f"no puzzle with one solution in {_TRIES} draws for {dict(params)}")  # has not been seen


def _consistent(island: _Island, tables: Sequence[int]) -> int:
    """The assignments in which exactly the knights speak the truth."""
    worlds = island.everything
    for knight, table in zip(island.knight, tables, strict=True):
        worlds &= island.everything ^ (knight ^ table)
    return worlds


def _draw_statement(rng: random.Random, island: _Island, speaker: int, depth: int, roles: int) -> tuple[str, int]:
    """A statement that is true in the world `roles` exactly if its speaker is a knight there, and not in all worlds."""
    while True:
        text, table = rng.choice(_KINDS[: _KINDS_AT[depth]])(rng, island, speaker)
        says_true, is_knight = table >> roles & 1, roles >> speaker & 1
        if says_true == is_knight and 0 < table < island.everything:
            return text, table


def _atom(rng: random.Random, island: _Island, speaker: int, who: int) -> tuple[str, int]:
    knight = rng.random() < 0.5
    role = "knight" if knight else "knave"
    table = island.knight[who] if knight else island.everything ^ island.knight[who]
    return f"I am a {role}" if who == speaker else f"{island.names[who]} is a {role}", table


def _others(rng: random.Random, island: _Island, speaker: int, count: int) -> list[int]:
    """`count` people to speak about, different where there are enough; the speaker may be among them if others are."""
    pool = [who for who in range(len(island.names)) if who != speaker]
    chosen = [rng.choice(pool)]
    rest = [who for who in range(len(island.names)) if who != chosen[0]]
    chosen += rng.sample(rest, min(count - 1, len(rest)))
    return chosen


def _plain(rng: random.Random, island: _Island, speaker: int) -> tuple[str, int]:
    return _atom(rng, island, speaker, *_others(rng, island, speaker, 1))


def _pair(rng: random.Random, island: _Island, speaker: int) -> tuple[str, int]:
    (p, a), (q, b) = (_atom(rng, island, speaker, who) for who in _others(rng, island, speaker, 2))
    return (f"{p} and {q}", a & b) if rng.random() < 0.5 else (f"{p} or {q}", a | b)


def _conditional(rng: random.Random, island: _Island, speaker: int) -> tuple[str, int]:
    (p, a), (q, b) = (_atom(rng, island, speaker, who) for who in _others(rng, island, speaker, 2))
    return f"if {p}, then {q}", (island.everything ^ a) | b


def _alike(rng: random.Random, island: _Island, speaker: int) -> tuple[str, int]:
    one, two = _others(rng, island, speaker, 2)
    differ = island.knight[one] ^ island.knight[two]
    pair = " and ".join("I" if who == speaker else island.names[who] for who in (one, two))
    same = rng.random() < 0.5
    return (
        f"{pair} are of {'the same kind' if same else 'different kinds'}",
        island.everything ^ differ if same else differ,
    )


def _exactly_one(rng: random.Random, island: _Island, speaker: int) -> tuple[str, int]:
    (p, a), (q, b) = (_atom(rng, island, speaker, who) for who in _others(rng, island, speaker, 2))
    return f"either {p} or {q}, but not both", a ^ b


def _nested(rng: random.Random, island: _Island, speaker: int) -> tuple[str, int]:
    chosen = _others(rng, island, speaker, 3)
    (p, a), (q, b), (r, c) = (_atom(rng, island, speaker, chosen[i % len(chosen)]) for i in range(3))
    if rng.random() < 0.5:
        return f"if {p} and {q}, then {r}", (island.everything ^ (a & b)) | c
    return f"if {p}, then {q} or {r}", (island.everything ^ a) | b | c


def _counted(rng: random.Random, island: _Island, speaker: int) -> tuple[str, int]:
    people = len(island.names)
    count, exactly = rng.randint(1, people - 1), rng.random() < 0.5
    sizes = (world.bit_count() for world in range(2**people))
    table = _bits(size == count if exactly else size >= count for size in sizes)
    noun = "is a knight" if count == 1 else "are knights"
    return f"{'exactly' if exactly else 'at least'} {count} of us {noun}", table


_KINDS: tuple[Callable[[random.Random, _Island, int], tuple[str, int]], ...] = (
    *(_plain, _pair),
    *(_conditional, _alike, _exactly_one),
    *(_nested, _counted),
)
_KINDS_AT = {1: 2, 2: 5, 3: 7}  # how many of the kinds a depth may use


def _island_question(names: Sequence[str], statements: Sequence[str]) -> str:
    said = " ".join(
        f'{name} says: "{text[0].upper()}{text[1:]}."' for name, text in zip(names, statements, strict=True)
    )
    return (
        "Everyone on an island is either a knight, who always tells the truth, or a knave, who always lies. "
        f"You meet {', '.join(names[:-1])} and {names[-1]}. {said} Who is a knight and who is a knave?"
    )


def _island_answer(names: Sequence[str], roles: int) -> str:
    return ", ".join(f"{name} is a {'knight' if roles >> i & 1 else 'knave'}" for i, name in enumerate(names))


# Countdown: random expressions, kept where no other expression has the same value.


def draw_countdown(rng: random.Random, params: Params) -> tuple[str, str]:
    """`count` different numbers from `low` to `high` and a target up to `max_target` that only one expression reaches.

    The only one, that is, up to the order of summands and factors and to superfluous brackets, also among those that
    leave numbers out. The solution therefore uses all numbers.
    """
    count, span = params["count"], range(params["low"], params["high"] + 1)
    if not 2 <= count <= min(MAX_NUMBERS, len(span)) or span.start < 1:
        raise DataError(
            f"count must be from 2 to {MAX_NUMBERS} and there must be as many numbers from low >= 1 to high, "
            f"got count {count}, low {span.start} and high {span.stop - 1}"
        )
    for _ in range(_TRIES):
        numbers = rng.sample(span, count)
        ways = solutions(numbers)
        for _ in range(30 * count):
            text, value = _draw_expression(rng, numbers)
            if value.denominator == 1 and 0 < value <= params["max_target"] and ways[int(value)] == 1:
                return f"Use {_listed(numbers)} {_RULES} {value}.", f"{text} = {value}"
    raise DataError(f"no puzzle with one solution in {_TRIES} draws for {dict(params)}; widen its ranges")


_RULES = "at most once each, with + - * / and brackets, to make"


def _listed(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _draw_expression(rng: random.Random, numbers: Sequence[int]) -> tuple[str, Fraction]:
    """A random expression that uses all numbers, with the brackets it needs."""
    trees = [(str(number), 3, Fraction(number)) for number in numbers]  # text, priority, value
    while len(trees) > 1:
        rng.shuffle(trees)
        (left, left_rank, a), (right, right_rank, b) = trees.pop(), trees.pop()
        operator = rng.choice("+-*/" if b else "+-*")
        rank = 1 if operator in "+-" else 2
        left = f"({left})" if left_rank < rank else left
        right = f"({right})" if right_rank < rank or (right_rank == rank and operator in "-/") else right
        value = {"+": a + b, "-": a - b, "*": a * b}[operator] if operator != "/" else a / b
        trees.append((f"{left} {operator} {right}", rank, value))
    text, _, value = trees[0]
    return text, value


Forms = Counter[tuple[int, int, bool]]
"""How many expressions have the value p/q: `{(p, q, both): count}`; `both` where the same one can also be had as -p/q.

Turning all differences of an expression around changes its sign at most: (a - b) * c and (b - a) * c are one form.
"""


def solutions(numbers: Sequence[int]) -> Counter[int]:
    """For every positive whole number, how many essentially different expressions of some of the numbers reach it.

    Expressions that differ only in the order of summands and factors, or in brackets that change nothing, are one:
    each is built once, as a sum of products of sums …, with the block of its first number first. Numbers that are
    equal count as different ones. Four numbers have 1,170 expressions that use them all, five have 27,142.
    """
    found: Counter[int] = Counter()
    for forms in all_forms(numbers):
        for (p, q, both), count in forms.items():
            if q == 1 and (p > 0 or (both and p < 0)):
                found[abs(p)] += count
    return found


def all_forms(numbers: Sequence[int]) -> Iterator[Forms]:
    """The forms of each subset of the numbers."""
    terms: dict[int, Forms] = {}  # single numbers and products of more, by the subset of numbers as bits
    factors: dict[int, Forms] = {}  # single numbers and sums of more
    for subset in range(1, 2 ** len(numbers)):
        if subset.bit_count() == 1:
            terms[subset] = factors[subset] = Counter({(numbers[subset.bit_length() - 1], 1, False): 1})
            yield terms[subset]
        else:
            terms[subset], factors[subset] = _products(subset, factors), _sums(subset, terms)
            yield terms[subset]
            yield factors[subset]


def _sums(subset: int, terms: Mapping[int, Forms]) -> Forms:
    """Sums of at least two terms; the sign of the first is +, because a form stands for its negative too."""
    sums: Forms = Counter()
    for first, rest in _splits(subset):
        tails = _signed_tails(rest, terms)
        for (p, q, both), count in terms[first].items():
            for (r, s, turned), ways in tails.items():
                sums[(*_reduced(p * s + r * q, q * s), both or turned)] += count * ways
    return sums


def _signed_tails(subset: int, terms: Mapping[int, Forms]) -> Forms:
    """Sums of one or more terms with signs; `both` where one of them is - or can be turned around."""
    tails: Forms = Counter()
    for first, rest in [(subset, 0), *_splits(subset)]:
        following = _signed_tails(rest, terms) if rest else Counter({(0, 1, False): 1})
        for (p, q, both), count in terms[first].items():
            for (r, s, turned), ways in following.items():
                tails[(*_reduced(r * q + p * s, q * s), both or turned)] += count * ways
                tails[(*_reduced(r * q - p * s, q * s), True)] += count * ways
    return tails


def _products(subset: int, factors: Mapping[int, Forms]) -> Forms:
    """Products of at least two factors, of which at least one is not a divisor."""
    products: Forms = Counter()
    for first, rest in _splits(subset):
        for (p, q, both, divides), count in _quotients(rest, factors).items():
            for (r, s, turned), ways in factors[first].items():
                products[(*_reduced(p * r, q * s), both or turned)] += count * ways
                if r and not divides:
                    products[(*_reduced(p * s, q * r), both or turned)] += count * ways
    return products


def _quotients(subset: int, factors: Mapping[int, Forms]) -> Counter[tuple[int, int, bool, bool]]:
    """Products of one or more factors or divisors; the last flag says that all of them are divisors."""
    found: Counter[tuple[int, int, bool, bool]] = Counter()
    for first, rest in [(subset, 0), *_splits(subset)]:
        following = _quotients(rest, factors) if rest else Counter({(1, 1, False, True): 1})
        for (p, q, both, divides), count in following.items():
            for (r, s, turned), ways in factors[first].items():
                found[(*_reduced(p * r, q * s), both or turned, False)] += count * ways
                if r:
                    found[(*_reduced(p * s, q * r), both or turned, divides)] += count * ways
    return found


def _splits(subset: int) -> Iterator[tuple[int, int]]:
    """Every way to cut a subset in two, with its lowest number in the first part and something in the second."""
    lowest = subset & -subset
    others = subset ^ lowest
    part = others
    while part:
        yield subset ^ part, part
        part = (part - 1) & others


def _reduced(p: int, q: int) -> tuple[int, int]:
    divisor = gcd(p, q) if q > 0 else -gcd(p, q)
    return p // divisor, q // divisor
