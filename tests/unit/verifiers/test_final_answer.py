"""Where the answer of a response is found, in several languages, formats and degrees of chaos."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitae.errors import VerifierError
from kitae.verifiers.final_answer import (
    DEFAULT_ORDER,
    WAYS,
    boxed_answer,
    chosen_letter,
    clean,
    find_answers,
    hash_answer,
    last_expression,
    parse_order,
    phrase_answer,
    tagged_answer,
    without_lead,
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("no box here", None),
        (r"\boxed{12}", "12"),
        (r"\fbox{12}", "12"),
        (r"\framebox{12}", "12"),
        (r"\boxed 12", "12"),
        (r"\boxed 12.", "12"),
        ("\x08oxed{12}", "12"),
        (r"\boxed{\frac{\sqrt{2}}{3}}", r"\frac{\sqrt{2}}{3}"),
        (r"\boxed{\{1, \{2\}\}}", r"\{1, \{2\}\}"),
        (r"\boxed{ a } then \boxed{ b }", " b "),
        (r"\boxed{x = \boxed{5}}", "5"),
        (r"\boxed{1} and \boxed{2}", "1, 2"),
        (r"$\boxed{1}$, $\boxed{2}$, and $\boxed{3}$", "1, 2, 3"),
        (r"\boxed{1/2} or \boxed{0.5}", "1/2 or 0.5"),
        (r"\boxed{1}. Therefore \boxed{2}", "2"),
        (r"\boxed{1} \boxed{2}", "1 or 2"),
        (r"\boxed{1} und \boxed{2}", "1, 2"),
        (r"\boxed{1}和\boxed{2}", "1, 2"),
        (r"\boxed{5", None),
        (r"\boxed{4} and then \boxed{5", "4"),
        (r"\boxed{}", ""),
        ("\\boxed{\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
        (r"\boxedtext{5}", None),
        (r"\boxed{5} oops \boxed{}", "5"),
        (r"aaa\\boxed{123}", "123"),
        (r"\boxed{" + "1" * 5_000 + "}", None),
    ],
)
def test_boxed(text: str, answer: str | None) -> None:
    assert boxed_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 12", "12"),
        ("48 + 24 = 72\n#### 72", "72"),
        ("####72", "72"),
        ("#### 1,234\nBye", "1,234"),
        ("#### **12**", "12"),
        ("#### $12.50", "$12.50"),
        ("#### 1\n#### 2", "2"),
        ("#### Step 1: add\n1 + 2", None),
        ("#### 2. Add them up\nfine", None),
        ("##### 5", None),
        ("### 5", None),
        ("#### x = 5.", "x = 5"),
        ("####", None),
        ("#### ", None),
        ("#### 5!", "5!"),
        ("#### #### 42", "42"),
    ],
)
def test_hash(text: str, answer: str | None) -> None:
    assert hash_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>12</answer>", "12"),
        ("<answer>1</answer> no, <answer> 2 </answer>", "2"),
        (r"<answer>So \boxed{7}</answer>", "7"),
        ("<answer>12", None),
        ("12</answer>", None),
        ("</answer><answer>", None),
    ],
)
def test_tag(text: str, answer: str | None) -> None:
    assert tagged_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 12.", "12"),
        ("The answer is 12. Bye!", "12"),
        ("The answer is 12!", "12"),
        ("The answer is $5!$.", "5!"),
        ("Final Answer: The largest $n$ is 34.", "34"),
        ("The answer is between 41 and 42", "41 and 42"),
        ("The answer is that $n$ equals 12.", "12"),
        ("the final answer is: 12", "12"),
        ("Final Answer: The final answer is $12$. I hope it is correct.", "12"),
        ("**Answer:** 12", "12"),
        ("**Final answer**: 12", "12"),
        ("**Answer: 12**", "12"),
        ("Answer:\n\n12", "12"),
        ("The answer is:\n\\[ x = 5 \\]", "x = 5"),
        ("The answer would be 3.5 apples", "3.5 apples"),
        ("The answer to the question is 7", "7"),
        ("ANSWER = 7", "7"),
        ("The answer is $5$ and $6$.", "5, 6"),
        ("The answer is $5$ because $x=2$.", "5"),
        ("The answer is 12 because 3*4 = 12 and 2 is even.", "12"),
        ("The answer is that Tom has 12 apples", "12"),
        ("The answer is (C).", "(C)"),
        ("The answer is 5 or 6", "5 or 6"),
        ("The answer is 3.14 m. Done", "3.14 m"),
        ("The answer is 1. No, the answer is 2.", "2"),
        ("Die Antwort ist 12.", "12"),
        ("Die endgültige Antwort lautet: 12", "12"),
        ("Antwort: 12", "12"),
        ("La réponse est 12.", "12"),
        ("La réponse finale est : 12", "12"),
        ("La respuesta es 12.", "12"),
        ("La respuesta final es: 12", "12"),
        ("A resposta é 12.", "12"),
        ("La risposta è 12.", "12"),
        ("La risposta finale è: 12", "12"),
        ("Het antwoord is 12.", "12"),
        ("Svaret är 12.", "12"),
        ("Răspunsul este 12.", "12"),
        ("Ответ: 12", "12"),
        ("Ответ: 12.", "12"),
        ("Відповідь: 12", "12"),
        ("Odpowiedź: 12", "12"),
        ("Odpověď je 12.", "12"),
        ("Cevap: 12", "12"),
        ("Jawabannya adalah 12.", "12"),
        ("Đáp án là 12.", "12"),
        ("Câu trả lời là 12.", "12"),
        ("Jibu ni 12.", "12"),
        ("答案是12。", "12"),
        ("答案为 12", "12"),
        ("最终答案：12", "12"),
        ("所以答案是:$\\frac{1}{2}$。", "\\frac{1}{2}"),
        ("答えは12です。", "12です"),
        ("答え：12", "12"),
        ("정답은 12", "12"),
        ("답: 12", "12"),
        ("الجواب هو 12", "12"),
        ("الإجابة هي: 12", "12"),
        ("התשובה היא 12", "12"),
        ("उत्तर: 12", "12"),
        ("উত্তর: 12", "12"),
        ("సమాధానం: 12", "12"),
        ("คำตอบคือ 12", "12"),
        ("no phrase 12", None),
    ],
)
def test_phrase(text: str, answer: str | None) -> None:
    assert phrase_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("12", "12"),
        ("x^2 + 1", "x^2 + 1"),
        ("sqrt(2)", "sqrt(2)"),
        ("5 square feet", "5 square feet"),
        ("no solution", "no solution"),
        (r"\frac{270}7\text{ degrees}", r"\frac{270}7\text{ degrees}"),
        ("So it is 145 in all.", "145"),
        ("We add 2 and 3 to get 5", "5"),
        ("so 6*7 = 42", "42"),
        ("so we get 2 + 3", "2 + 3"),
        ("It costs $5 now and $6 later.", "$6"),
        ("Hence $x = 3$ is what we want.", "x = 3"),
        ("Since $x = 3$ the price is 15 dollars.", "15"),
        ("It grew to 1,234,567 people.", "1,234,567"),
        ("It is -3.5 there", "-3.5"),
        ("Model m2 has no answer", "Model m2 has no answer"),
        ("It is 50% of them", "50%"),
        ("It is about 1.5e-3 or so", "1.5e-3"),
        ("the coordinates are (2, 3)", "(2, 3)"),
        ("The set is {1, 2, 3}.", "{1, 2, 3}"),
        ("the solution is x > 4", "x > 4"),
        ("we need n ≥ 4", "n ≥ 4"),
        ("so x = - 4", "-4"),
        ("so the total - 12", "12"),
        ("we get 3√5", "3√5"),
        ("we get 3 sqrt 5", "3 sqrt 5"),
        ("it is equal to log_2 5", "log_2 5"),
        ("the time is 12:30", "12:30"),
        ("the probability is \\frac{3}{4}.", "\\frac{3}{4}"),
        ("Thus y=\\frac43.", "\\frac43"),
        ("Candidates: 1, 2, 3", "1, 2, 3"),
        ("hence x = 2 or x = 3", "x = 2 or x = 3"),
        ("we get 20 = A.", "20"),
        ("that makes $90 / 3 hours = $30/hour", "$30"),
        ("so it is 3*4m = 12m from there", "12 m"),
        ("Il y a 42 pommes.", "42"),
        ("因此，瑞秋的数学作业比阅读作业多 **3页**。", "3"),
        ("x=8입니다", "8"),
        ("\\begin{align*} a &= 5 + 7 \\\\ &= 12. \\end{align*}", "12"),
        ("how many $? just about 1$", "1"),
        ("", None),
    ],
)
def test_last(text: str, answer: str | None) -> None:
    assert last_expression(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("12", "12"),
        ("**12**.", "12"),
        ("`12`", "12"),
        ('"12"', "12"),
        ("p.m.", "p.m."),
        ("5!", "5!"),
        ("fine!", "fine"),
        ("12。", "12"),
        ("a...", "a..."),
    ],
)
def test_clean(text: str, answer: str) -> None:
    assert clean(text) == answer


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("I think it's (D).", "D"),
        ("The answer is for sure D, it can't be A or B", "D"),
        ("It's not A because it makes no sense, therefore I think it's B", "B"),
        ("Weighing the options...\n\nC", "C"),
        ("not (A), rather (C)", "C"),
        ("réponse est C non A", "C"),
        ("B。 不是 A", "B"),
        ("A or B", None),
        ("A number is what we want", None),
        ("It can't be A", None),
        ("no letter", None),
    ],
)
def test_chosen_letter(text: str, letter: str | None) -> None:
    assert chosen_letter(text) == letter


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\text{Answer: } 7", "7"),
        (r"\text{The answer is } 7", "7"),
        (r"\text{The answer is 7}", "7"),
        ("The final answer is: 7", "7"),
        (r"\text{approximately } 3", "3"),
        ("answer", "answer"),
        ("7", "7"),
    ],
)
def test_without_lead(text: str, answer: str) -> None:
    assert without_lead(text) == answer


def test_the_order_is_that_of_the_setting() -> None:
    text = r"\boxed{1} <answer>2</answer> The answer is 4." + "\n#### 3"
    assert list(find_answers(text, ("boxed", "tag", "hash", "phrase"))) == ["1", "2", "3", "4"]
    assert list(find_answers(text, ("phrase", "boxed"))) == ["4", "1"]


def test_thoughts_do_not_count() -> None:
    assert next(find_answers(r"<think>\boxed{1}</think> \boxed{2}", ("boxed",))) == "2"
    assert next(find_answers(r"<think>\boxed{1}</think> It is 2.", ("boxed",)), None) is None
    assert next(find_answers(r"<think>\boxed{1}</think>", ("boxed",))) == "1"


def test_settings_are_checked() -> None:
    assert parse_order(" boxed , last ") == ("boxed", "last")
    assert parse_order(DEFAULT_ORDER, strict=True) == ("boxed", "hash")
    for extract in ("", "box", "boxed,,magic"):
        with pytest.raises(VerifierError, match="extract must list some of"):
            parse_order(extract)
    with pytest.raises(VerifierError, match="strict extraction needs one of boxed, hash"):
        parse_order("phrase,last", strict=True)


@pytest.mark.parametrize(
    "unit", ["a", " ", "answer", "answer to ", "$", r"\[", r"\boxed{", "<answer>", "####", "1+", "1,", "="]
)
def test_long_texts_are_read_quickly(unit: str) -> None:
    start = time.process_time()
    list(find_answers(unit * (100_000 // len(unit)), tuple(WAYS)))
    assert time.process_time() - start < 20


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_never_raises(text: str) -> None:
    for answer in find_answers(text, tuple(WAYS)):
        assert answer == answer.strip() != ""
