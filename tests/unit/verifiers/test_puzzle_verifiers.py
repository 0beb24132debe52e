import random
import re
import time
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitae.verifiers.puzzle_checks import countdown, knights_knaves

PEOPLE = {"Alice": "knight", "Bob": "knave", "Carol": "knight"}
RIGHT = "Alice is a knight, Bob is a knave, Carol is a knight"


@pytest.mark.parametrize(
    "response",
    [
        RIGHT,
        RIGHT + ".",
        RIGHT.upper(),
        "Alice is a knight, Bob is a knave, and Carol is a knight.",
        "(1) Alice is a knight\n(2) Bob is a knave\n(3) Carol is a knight",
        "1. Alice: knight\n2. Bob: knave\n3. Carol: knight",
        "- **Alice**: Knight\n- **Bob**: Knave\n- **Carol**: Knight",
        "| Name | Role |\n|---|---|\n| Alice | Knight |\n| Bob | Knave |\n| Carol | Knight |",
        "Alice → knight\nBob → knave\nCarol → knight",
        "Alice=knight; Bob=knave; Carol=knight",
        "Alice (knight), Bob (knave), Carol (knight)",
        '{"Alice": "knight", "Bob": "knave", "Carol": "knight"}',
        "Knights: Alice, Carol. Knaves: Bob",
        "Knights: Alice, Carol\nKnaves: Bob",
        "Knaves: Bob; Knights: Carol and Alice",
        "**Knights:**\n- Alice\n- Carol\n\n**Knaves:**\n- Bob",
        "The knights are Alice and Carol, and the knave is Bob.",
        "Alice and Carol are knights; Bob is a knave.",
        "Both Alice and Carol are knights, while Bob is a knave.",
        "Alice and Carol are knights, but Bob is not a knight.",
        "Alice isn't a knave, Bob is a liar and Carol is a truth-teller.",
        "Alice, Bob and Carol are knight, knave and knight respectively.",
        "Bob must be a knave. Alice is a knight, not a knave. Carol is a knight because knaves lie.",
        "Alice is a knight, because if Bob were a knight they would agree. Bob is a knave. Carol is a knight.",
        "Bob says Alice is a knave, but Alice is a knight. Bob is a knave and Carol is a knight.",
        "If Alice is a knave then Bob is a knight. No!\nAlice is a knight.\nBob is a knave.\nCarol is a knight.",
        "Suppose Alice is a knave. Contradiction.\n\nAlice is a knight, Bob is a knave, Carol is a knight",
        "Alice is a knave? No: Bob is a knight? No.\nFinal answer: " + RIGHT,
        f"Carol is a knave at first sight.\n### Conclusion:\n{RIGHT}",
        f"<think>Alice is a knave</think><answer>{RIGHT}</answer>",
        rf"\boxed{{\text{{{RIGHT}}}}}",
        r"Alice is a \boxed{knight}, Bob is a \boxed{knave}, Carol is a \boxed{knight}.",
        f"{RIGHT}. This solution is consistent.",
        f"{RIGHT}. I hope the answer: helps!",
    ],
)
def test_knights_knaves_right(response: str) -> None:
    assert knights_knaves(response, PEOPLE, {}).value == 1


@pytest.mark.parametrize(
    ("response", "right", "answered"),
    [
        ("", 0, 0),
        ("I do not know.", 0, 0),
        ("Alice is a knight.", 1, 1),
        ("Alice is a knave, Bob is a knight, Carol is a knave", 0, 3),
        ("Alice is a knight, Bob is a knight, Carol is a knight", 2, 3),
        ("Alice, Bob and Carol are knights", 2, 3),
        ("Knights: Alice, Bob, Carol", 2, 3),
        ("Alice is a knight or a knave, Bob is a knave, Carol is a knight", 2, 2),
        ("Alice: knight/knave, Bob: knave, Carol: knight", 2, 2),
        ("Answer: Alice is a knight, Alice is a knave, Bob is a knave, Carol is a knight", 2, 3),
        (f"If {RIGHT}", 0, 0),
        (f"Bob says {RIGHT}", 0, 0),
        ("If Bob is a knight, Alice is a knave because Carol is a knight", 0, 0),
        ("If Bob is a knave, Alice is a knave, but Alice is a knight", 0, 0),
        ("Alice is a knight if Bob is a knave", 0, 0),
        ("Bob says Carol is a knight because Alice is a knight", 0, 0),
        (f"<answer>I pass</answer> {RIGHT}", 0, 0),
        (f"{RIGHT} <answer>Alice is a knave, Bob is a knave, Carol is a knight</answer>", 2, 3),
        ("Alicent is a knight, Bobby is a knave, Caroline is a knight", 0, 0),
        ("knight knave knight", 0, 0),
        ("Alice is not a knight, Bob is a knave, Carol is a knight", 2, 3),
    ],
)
def test_knights_knaves_wrong(response: str, right: int, answered: int) -> None:
    score = knights_knaves(response, PEOPLE, {})
    assert score.value == 0 and score.valid and score.detail.startswith("wrong: ")
    assert score.components == {"right": right / 3, "answered": answered / 3}
    assert knights_knaves(response, PEOPLE, {}, credit="share").value == right / 3


@pytest.mark.parametrize(
    "reference",
    [
        RIGHT,
        RIGHT + ".",
        "Alice is a knight, Bob is a knave, and Carol is a knight.",
        "(1) Alice is a knight\n(2) Bob is a knave\n(3) Carol is a knight",
        "Alice: knight\nBob: knave\nCarol: knight",
        "Alice is a knight, Bob is not a knight, Carol is a knight",
        {"Alice": True, "Bob": False, "Carol": True},
        {"Alice": "Knight", "Bob": "Knave", "Carol": "knight"},
        '{"Alice": "knight", "Bob": "knave", "Carol": "knight"}',
    ],
)
def test_knights_knaves_reference(reference: Any) -> None:
    assert knights_knaves(RIGHT, reference, {}).value == 1
    assert knights_knaves(RIGHT.replace("Bob is a knave", "Bob is a knight"), reference, {}).value == 0


@pytest.mark.parametrize(
    "reference", ["", "Alice", {}, {"Alice": "queen"}, {"Alice": None}, None, 3, "{", "a knight", []]
)
def test_knights_knaves_refuses_a_reference_that_is_none(reference: Any) -> None:
    score = knights_knaves(RIGHT, reference, {})
    assert not score.valid and "must say who is a knight or a knave" in score.detail


def test_knights_knaves_options() -> None:
    reference = "Ann is a sage, Bo is a fool"
    assert knights_knaves("Bo is a fool and Ann is a sage.", reference, {}, knight="sage", knave="fool").value == 1
    assert (
        knights_knaves("Sages: Ann. Fools: Bo.", {"Ann": True, "Bo": False}, {}, knight="sage", knave="fool").value == 1
    )
    assert not knights_knaves(RIGHT, PEOPLE, {}, credit="some").valid  # type: ignore[arg-type]


def test_names_in_other_scripts() -> None:
    people, words = {"Иван": True, "Ольга": False}, {"knight": "рыцарь", "knave": "лжец"}
    assert knights_knaves("Иван is a knight, Ольга is a knave", people, {}).value == 1
    assert knights_knaves("Иван - рыцарь, Ольга - лжец", people, {}, **words).value == 1  # type: ignore[arg-type]


TASK = {"numbers": [25, 7, 50, 3], "target": 128}


@pytest.mark.parametrize(
    "response",
    [
        "25*7-50+3",
        "25 * 7 - 50 + 3 = 128",
        "128 = 25 * 7 - 50 + 3",
        "25×7−50+3",
        "25·7–50+3",
        "(25 ∗ 7) - (50 - 3)",
        "[25*7]-(50-3)",
        "-50 + 25*7 + 3",
        "3 - 50 + 25*7",
        "<answer>25*7-50+3</answer>",
        "<answer> (25 * 7) - 50 + 3 = 128 </answer>",
        "<think>25*7 = 175</think>\n<answer>25*7-50+3</answer>",
        r"\boxed{25 \times 7 - 50 + 3}",
        r"$$\boxed{25 \cdot 7 - 50 + 3 = 128}$$",
        r"\(25 \times 7 - \left(50 - 3\right)\)",
        "So we get 25*7 - 50 + 3 = 128.",
        "Final answer: `25 * 7 - 50 + 3`",
        "**Solution:** (25 * 7) + 3 - 50 = 128\n\nThis uses all 4 numbers.",
        "25*7-50+3 = 175 - 50 + 3 = 125 + 3 = 128",
        "First 25*7 = 175.\n\n**25 × 7 − 50 + 3 = 128**",
        r"25 * 7 - 50 + 3 = 128, so \boxed{128}",
        "Try 50*3 = 150, too much.\nThe answer is (25*7)-(50-3).",
        "（25×7）－50＋3＝128",
    ],
)
def test_countdown_right(response: str) -> None:
    score = countdown(response, TASK, {})
    assert score.value == 1 and score.components == {"valid": 1.0, "hit": 1.0}


@pytest.mark.parametrize(
    ("response", "valid", "detail"),
    [
        ("", 0, "no expression"),
        ("I give up", 0, "no expression"),
        ("128", 0, "the target, but no expression"),
        ("25*7-50", 1, "has 125, not 128"),
        ("25*7-50+3+3", 0, "uses 3, which is not left"),
        ("25*7-47", 0, "uses 47"),
        ("130-2", 0, "uses 130, 2"),
        ("25*7-50+3 = 129", 1, "has different values"),
        ("25*7-50+3 = 25*7", 1, "has different values"),
        ("25*7/0", 0, "division by zero"),
        ("25/(7-7)", 0, "division by zero"),
        ("25**7", 0, "unexpected '*'"),
        ("9**9**9", 0, "unexpected '*'"),
        ("25^7", 0, "no expression"),
        ("25 7 - 50", 0, "unexpected '7'"),
        ("(25*7-50+3", 0, "not complete"),
        ("25*7-50+3)", 0, "was not opened"),
        ("25*7-50+", 0, "not complete"),
        ("()", 0, "no expression"),
        ("257-50+3", 0, "uses 257"),
        ("__import__('os').system('echo 1+1')", 0, ""),
        ("1e3", 0, ""),
        ("=", 0, "no expression"),
    ],
)
def test_countdown_wrong(response: str, valid: float, detail: str) -> None:
    score = countdown(response, TASK, {})
    assert score.value == 0 and score.valid and detail in score.detail
    assert score.components == {"valid": valid, "hit": 0.0}
    assert countdown(response, TASK, {}, partial=0.1).value == (0.1 if valid else 0)


def test_countdown_in_fractions() -> None:
    assert countdown("8/(3-8/3)", {"nums": [3, 3, 8, 8], "target": 24}, {}).value == 1
    assert countdown(r"\frac{8}{3 - \frac{8}{3}}", {"nums": [3, 3, 8, 8], "target": 24}, {}).value == 1
    assert countdown(r"\dfrac{8}{3-\tfrac{8}{3}}", {"nums": [3, 3, 8, 8], "target": 24}, {}).value == 1
    assert countdown(r"\frac{50}{25} + 3", {"nums": [50, 25, 3], "target": 5}, {}).value == 1
    assert countdown("1/3*3", {"nums": [1, 3, 3], "target": 1}, {}).value == 1
    assert countdown("1/3", {"nums": [1, 3], "target": "1/3"}, {}).value == 1


@pytest.mark.parametrize(
    ("response", "numbers", "target"),
    [
        ("2(3+4)", [2, 3, 4], 14),
        ("(3+4)2", [2, 3, 4], 14),
        ("(44)(1)+19+35", [44, 1, 19, 35], 98),
        ("44x1+19 X 35", [44, 1, 19, 35], 709),
        ("44 + 19 + 35 (which is 98)", [44, 19, 35], 98),
    ],
)
def test_countdown_reads_products_and_remarks(response: str, numbers: list[int], target: int) -> None:
    task = {"numbers": numbers, "target": target}
    assert countdown(f"<answer>{response}</answer>", task, {}).value == 1
    assert countdown(f"<answer>{response}</answer>", task | {"target": target + 1}, {}).value == 0


@pytest.mark.parametrize(
    ("verifier", "reference", "right", "wrong"),
    [
        (countdown, {"numbers": [44, 19, 35], "target": 98}, "44+19+35", "44+19+34"),
        (knights_knaves, PEOPLE, RIGHT, RIGHT.replace("Alice is a knight", "Alice is a knave")),
    ],
)
def test_thoughts_are_no_answer(verifier: Any, reference: Any, right: str, wrong: str) -> None:
    for thought in (right, f"The answer is: {right}", rf"\boxed{{{right}}}", f"<answer>{right}</answer>"):
        assert verifier(f"<think>{thought}</think>\n{wrong}", reference, {}).value == 0
        assert verifier(f"<think>{thought}</think>\nI give up.", reference, {}).value == 0
        assert verifier(f"<think>{thought}", reference, {}).value == 0
    assert verifier(f"<think>{wrong}</think>\n{right}", reference, {}).value == 1


def test_countdown_use_all() -> None:
    task = {"numbers": [2, 3, 5], "target": 6}
    assert countdown("2*3", task, {}).value == 1
    score = countdown("2*3", task, {}, use_all=True)
    assert score.value == 0 and score.detail == "does not use 5"
    assert countdown("6", {"numbers": [6, 3], "target": 6}, {}).value == 1


@pytest.mark.parametrize(
    ("reference", "context"),
    [
        ({"numbers": [3, 7, 25], "target": 46}, {}),
        ({"nums": ["3", 7, 25.0], "target": "46"}, {}),
        ('{"numbers": [3, 7, 25], "target": 46}', {}),
        (46, {"nums": [3, 7, 25]}),
        ("46", {"numbers": [3, 7, 25]}),
        ("25 + 3 * 7 = 46", {}),
        ("46 = 25 + 3 × 7", {}),
    ],
)
def test_countdown_reference(reference: Any, context: dict[str, Any]) -> None:
    assert countdown("7 * 3 + 25", reference, context).value == 1
    assert countdown("7 * 3 + 26", reference, context).value == 0


@pytest.mark.parametrize(
    "reference",
    [None, "", "46", 46, "25 + 3 * 7", "25 + 3 = 46", {}, {"numbers": [1]}, {"target": "x", "nums": [1]}, "{", []],
)
def test_countdown_refuses_a_reference_that_is_none(reference: Any) -> None:
    score = countdown("1", reference, {})
    assert not score.valid and "must give numbers and a target" in score.detail


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_countdown_evaluates_as_python_does(seed: int) -> None:
    rng = random.Random(seed)
    numbers = [rng.randint(1, 20) for _ in range(rng.randint(1, 6))]
    texts = [f"F({number})" for number in numbers]
    while len(texts) > 1:
        rng.shuffle(texts)
        joined = f"{texts.pop()} {rng.choice('+-*/')} {texts.pop()}"
        texts.append(f"({joined})" if rng.random() < 0.5 else joined)
    try:
        target = eval(texts[0], {"F": Fraction})
    except ZeroDivisionError:
        return
    response = re.sub(r"F\((\d+)\)", r"\1", texts[0])
    assert countdown(response, {"numbers": numbers, "target": str(target)}, {}, use_all=True).value == 1
    assert countdown(response, {"numbers": numbers, "target": str(target + 1)}, {}).value == 0


_TEXT = (
    st.text()
    | st.text("0123456789+-*/()= ×\n.")
    | st.text(st.characters(categories=["Cs", "Nd", "Sm"]))
    | st.lists(
        st.sampled_from(
            ["Alice", "Bob", " is a ", "knight", "knave", ", ", ": ", " and ", " not ", "answer: ", "\n", " or "]
        )
    ).map("".join)
)


@settings(max_examples=300, deadline=None)
@given(response=_TEXT, reference=_TEXT)
def test_never_raises(response: str, reference: str) -> None:
    assert knights_knaves(response, PEOPLE, {}).value in (0, 1)
    assert 0 <= knights_knaves(response, PEOPLE, {}, credit="share").value <= 1
    assert countdown(response, TASK, {}).value in (0, 1)
    knights_knaves(response, reference, {})
    countdown(response, reference, {})


@pytest.mark.parametrize(
    "unit",
    [
        "(",
        "-",
        "1+",
        "1",
        "=",
        "1=",
        "Alice ",
        "knight ",
        "Alice is a knight, ",
        "answer: ",
        "\\boxed{",
        "<answer>",
        "\n",
        " ",
        "not ",
        "1\n",
    ],
)
def test_time_is_bounded(unit: str) -> None:
    response = unit * (100_000 // len(unit))
    start = time.process_time()
    knights_knaves(response, PEOPLE, {})
    countdown(response, TASK, {})
    assert time.process_time() - start < 20
