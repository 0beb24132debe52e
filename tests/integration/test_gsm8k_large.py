"""GSM8K's problems with large numbers: what is replaced, what is computed anew, what is left out."""

import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "gsm8k_large.py"


@pytest.fixture(scope="module")
def large() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gsm8k_large", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_answers_are_those_of_the_new_numbers(large: ModuleType) -> None:
    question = "Ann sold clips to 48 friends, and half as many to 16 others, at 20% off on her 13th try. How many?"
    solution = "48/2 = <<48/2=24>>24, 24*16 = <<24*16=384>>384 #### 384"
    for seed in range(20):
        row = large.enlarged(question, solution, random.Random(seed))
        first, second, *others = large.NUMBER.findall(row["question"])
        assert int(first) >= 48 * large.GROWTH[0] and int(second) >= 16 * large.GROWTH[0]
        assert others == ["20", "13"]  # a share and a part of a word stay
        assert int(row["answer"]) == int(first) // 2 * int(second) and int(first) % 2 == 0


UNFIT = {
    "a hidden computation": ("Ann has 48 pens and loses 17 of them.", "<<31*10=310>>310 #### 310"),
    "from a day's number": ("On the 12th, Ann had 20 pens. Bob had 8 fewer.", "<<20+12=32>>32 #### 32"),
    "two places": ("Ann has 48 pens, loses 25 and gets 23.", "<<48-25=23>>23 <<23+23=46>>46 #### 46"),
    "rounded": ("Ann shares 47 pens among 13 friends.", "<<47/13=3.62>>3.62 #### 3.62"),
    "another answer": ("Ann has 48 pens and 25 caps.", "<<48+25=73>>73 #### 74"),
    "nothing to replace": ("Ann has 2 pens and 3 caps.", "<<2+3=5>>5 #### 5"),
    "no arithmetic": ("Ann has 48 pens.", "<<__import__('os')=48>>48 #### 48"),
}


@pytest.mark.parametrize("why", UNFIT)
def test_unsafe_problems_are_left_out(large: ModuleType, why: str) -> None:
    with pytest.raises(large.Unfit):
        large.enlarged(*UNFIT[why], random.Random(0))


def test_a_file_becomes_a_file(large: ModuleType, tmp_path: Path) -> None:
    rows = [{"question": q, "answer": a} for q, a in UNFIT.values()]
    rows.append({"question": "Ann has 48 pens and 25 caps. How many things?", "answer": "<<48+25=73>>73 #### 73"})
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("once", "again"):
        large.main(tmp_path / "in.jsonl", tmp_path / name / "out.jsonl")
    made = (tmp_path / "once" / "out.jsonl").read_text()
    assert made == (tmp_path / "again" / "out.jsonl").read_text()
    (line,) = made.splitlines()
    pens, caps = map(int, large.NUMBER.findall(json.loads(line)["question"]))
    assert json.loads(line)["answer"] == str(pens + caps)
