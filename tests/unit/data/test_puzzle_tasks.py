import itertools
import random
import re
from collections import defaultdict
from fractions import Fraction

import pytest

from kitae.data import puzzle_tasks
from kitae.data.puzzle_tasks import NAMES, draw_countdown, draw_knights_and_knaves
from kitae.errors import DataError
from kitae.verifiers.puzzle_checks import countdown as check_countdown
from kitae.verifiers.puzzle_checks import knights_knaves as check_knights

KNIGHTS = [{"people": people, "depth": depth} for people, depth in ((2, 1), (4, 2), (8, 3))]
COUNTDOWN = [{"count": n, "low": 2, "high": high, "max_target": 10 * high} for n, high in ((2, 10), (3, 30), (5, 100))]


@pytest.mark.parametrize(("draw", "params"), [(draw_knights_and_knaves, KNIGHTS[1]), (draw_countdown, COUNTDOWN[1])])
def test_a_puzzle_is_a_pure_function(draw, params):
    found = {seed: draw(random.Random(seed), params) for seed in range(30)}
    assert all(draw(random.Random(seed), params) == found[seed] for seed in reversed(range(30)))
    assert len({question for question, _ in found.values()}) == 30


def test_what_the_model_sees():
    question, answer = draw_knights_and_knaves(random.Random(0), KNIGHTS[0])
    assert question.startswith(
        "Everyone on an island is either a knight, who always tells the truth, or a knave, who always lies. You meet "
    )
    assert question.endswith(" Who is a knight and who is a knave?")
    assert re.fullmatch(r"\w+ is a (knight|knave), \w+ is a (knight|knave)", answer)
    question, answer = draw_countdown(random.Random(0), COUNTDOWN[1])
    assert re.fullmatch(r"Use \d+, \d+ and \d+ at most once each, with \+ - \* / and brackets, to make \d+\.", question)
    assert re.fullmatch(r"[-+*/() \d]+ = \d+", answer)


@pytest.mark.parametrize("level", range(3))
def test_answers_score_1_and_others_0(level):
    for seed in range(3 if level == 2 else 10):
        question, answer = draw_knights_and_knaves(random.Random(seed), KNIGHTS[level])
        assert check_knights(answer, answer, {}).value == 1
        assert check_knights(question, answer, {}).value == 0
        assert check_knights(_flip_last(answer), answer, {}).value == 0
        question, answer = draw_countdown(random.Random(seed), COUNTDOWN[level])
        assert check_countdown(answer, answer, {}, use_all=True).value == 1
        assert check_countdown(question, answer, {}).value == 0


def _flip_last(answer):
    head, role = answer.rsplit(" ", 1)
    return f"{head} {'knave' if role == 'knight' else 'knight'}"


# Knights and Knaves: read the English text again, and try every assignment.


def _atom(text, speaker, world):
    who, role = re.fullmatch(r"(I am|\w+ is) a (knight|knave)", text).groups()
    return world[speaker if who == "I am" else who.removesuffix(" is")] is (role == "knight")


def _holds(text, speaker, world):
    """The truth of a statement, from its words alone."""
    text = re.sub(r"^(If|Either|Exactly|At)\b", lambda m: m[0].lower(), text)
    if match := re.fullmatch(r"(exactly|at least) (\d+) of us (?:is a knight|are knights)", text):
        count = sum(world.values())
        return count == int(match[2]) if match[1] == "exactly" else count >= int(match[2])
    if match := re.fullmatch(r"(\w+) and (\w+) are of (the same kind|different kinds)", text):
        one, two = (world[speaker if who == "I" else who] for who in match.groups()[:2])
        return (one is two) is (match[3] == "the same kind")
    if match := re.fullmatch(r"either (.+) or (.+), but not both", text):
        return _atom(match[1], speaker, world) is not _atom(match[2], speaker, world)
    if match := re.fullmatch(r"if (.+), then (.+)", text):
        return not _holds(match[1], speaker, world) or _holds(match[2], speaker, world)
    if " and " in text:
        return all(_atom(part, speaker, world) for part in text.split(" and "))
    return any(_atom(part, speaker, world) for part in text.split(" or "))


def _worlds(question):
    said = re.findall(r'(\w+) says: "(.+?)\."', question)
    names = [name for name, _ in said]
    for roles in itertools.product([True, False], repeat=len(names)):
        world = dict(zip(names, roles, strict=True))
        if all(_holds(text, name, world) is world[name] for name, text in said):
            yield ", ".join(f"{name} is a {'knight' if knight else 'knave'}" for name, knight in world.items())


@pytest.mark.parametrize(("people", "depth"), list(itertools.product([2, 3, 4, 5, 6], [1, 2, 3])))
def test_knights_and_knaves_have_one_solution(people, depth):
    rng = random.Random(people * depth)
    for _ in range(40):
        question, answer = draw_knights_and_knaves(rng, {"people": people, "depth": depth})
        assert list(_worlds(question)) == [answer]
        assert len(answer.split(", ")) == people


def test_roles_and_kinds_of_statements_are_mixed():
    questions, answers = zip(
        *(draw_knights_and_knaves(random.Random(i), {"people": 4, "depth": 3}) for i in range(200)), strict=True
    )
    knaves = sum(answer.count("knave") for answer in answers)
    assert 0.35 < knaves / 800 < 0.65
    text = " ".join(questions)
    for phrase in (
        "If ",
        "Either ",
        " and I are of ",
        "the same kind",
        "different kinds",
        "Exactly 2 of us",
        "I am a ",
    ):
        assert phrase in text
    assert not re.search(r'says: "I am a (knight|knave)\."', text)


def test_names_are_different_and_none_is_part_of_another():
    assert len(set(NAMES)) == len(NAMES)
    assert not any(one in two for one, two in itertools.permutations(NAMES, 2))


@pytest.mark.parametrize("people", [1, 11])
def test_too_few_or_many_people(people):
    with pytest.raises(DataError, match=f"people must be from 2 to 10, got {people}"):
        draw_knights_and_knaves(random.Random(0), {"people": people, "depth": 1})


# Countdown: build every expression the plain way, and tell them apart by their values at other, random numbers.


def _every_expression(numbers):
    """{value at the numbers: {value at random numbers of the same expression}}, over all subsets."""
    rng = random.Random(1)
    generic = [Fraction(rng.randint(10**6, 10**7), rng.randint(10**6, 10**7)) for _ in numbers]
    values = defaultdict(set)

    def combine(items):
        for value, other in items:
            values[value].add(other)
        for (a, x), (b, y) in itertools.permutations(items, 2):
            rest = list(items)
            rest.remove((a, x))
            rest.remove((b, y))
            results = [(a + b, x + y), (a - b, x - y), (a * b, x * y)]
            results += [(a / b, x / y)] if b and y else []
            for result in results:
                combine([*rest, result])

    combine([(Fraction(n), g) for n, g in zip(numbers, generic, strict=True)])
    return values


@pytest.mark.parametrize("count", [1, 2, 3])
def test_solutions_are_counted_right(count):
    rng = random.Random(count)
    for _ in range(8):
        numbers = rng.sample(range(1, 15), count)
        plain = {int(v): len(x) for v, x in _every_expression(numbers).items() if v > 0 and v.denominator == 1}
        assert dict(puzzle_tasks.solutions(numbers)) == plain


def test_solutions_of_four_numbers():
    numbers = [2, 5, 9, 13]
    plain = {int(v): len(x) for v, x in _every_expression(numbers).items() if v > 0 and v.denominator == 1}
    assert dict(puzzle_tasks.solutions(numbers)) == plain


@pytest.mark.parametrize(("count", "expressions"), [(1, 1), (2, 6), (3, 68), (4, 1170), (5, 27142)])
def test_number_of_essentially_different_expressions(count, expressions):
    """The known sequence A140606, where a - b and b - a are two."""
    *_, products, sums = itertools.chain([{}], puzzle_tasks.all_forms([101, 1009, 10007, 100003, 1000003][:count]))
    both = [products, sums] if count > 1 else [sums]
    assert sum(ways * (1 + turns) for forms in both for (_, _, turns), ways in forms.items()) == expressions


@pytest.mark.parametrize("count", [2, 3, 4])
def test_countdown_has_one_solution(count):
    rng = random.Random(count)
    for _ in range(2 if count == 4 else 30):
        question, answer = draw_countdown(rng, {"count": count, "low": 2, "high": 25, "max_target": 300})
        *numbers, target = map(int, re.findall(r"\d+", question))
        assert len(set(numbers)) == count and 0 < target <= 300 and all(2 <= n <= 25 for n in numbers)
        expression, value = answer.split(" = ")
        assert eval(expression.replace("/", "/ Fraction(1) /")) == int(value) == target
        assert sorted(map(int, re.findall(r"\d+", expression))) == sorted(numbers)
        assert len(_every_expression(numbers)[Fraction(target)]) == 1


def test_all_operators_occur():
    answers = [
        draw_countdown(random.Random(i), {"count": 4, "low": 2, "high": 20, "max_target": 500})[1] for i in range(60)
    ]
    assert all(operator in "".join(answers) for operator in "+-*/()")


@pytest.mark.parametrize(
    "params",
    [
        {"count": 1, "low": 1, "high": 9},
        {"count": 6, "low": 1, "high": 9},
        {"count": 3, "low": 1, "high": 2},
        {"count": 3, "low": 0, "high": 9},
    ],
)
def test_bad_dials(params):
    with pytest.raises(DataError, match="count must be from 2 to 5"):
        draw_countdown(random.Random(0), {"max_target": 100, **params})


def test_ranges_without_a_puzzle(monkeypatch):
    monkeypatch.setattr(puzzle_tasks, "_TRIES", 20)
    with pytest.raises(DataError, match=r"no puzzle with one solution in 20 draws .*; widen its ranges"):
        draw_countdown(random.Random(0), {"count": 2, "low": 1, "high": 2, "max_target": 1})
