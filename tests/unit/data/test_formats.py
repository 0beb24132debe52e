"""Rows of known data sets: what the model is asked, what the verifier gets, and that gold answers score 1."""

import asyncio
import json
from pathlib import Path

import pytest

from kitae.config.recipe import load_config
from kitae.config.root import RLConfig
from kitae.data.config import DataConfig
from kitae.data.formats import FORMATS, Exercise, find_reader, read_row
from kitae.data.prompt_stream import eval_prompts, open_stream
from kitae.errors import ConfigError, DataError
from kitae.verifiers.pool import VerifierPool, validate

pytestmark = pytest.mark.usefixtures("warm_verifiers")

ROWS = {
    "math": [
        {"problem": "What is $1/2 + 1/2$?", "answer": "1", "level": 1},
        {"problem": "Half?", "solution": r"It is $\boxed{2}$, no, $\boxed{\frac{1}{2}}$."},
        {"problem": "How many?", "answer": 12},
    ],
    "mbpp": [
        {
            "text": "Write a function to double a number.",
            "code": "def double(x):\r\n\treturn 2 * x",
            "test_list": ["assert double(2) == 4", "assert double(limit) == 10"],
            "test_setup_code": "limit = 5",
        },
        {
            "prompt": "Write a function to find a square root.",
            "code": "import math\ndef root(x):\n    return math.sqrt(x)",
            "test_list": ["assert math.isclose(root(4), 2)"],
            "test_imports": ["import math"],
        },
    ],
    "svamp": [
        {"Body": "Jo has 3 pens", "Question": "How many pens?", "Answer": 3.0},
        {"Body": "Jo has 10 pens.", "Question": "How many pens?", "Answer": "10"},
    ],
    "humaneval": [
        {
            "prompt": 'def first(xs):\n    """The first.\n    >>> first([1, 2])\n    1\n    """\n',
            "canonical_solution": "    return xs[0]\n",
            "test": "def check(candidate):\n    assert candidate([3, 4]) == 3\n",
            "entry_point": "first",
        }
    ],
}


def write(path: Path, rows: object) -> str:
    text = json.dumps(rows) if path.suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows)  # type: ignore[attr-defined]
    path.write_text(text)
    return str(path)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("name", ROWS)
def test_gold_answers_score_1_and_others_do_not(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROWS[name])
    stream = open_stream(DataConfig(path=path, format=name, shuffle=False), 0)
    prompts = [stream.at(i) for i in range(len(ROWS[name]))]

    async def check() -> tuple[list[object], float]:
        async with VerifierPool(FORMATS[name].verifier, workers=1) as pool:
            assert all(pool.gold(prompt) for prompt in prompts)
            wrong = await pool.score("I do not know", prompts[0].reference, prompts[0].context)
            return list(await validate(pool, prompts)), wrong.value

    assert asyncio.run(check()) == ([], 0.0)


def test_what_the_model_is_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", ROWS["mbpp"])
    config = DataConfig(path=path, format="mbpp", shuffle=False, system="Be brief.", instruction="{question}\nGo.")
    prompt = open_stream(config, 0).at(0)
    asked = "Write a function to double a number. Your code should pass these tests:\n\nassert double(2) == 4\nassert"
    assert prompt.messages[0].content == "Be brief." and prompt.messages[1].content.startswith(asked)
    assert prompt.messages[1].content.endswith("\nGo.") and prompt.id == "a.json:1"
    assert prompt.context["question"].startswith(asked) and not prompt.context["question"].endswith("Go.")
    assert prompt.context["test_setup_code"] == "limit = 5", "columns are the verifier's context"


def test_instructions_without_their_empty_arguments() -> None:
    row = {
        "prompt": "Write.",
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{"num_words": None}, {"relation": "at least", "num_words": 3, "N": None}],
    }
    example = read_row(find_reader("ifeval"), row)
    first, second = example.reference["instructions"]
    assert first == {"id": "punctuation:no_comma", "kwargs": {}}
    assert second["kwargs"] == {"relation": "at least", "num_words": 3} and example.gold is None
    with pytest.raises(DataError, match="of one length, got 1 and 2"):
        read_row(find_reader("ifeval"), {**row, "instruction_id_list": ["a"]})


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("math", {"question": "q"}, "no column 'problem'; the row has 'question'"),
        ("math", {"problem": "q", "answer": None}, "must have an answer"),
        ("math", {"problem": "q", "answer": " "}, "must have an answer"),
        ("math", {"problem": "q", "solution": "it is 4"}, "must have an answer"),
        ("mbpp", {"text": "t"}, "no column 'test_list'"),
        ("mbpp", {"text": "t", "test_list": 4}, "TypeError"),
        ("ifeval", {"prompt": "p", "instruction_id_list": ["a"]}, "no column 'kwargs'"),
    ],
)
def test_bad_rows_are_named(name: str, row: dict[str, object], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [row])
    with pytest.raises(DataError) as caught:
        open_stream(DataConfig(path=path, format=name), 0)
    assert message in str(caught.value) and f"{path}:1: " in str(caught.value)


def test_bad_rows_can_be_left_out(tmp_path: Path) -> None:
    rows = [{"problem": str(i), "answer": None if i % 3 == 0 else str(i)} for i in range(9)]
    path = write(tmp_path / "a.json", rows)
    with pytest.raises(DataError, match=r"3 of 9 rows are bad; data\.skip_bad_rows=true leaves them out"):
        open_stream(DataConfig(path=path, format="math"), 0)
    stream = open_stream(DataConfig(path=path, format="math", skip_bad_rows=True, shuffle=False), 0)
    assert stream.size == 6 and [stream.at(i).reference for i in range(6)] == ["1", "2", "4", "5", "7", "8"]
    assert stream.at(0).id == "a.json:2"
    path = write(tmp_path / "b.json", rows[:1])
    with pytest.raises(DataError, match="1 of 1 rows"):
        open_stream(DataConfig(path=path, format="math", skip_bad_rows=True), 0)


def test_a_format_of_ones_own(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "def read(row):\n"
        "    if row['n'] == 13: raise ValueError('unlucky')\n"
        "    chat = [{'role': 'user', 'content': f\"What is {row['n']} + 1?\"}]\n"
        "    return {'question': chat, 'reference': row['n'] + 1, 'gold': f\"It is {row['n'] + 1}\"}\n"
        "def wrong(line): return None\n"
        "def nothing(row): return {}\n"
    )
    path = write(tmp_path / "a.jsonl", [{"n": 4}])
    prompt = open_stream(DataConfig(path=path, format=f"{own}:read"), 0).at(0)
    assert (prompt.reference, prompt.gold, prompt.context["question"]) == (5, "It is 5", "What is 4 + 1?")
    bad = write(tmp_path / "b.jsonl", [{"n": 13}])
    for data, function, message in (
        (bad, "read", "ValueError: unlucky"),
        (path, "wrong", "row"),
        (path, "nothing", "question"),
        (path, "missing", "needs a function 'missing'"),
    ):
        with pytest.raises(DataError, match=message):
            open_stream(DataConfig(path=data, format=f"{own}:{function}"), 0)


def test_settings(tmp_path: Path) -> None:
    def config(*overrides: str) -> RLConfig:
        recipe = tmp_path / "r.toml"
        recipe.write_text("")
        return load_config(recipe, overrides)

    assert config("data.path=a.jsonl", "data.format=mbpp").verifier.name == "code"
    assert config("data.path=a.jsonl", "data.format=ifeval", "verifier.name=exact").verifier.name == "exact"
    assert config("data.gym=chain_sum").verifier.name == "gym"
    assert config("data.task=instructions").verifier.name == "instructions"
    with pytest.raises(ConfigError, match=r"none of data\.path, hub and eval_path"):
        config("data.task=reverse", "data.format=math")
    with pytest.raises(ConfigError, match="finds the reference itself"):
        config("data.path=a.jsonl", "data.format=math", "data.answer_after=####")
    with pytest.raises(DataError, match=r"must be one of math, svamp, mbpp.*did you mean 'mbpp'"):
        find_reader("mbp")


def test_a_known_set_may_judge_a_generated_task(tmp_path: Path) -> None:
    row = {"prompt": "Write.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    path = write(tmp_path / "a.jsonl", [row])
    (prompt,) = eval_prompts(DataConfig(task="instructions", eval_path=path, format="ifeval"), 0, 5)
    assert prompt.messages[-1].content == "Write." and prompt.reference["instructions"]


def test_examples_are_plain() -> None:
    assert Exercise("q", 1) == Exercise(question="q", reference=1, gold=None)
