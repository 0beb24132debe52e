import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitae.data import gym_prompts as data
from kitae.data.config import DataConfig
from kitae.data.gym_prompts import gym_prompt, gym_prompts
from kitae.data.prompt_stream import eval_prompts, open_stream
from kitae.errors import DataError
from kitae.verifiers.gym_scores import _harmless, gym


def test_the_install_command_where_the_package_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    data.gym_dataset.cache_clear()
    with pytest.raises(DataError, match="need the package: pip install reasoning-gym"):
        gym_prompt(["chain_sum"], 0, "train", 0)
    score = gym("1", "1", {"gym": {"dataset": "chain_sum", "config": "{}", "seed": 0, "index": 0}})
    assert not score.valid and "pip install reasoning-gym" in score.detail


@pytest.fixture
def package():
    return pytest.importorskip("reasoning_gym")


@pytest.fixture
def prompt(package):
    return gym_prompt(["chain_sum"], 0, "train", 0)


def test_a_prompt_is_a_pure_function(package):
    names = ["chain_sum", "word_ladder", "gsm_symbolic"]
    again = {index: gym_prompt(names, 3, "train", index) for index in reversed(range(12))}
    assert all(gym_prompt(names, 3, "train", index) == again[index] for index in range(12))
    assert len({p.messages for p in again.values()}) == 12
    assert [again[i].id for i in range(4)] == [
        *("gym/chain_sum/train/0", "gym/word_ladder/train/0", "gym/gsm_symbolic/train/0", "gym/chain_sum/train/1")
    ]
    assert again[0] != gym_prompt(names, 4, "train", 0)


def test_prompts_beyond_the_size_of_a_data_set(package):
    assert gym_prompt(["word_ladder"], 0, "train", 12_345).reference


def test_splits_share_no_question(package):
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    held_out = gym_prompts(["chain_sum"], 0, 15, config)
    questions = {p.messages[-1].content for p in held_out}
    assert len(questions) == 15
    assert gym_prompts(["chain_sum"], 0, 5, config) == held_out[:5]
    train = {gym_prompt(["chain_sum"], 1, "train", i, config).messages[-1].content for i in range(300)}
    assert len(train) > 50 and not train & questions


def test_a_small_space_is_used_up_and_then_refused(package, monkeypatch):
    monkeypatch.setattr(data, "MAX_DRAWS", 50)
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    with pytest.raises(DataError, match="'chain_sum' has no further question for the eval split"):
        gym_prompts(["chain_sum"], 0, 400, config)


@pytest.mark.parametrize(
    ("names", "config", "message"),
    [
        ([], {}, "at least one data set"),
        (["chain_sun"], {}, "no data set 'chain_sun'; did you mean 'chain_sum'?"),
        (["chain_sum"], {"nonsense": 1}, "refuses the config"),
        (["chain_sum"], {"min_terms": 5, "max_terms": 2}, "refuses the config"),
    ],
)
def test_bad_names_and_configs(package, names, config, message):
    with pytest.raises(DataError) as caught:
        gym_prompt(names, 0, "train", 0, config)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "name", ["chain_sum", "countdown", "spiral_matrix", "simple_integration", "sudoku", "syllogism"]
)
def test_gold_answers_score_1(package, name):
    for index in range(3):
        prompt = gym_prompt([name], 0, "train", index)
        context = json.loads(json.dumps(prompt.context))
        assert gym(prompt.reference, prompt.reference, context).value == 1
        assert gym(f"Well, <answer>\n{prompt.reference}\n</answer>", prompt.reference, context).value == 1
        assert gym("<answer>no</answer>", prompt.reference, context).value < 0.5


def test_only_data_sets_that_evaluate_are_guarded(package):
    prompt = gym_prompt(["propositional_logic"], 0, "train", 0)
    assert "evaluate" not in gym("(P ∧ Q)", prompt.reference, prompt.context).detail


def test_tag_option(prompt):
    response = f"<final>{prompt.reference}</final> <answer>x</answer>"
    assert gym(response, prompt.reference, prompt.context, tag="final").value == 1
    assert gym(response, prompt.reference, prompt.context).value < 1


@pytest.mark.parametrize("context", [{}, {"gym": None}, {"gym": "x"}, {"gym": {"dataset": "chain_sum"}}, {"gym": []}])
def test_an_incomplete_context_is_an_error(context):
    score = gym("1", "1", context)
    assert not score.valid and "must hold dataset, config, seed and index" in score.detail


def test_another_version_of_the_package_is_an_error(prompt):
    score = gym("1", "not its answer", prompt.context)
    assert not score.valid and "has another answer here" in score.detail


def test_a_scorer_that_fails(prompt, monkeypatch):
    dataset = data.gym_dataset(*[prompt.context["gym"][key] for key in ("dataset", "config", "seed")])

    def picky(answer, entry):
        if answer != entry["answer"]:
            raise IndexError("no such row")
        return 1.0

    monkeypatch.setattr(dataset, "score_answer", picky)
    score = gym("?", prompt.reference, prompt.context)
    assert score.value == 0 and "cannot read it: IndexError" in score.detail
    monkeypatch.setattr(dataset, "score_answer", lambda answer, entry: 1 / 0)
    score = gym("?", prompt.reference, prompt.context)
    assert not score.valid and "fails on its own answer: ZeroDivisionError" in score.detail


ATTACK = "__import__('pathlib').Path({path!r}).touch()"


@pytest.mark.parametrize("name", ["spiral_matrix", "string_insertion", "binary_matrix", "n_queens"])
@pytest.mark.parametrize("form", ["{}", " {}", "\n{}\n", "[{}]", "<answer>{}</answer>", "[x for x in [{}]]", "({},)"])
def test_no_answer_is_evaluated(package, tmp_path, name, form):
    prompt, trace = gym_prompt([name], 0, "train", 0), tmp_path / "trace"
    score = gym(form.format(ATTACK.format(path=str(trace))), prompt.reference, prompt.context)
    assert score.value == 0 and score.valid and not trace.exists()


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    "name", ["countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication"]
)
@pytest.mark.parametrize("form", ["{}", "({})!", "sqrt({})", 'sqrt("{}")', "x.{}", "1 + {}", "{} 1", "Symbol({})"])
def test_no_answer_reaches_the_evaluator_of_sympy(package, tmp_path, name, form):
    prompt, trace = gym_prompt([name], 0, "train", 0), tmp_path / "trace"
    score = gym(form.format(ATTACK.format(path=str(trace))), prompt.reference, prompt.context)
    assert score.value == 0 and score.valid and not trace.exists()


@pytest.mark.parametrize(
    ("answer", "evaluators", "harmless"),
    [
        ("anything at all()", set(), True),
        ("1 2 3", {"eval"}, True),  # no Python: its evaluation fails
        ("[1, 2, 3]", {"eval"}, True),
        ("[['a', \"b\"], {1: (2,)}]", {"eval"}, True),
        ('{"done": true, "left": null}', {"eval"}, True),
        ("print(1)", {"eval"}, False),
        ("[].append", {"eval"}, False),
        ("f'{1}'", {"eval"}, False),
        ("[0] * 9", {"eval"}, False),
        ("x**2 + 3*x - sin(x)/2 + C", {"sympy"}, True),
        ("(3 + 7) * -2.5", {"sympy"}, True),
        ("pi * sqrt(2)", {"sympy"}, True),
        ("x!", {"sympy"}, False),
        ("'x'", {"sympy"}, False),
        ("S('x')", {"sympy"}, False),
        ("x.y", {"sympy"}, False),
        ("x[0]", {"sympy"}, False),
        ("sin(x=1)", {"sympy"}, False),
        ("lambda: 1", {"sympy"}, False),
        ("exit", {"sympy"}, False),
        ("sin(sin)(x)", {"sympy"}, False),
        ("1 +", {"sympy"}, False),
        ("1" * 6000, {"sympy"}, False),
        ("(" * 3000, {"eval"}, True),
        ("-" * 4000 + "1", {"eval"}, False),
        ("\x00", {"eval"}, True),
        ("\ud800", {"eval"}, True),
    ],
)
def test_what_may_be_evaluated(answer, evaluators, harmless):
    assert _harmless(answer, frozenset(evaluators)) is harmless


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(response=st.text() | st.text("0123456789+-*/()[],x ") | st.text(st.characters(categories=["Cs"])))
def test_never_raises(response):
    pytest.importorskip("reasoning_gym")
    for name in ("chain_sum", "spiral_matrix", "countdown"):
        prompt = gym_prompt([name], 0, "train", 1)
        score = gym(response, prompt.reference, prompt.context)
        assert score.valid and 0 <= score.value <= 1


def test_a_stream_and_held_out_prompts() -> None:
    config = DataConfig(gym="chain_sum, basic_arithmetic", params={}, instruction="{question} Answer only.")
    stream = open_stream(config, 3)
    first, second = stream.at(0), stream.at(1)
    assert stream.size is None and stream.at(0) == first
    assert (first.context["gym"]["dataset"], second.context["gym"]["dataset"]) == ("chain_sum", "basic_arithmetic")
    assert first.messages[-1].content == f"{first.context['question']} Answer only."
    held_out = {p.context["question"] for p in eval_prompts(config, 3, 20)}
    assert len(held_out) == 20 and not held_out & {stream.at(i).context["question"] for i in range(100)}
    with pytest.raises(DataError, match="no data set 'chain_sun'"):
        open_stream(DataConfig(gym="chain_sum,chain_sun"), 0)
