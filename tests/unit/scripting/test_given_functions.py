"""Functions from Python: their marks, their copies, and how another process finds them again."""

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

from kitae.errors import ConfigError, VerifierError
from kitae.scripting.given_rewards import given_again, read_rewards
from kitae.verifiers.given_functions import (
    SESSION,
    GivenFunction,
    check_given,
    given,
    given_name,
    held,
    load_given,
    mark_of,
    names_in,
)
from kitae.verifiers.reward_styles import prepare_trl
from kitae.verifiers.score_calls import call_scores

LIMIT = 9
PATTERN = re.compile("[0-9]+")


def helper(text: str) -> bool:
    return PATTERN.search(text) is not None


def accuracy(response: str, reference: str) -> float:
    return float(helper(response) and len(response) < LIMIT)


def reward_of(limit: Any) -> Callable[[str], float]:
    return lambda response: float(len(response) < limit)


class Judge:
    def __init__(self, words: list[str]) -> None:
        self.words = words

    def __call__(self, response: str) -> float:
        return float(response in self.words)


def test_a_mark_is_of_code_and_of_what_it_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    before = mark_of(accuracy)
    assert mark_of(reward_of(3)) == mark_of(reward_of(3)) != mark_of(reward_of(4))
    assert mark_of(reward_of({"a": [1, {2, 3}]})) == mark_of(reward_of({"a": [1, {3, 2}]}))
    assert mark_of(Judge(["a"])) == mark_of(Judge(["a"])) != mark_of(Judge(["b"]))
    assert mark_of(partial(accuracy, reference="a")) != mark_of(partial(accuracy, reference="b"))
    assert mark_of(Judge(["a"]).__call__) != mark_of(Judge(["b"]).__call__)
    monkeypatch.setitem(globals(), "LIMIT", 10)
    changed = mark_of(accuracy)
    assert changed != before
    monkeypatch.setitem(globals(), "LIMIT", 9)
    assert mark_of(accuracy) == before
    monkeypatch.setitem(globals(), "PATTERN", re.compile("[a-z]+"))
    assert mark_of(accuracy) != before, "what a function of the same file reads counts too"


def test_a_mark_is_the_same_in_another_process_and_with_other_comments(tmp_path: Path) -> None:
    text = "WORDS = {'a', 'b', 'c'}\n\ndef polite(response):\n    return response in WORDS\n"
    marks = set()
    for number, body in enumerate((text, f"# said\n\n{text.replace('response in', 'response  in')}")):
        file = tmp_path / f"rewards_{number}" / "mine.py"
        file.parent.mkdir()
        file.write_text(f"{body}\nif __name__ == '__main__':\n    from kitae.verifiers.given_functions import given\n"
                        "    print(given(polite).name)\n")  # fmt: skip
        for seed in ("1", "2"):
            ran = subprocess.run(
                [sys.executable, str(file)], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed,
                "PYTHONPATH": ":".join(sys.path)},
            )  # fmt: skip
            name = given_name(ran.stdout.strip())
            assert name is not None and (name.where, name.function) == (str(file), "polite")
            marks.add(name.mark)
            found = load_given(str(name))
            assert found("a") is True, "found again by its file"
    assert len(marks) == 1


def test_where_a_function_is_found_again() -> None:
    assert given(accuracy).name.where == __file__ and given(accuracy).name.label == "accuracy"
    for function in (reward_of(3), Judge([]), partial(accuracy, reference="1"), lambda response: 1.0):
        assert given(function).name.where == SESSION
    from kitae.verifiers.plain_text import exact

    assert given(exact).name.where == "kitae.verifiers.plain_text"


def test_a_held_function_is_loaded_by_value() -> None:
    function = given(reward_of(3))
    name = str(function.name)
    with pytest.raises(VerifierError, match=r"'lambda' was defined in a session of Python.*kitae.resume\(RUN, reward="):
        check_given(name, {})
    with held([function]):
        check_given(name, {})
        assert (load_given(name)("ab"), load_given(name)("abc")) == (1.0, 0.0)
        with held([function]):
            pass
        assert load_given(name)("ab") == 1.0, "the other run still has it"
    with pytest.raises(VerifierError):
        check_given(name, {})


def test_two_runs_at_once_do_not_mix_up_what_their_functions_hold() -> None:
    one = given(reward_of(3))
    with (
        held([one]),
        pytest.raises(ConfigError, match="in use by another run of this process"),
        held([GivenFunction(one.name, b"other")]),
    ):
        pass


def test_what_cannot_be_sent_is_named() -> None:
    lock = Lock()

    def locked(response: str) -> float:
        with lock:
            return 1.0

    with pytest.raises(
        ConfigError, match=r"'locked' cannot be sent .*its variable 'lock', which is of type lock.*"
    ) as e:
        given(locked)
    assert 'reward="rewards.py:locked"' in str(e.value)
    judge = Judge([])
    judge.client = lock  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"'Judge' cannot be sent .*its variable 'client', which is of type lock"):
        given(judge)


def test_a_function_that_was_changed_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def polite(response):\n    return 1.0\n")
    name = f"{file}:polite@0123456789ab"
    with pytest.raises(
        VerifierError, match=r"'polite' of .*mine.py is not what the run began with \(mark 0123456789ab"
    ):
        load_given(name)
    with pytest.raises(VerifierError, match=r"'polite' was defined in .*gone.py, which is gone; give it again"):
        check_given(f"{tmp_path}/gone.py:polite@0123456789ab", {})
    file.write_text("def rude(response):\n    return 1.0\n")
    with pytest.raises(VerifierError, match="needs a function 'polite'"):
        load_given(name)


def test_several_rewards_are_a_sum_with_labels() -> None:
    found = read_rewards([accuracy, (reward_of(3), 0.5), reward_of(4), ("math", 2), {"name": "tags", "gate": 1.0}])
    parts = found.verifier["params"]["parts"]
    assert [part["label"] for part in parts] == ["accuracy", "lambda", "lambda_2", "math", "tags"]
    assert [part.get("weight", 1.0) for part in parts] == [1.0, 0.5, 1.0, 2.0, 1.0]
    assert len(found.functions) == 3
    assert names_in(found.verifier["name"], found.verifier["params"]) == [str(f.name) for f in found.functions]
    assert read_rewards("math").verifier == {"name": "math"}
    assert read_rewards(accuracy).verifier == {"name": str(given(accuracy).name)}
    (weighted,) = read_rewards((accuracy, 0.5)).verifier["params"]["parts"]
    assert weighted["weight"] == 0.5


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (7, "reward must be a function, the name of a verifier, or a list"),
        ([], "reward must be a function, the name of a verifier, or a list"),
        ([7], "a reward must be a function or the name of a verifier, alone or with a weight, got 7"),
        (lambda: 1.0, r"must take \(response, reference, context\) or some of them"),
    ],
)
def test_what_is_no_reward_is_refused(reward: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_rewards(reward)


def test_functions_are_given_again_if_they_are_the_same() -> None:
    before = read_rewards([reward_of(3), accuracy])
    name, params = before.verifier["name"], before.verifier["params"]
    again = given_again(name, params, [accuracy, reward_of(3)])
    assert [str(each.name) for each in again] == [str(each.name) for each in before.functions]
    with pytest.raises(ConfigError, match="reward 'lambda' is not what the run began with"):
        given_again(name, params, [accuracy, reward_of(4)])
    with pytest.raises(ConfigError, match="reward must have 'lambda', with which the run began, got 'accuracy'"):
        given_again(name, params, [accuracy])
    with pytest.raises(
        ConfigError, match="for a run whose rewards were functions given from Python, got one with 'math'"
    ):
        given_again("math", {}, accuracy)


def completions_length(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    return [float(len(c) + len(a)) for c, a in zip(completions, answer, strict=True)]


def test_functions_as_trl_calls_them_are_known_by_their_arguments() -> None:
    alone = read_rewards(completions_length)
    (function,) = alone.functions
    assert alone.in_trl and alone.verifier["name"] == "trl"
    assert alone.verifier["params"] == {"function": [str(function.name)], "weights": [1.0]}
    both = read_rewards([(completions_length, 0.5), accuracy])
    assert both.in_trl and both.verifier["params"]["parts"][0]["name"] == "trl"
    assert names_in(both.verifier["name"], both.verifier["params"]) == [str(f.name) for f in both.functions]
    assert not read_rewards([accuracy, "math"]).in_trl
    with held(alone.functions):
        verifier = prepare_trl(alone.verifier["params"])
        scores = call_scores(verifier, ["ab", "abcd"], "", [{"answer": "4"}, {"answer": "44"}], {})
    assert [(s.value, dict(s.components)) for s in scores] == [
        (3.0, {"completions_length": 3.0}),
        (6.0, {"completions_length": 6.0}),
    ]
