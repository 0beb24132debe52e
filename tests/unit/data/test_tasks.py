import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitae.data.tasks import HELD_OUT, TASKS, Task, find_task, said
from kitae.errors import DataError

ALL = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)


def question(problem):
    return said(problem[0][-1])


def test_reverse_prompt_as_the_model_sees_it():
    messages, reference = TASKS["reverse"].problem(0, "train", {}, 0)
    assert [m.role for m in messages] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert [m.content for m in messages[:-1]] == [
        "Answer only.",
        "Reverse 43, 14, 53",
        "53, 14, 43",
        "Reverse 31, 67, 59",
        "59, 67, 31",
    ]
    numbers = messages[-1].content.removeprefix("Reverse ").split(", ")
    assert reference == ", ".join(reversed(numbers))
    assert len(numbers) == 3 and all(10 <= int(n) <= 99 for n in numbers)


@given(count=st.integers(1, 20), low=st.integers(0, 50), width=st.integers(30, 1000), index=st.integers(0, 10**9))
def test_sort_gives_different_numbers_in_order(count, low, width, index):
    params = TASKS["sort"].resolve({"count": count, "low": low, "high": low + width})
    text, answer = TASKS["sort"].draw(random.Random(index), params)
    numbers = [int(n) for n in text.removeprefix("Sort ").split(", ")]
    assert len(set(numbers)) == count
    assert all(low <= n <= low + width for n in numbers)
    assert answer == ", ".join(map(str, sorted(numbers)))


@given(digits=st.integers(1, 6), terms=st.integers(2, 8), ops=st.sampled_from(["+", "-", "+-", "*", "+-*"]))
def test_arithmetic_agrees_with_python(digits, terms, ops):
    params = {"digits": digits, "terms": terms, "ops": ops}
    text, answer = TASKS["arithmetic"].draw(random.Random(0), params)
    expression = text.removeprefix("Compute ")
    assert int(answer) == eval(expression)
    operands, operators = expression.split()[::2], expression.split()[1::2]
    assert len(operands) == terms and all(len(n) == digits for n in operands)
    assert set(operators) <= set(ops)


def test_count_counts():
    answers = set()
    for index in range(200):
        problem = TASKS["count"].problem(0, "train", {"length": 9, "examples": 0}, index)
        letter, word = question(problem).removeprefix("Count the letter ").split(" in ")
        assert len(word) == 9 and problem[1] == str(word.count(letter))
        answers.add(problem[1])
    assert len(answers) > 4


@ALL
def test_a_problem_is_a_pure_function(task):
    again = {index: task.problem(3, "train", {}, index) for index in reversed(range(50))}
    assert all(task.problem(3, "train", {}, index) == again[index] for index in range(50))
    assert len({question(p) for p in again.values()}) > 40
    assert question(again[0]) != question(task.problem(4, "train", {}, 0))


@pytest.mark.thorough(keep=1)
@ALL
def test_splits_share_no_question_across_seeds_and_params(task):
    train = {question(task.problem(seed, "train", {}, i)) for seed in (0, 1) for i in range(1500)}
    held_out = {question(task.problem(seed, "eval", {"examples": 0}, i)) for seed in (0, 2) for i in range(300)}
    assert not train & held_out


@pytest.mark.thorough(keep=2)
@ALL
def test_one_question_in_eight_is_held_out(task):
    rng, params = random.Random(0), task.resolve({"examples": 0})
    share = sum(task.split_of(question(task.make(rng, params))) == "eval" for _ in range(4000)) / 4000
    assert share == pytest.approx(1 / HELD_OUT, abs=0.03)


@ALL
def test_held_out_problems_are_different_and_extend_each_other(task):
    problems = task.held_out(0, {}, 100)
    assert len({question(p) for p in problems}) == 100
    assert task.held_out(0, {}, 20) == problems[:20]


@ALL
@pytest.mark.parametrize("examples", [0, 1, 5])
def test_number_of_examples(task, examples):
    if examples > task.limits["examples"][1]:
        pytest.skip("a reference of this task is no answer that could be shown")
    messages, _ = task.problem(0, "train", {"examples": examples}, 0)
    assert len(messages) == 2 + 2 * examples
    assert said(messages[-1]) not in map(said, messages[:-1])


def test_no_question_is_one_of_its_examples():
    params = {"count": 1, "low": 10, "high": 40, "examples": 4}
    for index in range(300):
        messages, _ = TASKS["reverse"].problem(0, "train", params, index)
        assert messages[-1].content not in [m.content for m in messages[:-1]]


def test_a_small_space_is_used_up_and_then_refused():
    params = {"count": 1, "low": 0, "high": 99, "examples": 0}
    reverse = TASKS["reverse"]
    size = sum(reverse.split_of(f"Reverse {n}") == "eval" for n in range(100))
    assert len({question(p) for p in reverse.held_out(0, params, size)}) == size
    with pytest.raises(DataError, match=rf"'reverse' with count=1, low=0, high=99.* only {size} different problems"):
        reverse.held_out(0, params, size + 1)


def test_a_split_without_problems_is_refused():
    with pytest.raises(DataError, match="no problem for the eval split"):
        TASKS["reverse"].problem(0, "eval", {"count": 1, "low": 1, "high": 1, "examples": 0}, 0)


@pytest.mark.parametrize(
    ("task", "params", "message"),
    [
        ("reverse", {"cuont": 3}, "task 'reverse' has no parameter 'cuont'; did you mean 'count'?"),
        ("reverse", {"zzz": 3}, "no parameter 'zzz'; there are count, low, high, examples"),
        ("reverse", {"count": 0}, "must be a whole number from 1 to 100, got 0; nearest valid: 1"),
        (
            "sort",
            {"count": 500},
            "count of task 'sort' must be a whole number from 1 to 100, got 500; nearest",
        ),
        ("sort", {"count": "three"}, "must be a whole number from 1 to 100, got 'three'; nearest valid: 3"),
        ("sort", {"count": True}, "must be a whole number from 1 to 100, got True; nearest valid: 3"),
        ("sort", {"count": 3.0}, "must be a whole number from 1 to 100, got 3.0; nearest valid: 3"),
        ("sort", {"low": 20, "high": 10}, "low must be at most high = 10, got 20; nearest valid: 10"),
        ("sort", {"low": 1, "high": 2}, "at most the 2 different numbers from 1 to 2, got 3; nearest valid: 2"),
        ("arithmetic", {"ops": "+/"}, "must be text made of + - *, got '+/'; nearest valid: '+'"),
        ("arithmetic", {"ops": ""}, "must be text made of + - *, got ''; nearest valid: '+-'"),
        ("arithmetic", {"ops": 1}, "must be text made of + - *, got 1; nearest valid: '+-'"),
        ("count", {"letters": 27}, "must be a whole number from 1 to 26, got 27; nearest valid: 26"),
    ],
)
def test_bad_parameters(task, params, message):
    with pytest.raises(DataError) as caught:
        TASKS[task].problem(0, "train", params, 0)
    assert message in str(caught.value)


def test_unknown_task():
    with pytest.raises(DataError, match="no task 'revers'; did you mean 'reverse'"):
        find_task("revers")
    with pytest.raises(DataError, match="there are reverse, sort, arithmetic, count"):
        find_task("chess")


@ALL
def test_every_default_has_a_limit_and_keeps_it(task: Task):
    assert task.defaults.keys() == task.limits.keys()
    assert task.resolve(task.defaults) == task.defaults
