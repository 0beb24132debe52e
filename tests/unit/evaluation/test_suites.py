"""Suites: found by name, read from files as they are published, asked and judged as they say."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kitae.config.recipe import parse_config
from kitae.config.root import RLConfig
from kitae.data.config import DataConfig
from kitae.errors import ConfigError, DataError
from kitae.evaluation.suites import KNOWN, Suite, find_suites, own_suite
from kitae.types import Prompt, Score

pytestmark = pytest.mark.usefixtures("warm_verifiers")

ROWS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "gsm8k": ("test.jsonl", [{"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}]),
    "svamp": ("test.jsonl", [{"Body": "He has 2 books", "Question": "How many books?", "Answer": 2.0, "ID": "c-1"}]),
    "math500": ("test.jsonl", [{"problem": "What is half?", "answer": "\\frac{1}{2}", "solution": "…"}]),
    "mbpp": (
        "mbpp.jsonl",
        [
            {"task_id": i, "text": "Double it.", "code": "def f(x):\n  return 2*x", "test_list": ["assert f(2) == 4"]}
            for i in (10, 11, 510, 511)
        ],
    ),
    "humaneval": (
        "HumanEval.jsonl",
        [
            {
                "task_id": "HumanEval/0",
                "prompt": "def one():\n    '''One.'''\n",
                "canonical_solution": "    return 1\n",
                "test": "def check(candidate):\n    assert candidate() == 1\n",
                "entry_point": "one",
            }
        ],
    ),
    "ifeval": (
        "input_data.jsonl",
        [{"prompt": "Write.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}],
    ),
    "ifbench": (
        "IFBench_test.jsonl",
        [{"prompt": "Write.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}],
    ),
}
RIGHT = {
    "gsm8k": "Easy.\n#### 4",
    "svamp": "#### 2",
    "math500": "So $\\boxed{0.5}$.",
    "mbpp": "```python\ndef f(x):\n    return x + x\n```",
    "humaneval": "```python\ndef one():\n    return 1\n```",
    "ifeval": "Words without any.",
    "ifbench": "Words without any.",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """All public test sets, with a problem or two, as their authors publish them."""
    for name, (file, rows) in ROWS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def judge(suite: Suite, prompt: Prompt, *responses: str) -> list[Score]:
    async def body() -> list[Score]:
        async with suite.pool(workers=1) as pool:
            return [await pool.score(text, prompt.reference, prompt.context) for text in responses]

    return asyncio.run(body())


def test_every_public_suite_has_a_row_here() -> None:
    assert ROWS.keys() == RIGHT.keys() == KNOWN.keys()


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("name", KNOWN)
def test_a_public_suite_is_read_asked_and_judged(name: str, folder: Path) -> None:
    (suite,) = find_suites([name], str(folder), None)
    prompt = suite.prompts(seed=0)[0]
    asked = prompt.messages[-1].content
    assert KNOWN[name].data.get("instruction", "{question}").partition("{question}")[2].strip() in asked
    right, wrong = judge(suite, prompt, RIGHT[name], "None, I fear, of these")
    assert (right.value, right.outcome) == (1.0, "scored"), right.detail
    assert (wrong.value, wrong.outcome) == (0.0, "scored"), wrong.detail
    labels = {scoring.label for scoring in suite.scorings}
    assert len(labels) == 1 or labels <= right.components.keys()


def test_maths_is_judged_strictly_and_by_the_last_number(folder: Path) -> None:
    (suite,) = find_suites(["gsm8k"], str(folder), None)
    (prompt,) = suite.prompts(0)
    found = judge(suite, prompt, "#### 4", "That makes 4 books.", "#### 5\nNo: 4", "\\boxed{4}")
    assert [(s.components["strict"], s.components["last"]) for s in found] == [(1, 1), (0, 1), (0, 0), (1, 1)]
    assert [s.value for s in found] == [s.components["strict"] for s in found]


def test_instructions_are_judged_strictly_and_loosely(folder: Path) -> None:
    (suite,) = find_suites(["ifeval"], str(folder), None)
    (score,) = judge(suite, suite.prompts(0)[0], "Sure, here it is:\nWords without any.")
    assert (score.components["strict"], score.components["loose"]) == (0, 1)


def test_mbpp_is_its_test_split_alone(folder: Path) -> None:
    (suite,) = find_suites(["mbpp"], str(folder), None)
    assert sorted(p.context["task_id"] for p in suite.prompts(0)) == [11, 510]


def test_svamp_asks_story_and_question(folder: Path) -> None:
    (suite,) = find_suites(["svamp"], str(folder), None)
    (prompt,) = suite.prompts(0)
    assert prompt.messages[-1].content.startswith("He has 2 books. How many books?\n")
    assert prompt.reference == "2"


def test_without_a_folder_the_hub_is_named() -> None:
    for name, suite in zip(KNOWN, find_suites(KNOWN, None, None), strict=True):
        assert (suite.data.hub, suite.data.path) == (KNOWN[name].hub, None)
        assert suite.label == f"eval:{name}"


def test_a_file_of_the_suite_s_name_will_do(tmp_path: Path) -> None:
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps(ROWS["gsm8k"][1][0]) + "\n")
    (suite,) = find_suites(["gsm8k"], str(tmp_path), None)
    assert len(suite.prompts(0)) == 1


def test_fewer_problems_are_the_first_of_all(tmp_path: Path) -> None:
    rows = [{"question": f"{i}?", "answer": f"#### {i}"} for i in range(50)]
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (suite,) = find_suites(["gsm8k"], str(tmp_path), None)
    ids = [p.id for p in suite.prompts(3)]
    assert len(set(ids)) == 50 and ids != sorted(ids)
    few = Suite(suite.name, suite.data, suite.scorings, 8, count=7)
    assert [p.id for p in few.prompts(3)] == ids[:7]
    assert [p.id for p in few.prompts(4)] != ids[:7]


def test_generated_suites_are_held_out_and_judged_by_their_task() -> None:
    suites = find_suites(["puzzles", "reverse"], None, None)
    assert [s.name for s in suites] == ["countdown", "knights-and-knaves", "reverse"]
    reverse = suites[-1]
    prompt = Suite(reverse.name, reverse.data, reverse.scorings, 16, held_out=True, count=3).prompts(0)[2]
    assert prompt.id == "reverse/eval/2"
    assert judge(reverse, prompt, str(prompt.reference))[0].value == 1


def test_gym_needs_its_package_or_makes_its_problems() -> None:
    (suite,) = find_suites(["gym:chain_sum"], None, None)
    assert (suite.data.gym, suite.verifier[0], suite.held_out) == ("chain_sum", "gym", True)


@pytest.fixture
def config() -> RLConfig:
    values = {
        "run": {"name": "mine"},
        "data": {"task": "reverse", "instruction": "Do: {question}"},
        "verifier": {"params": {"ignore_case": True}, "workers": 1, "timeout": 3.0},
        "sampling": {"max_tokens": 9, "stop": ["END"]},
    }
    return parse_config(values)


def test_one_s_own_task(config: RLConfig) -> None:
    (suite,) = find_suites(["own"], None, config)
    assert suite == own_suite(config)
    assert (suite.name, suite.label, suite.max_tokens, suite.stop) == ("mine", "eval", 9, ("END",))
    assert (suite.verifier, suite.workers, suite.timeout) == (("exact", {"ignore_case": True}), 1, 3.0)


def test_a_file_of_one_s_own_is_read_and_judged_as_the_run_s(config: RLConfig, tmp_path: Path) -> None:
    path = tmp_path / "more.jsonl"
    path.write_text(json.dumps({"question": "Who?", "answer": "me"}) + "\n")
    (suite,) = find_suites([str(path)], None, config)
    (prompt,) = suite.prompts(0)
    assert (suite.name, suite.label, prompt.messages[-1].content) == ("more", "eval:more", "Do: Who?")
    assert judge(suite, prompt, "ME")[0].value == 1


def test_a_recipe_is_a_suite(tmp_path: Path) -> None:
    path = tmp_path / "backwards.toml"
    path.write_text('[data]\ntask = "reverse"\n[sampling]\nmax_tokens = 11\n')
    (suite,) = find_suites([str(path)], None, None)
    assert (suite.name, suite.label, suite.max_tokens, suite.held_out) == ("backwards", "eval:backwards", 11, True)


@pytest.mark.parametrize(
    ("names", "make", "message"),
    [
        (["gsm8"], lambda f: f, "got 'gsm8'; did you mean 'gsm8k'?"),
        (["gsm8k", "gsm8k"], lambda f: f, "each suite is asked once, got 'gsm8k' twice"),
        (["gsm8k"], lambda f: f / "nowhere", "must name a folder, got"),
        (["gsm8k"], lambda f: f / "svamp", "looked for gsm8k/test.jsonl, gsm8k/main/test-*.parquet, gsm8k.jsonl"),
        (["own"], lambda f: f, "suite 'own' is read and judged as a run's or recipe's own data is, got neither"),
        (["nothing.toml"], lambda f: f, "no recipe file nothing.toml"),
    ],
)
def test_what_is_no_suite(names: list[str], make: Callable[[Path], Path], message: str, folder: Path) -> None:
    with pytest.raises((ConfigError, DataError)) as error:
        find_suites(names, str(make(folder)), None)
    assert message in str(error.value)


def test_a_file_that_is_not_there(config: RLConfig) -> None:
    with pytest.raises(DataError, match=r"suite 'none\.jsonl' must name a file, but nothing is there"):
        find_suites(["none.jsonl"], None, config)


def test_two_files_for_one_suite(tmp_path: Path) -> None:
    (tmp_path / "gsm8k" / "main").mkdir(parents=True)
    for number in (0, 1):
        (tmp_path / "gsm8k" / "main" / f"test-{number}.parquet").touch()
    with pytest.raises(DataError, match="must be one file, got 2 that match"):
        find_suites(["gsm8k"], str(tmp_path), None)


def test_a_test_set_without_rows(tmp_path: Path) -> None:
    (tmp_path / "mbpp.jsonl").write_text(json.dumps(ROWS["mbpp"][1][0]) + "\n")
    (suite,) = find_suites(["mbpp"], str(tmp_path), None)
    with pytest.raises(DataError, match=r"no row of .*mbpp\.jsonl is in the test set"):
        suite.prompts(0)


def test_the_data_config_of_a_suite_is_valid_without_a_hub() -> None:
    assert DataConfig(**KNOWN["gsm8k"].data, hub="x/y").answer_after == "####"
