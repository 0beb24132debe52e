import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitae.verifiers.plain_text import after_thought, choice, exact, f1, normalised, number, regex, tokens


@pytest.mark.parametrize(
    ("response", "reference", "value"),
    [
        ("56, 34, 12", "56, 34, 12", 1),
        ("  56, 34, 12\n\n", "56, 34, 12", 1),
        ("56, 34, 12", "\t56, 34, 12 ", 1),
        ("56,34,12", "56, 34, 12", 0),
        ("56, 34, 12.", "56, 34, 12", 0),
        ("Yes", "yes", 0),
        ("12", 12, 1),
        ("12.0", 12, 0),
        ("True", True, 1),
        ("None", None, 1),
        ("[1, 2]", [1, 2], 1),
        ("", "", 1),
        ("", "a", 0),
        ("é", "e\u0301", 0),
        ("<think>Yes or no?</think>\nYes", "Yes", 1),
        ("<think>Yes</think>No", "Yes", 0),
        ("<think>Yes", "Yes", 0),
    ],
)
def test_exact(response: str, reference: Any, value: float) -> None:
    assert exact(response, reference, {}).value == value


@pytest.mark.parametrize(
    ("response", "reference", "value"), [("YES ", "yes", 1), ("Straße", "STRASSE", 1), ("no", "yes", 0)]
)
def test_exact_ignore_case(response: str, reference: str, value: float) -> None:
    assert exact(response, reference, {}, ignore_case=True).value == value


@pytest.mark.parametrize(
    ("response", "reference"),
    [
        # what a number looks like
        ("12", "12"),
        ("12", 12),
        ("12.0", 12),
        ("12.50", 12.5),
        ("007", 7),
        ("+3", 3),
        ("-3", -3),
        ("\u22123", -3),
        (".5", 0.5),
        ("-.5", "-0.5"),
        ("1,234", 1234),
        ("1,234,567.89", "1234567.89"),
        ("1234", "1,234"),
        ("$5.00", 5),
        ("-$5", -5),
        ("$-5$", -5),
        (r"\$18", 18),
        ("€7", "7"),
        ("50%", 50),
        (r"50\%", 50),
        ("50 %", "50%"),
        ("3e5", 300000),
        ("1.5E-3", "0.0015"),
        ("0.00001", 1e-05),
        ("10000000000000000000000", 1e22),
        ("0.1", 0.1),
        ("0", 0),
        ("-0", 0),
        ("123456789012345678901234567890.1", "123456789012345678901234567890.1"),
        # the last one in the text
        ("It is 12.", 12),
        ("It is 12!", 12),
        ("First 3, then 4, so 7", 7),
        ("3 + 4 = 7", 7),
        ("1,2,3", 3),
        ("(-3)", -3),
        ("x=-3", -3),
        ("**42**", 42),
        ("`42`", 42),
        ("_42_", 42),
        ("5 m2", 5),
        ("5kg", 5),
        ("7 cups of H2O", 7),
        ("so...12", 12),
        ("version 1.2.3", 1.2),
        ("答案是12", 12),
        ("12\n\n", 12),
        # marks come first
        ("#### 72", 72),
        ("6 * 12 = 72\n#### 72\nThanks for the 5 stars", 72),
        ("#### 1,234\r\nand 5", 1234),
        ("#### -$3.\n4", -3),
        ("#### Step 3\nHence 42", 42),
        ("#### 2. Add\nHence 42", 42),
        ("The answer is 5. I used 2 steps.", 5),
        ("The answer is: 5 apples for 3 children", 5),
        ("the ANSWER IS $5.50, with 3 left", 5.5),
        ("The answer is 2 + 3 = 5 apples. Check 9.", 5),
        ("**Answer:** 7\n\nNote 3", 7),
        ("**Answer**: 7\n\nNote 3", 7),
        ("Answer:\n7\nNote 3", 7),
        ("The answer is 4. No: the answer is 5. Step 9.", 5),
        ("The answer is five. There were 3", 3),
        (r"So \boxed{1,234}, after 7 steps", 1234),
        (r"The answer is \boxed{12}. Checked 3 times.", 12),
        (r"\boxed{1{,}234}", 1234),
        (r"\boxed{1,\!234}", 1234),
        (r"\boxed{1\,234}", 1234),
        (r"\boxed{3 \text{ cm}}", 3),
        (r"\boxed{30^\circ}", 30),
        (r"\boxed{5\%}", 5),
        ("The answer is 7 since 3 + 4 = 7", 7),
        ("The answer is 5, since x = 2y", 5),
        ("The answer is x = 12", 12),
        ("The answer is 12, not 13", 12),
        ("The answer is 20 - 5 = 15.", 15),
        ("The answer is 3 apples + 4 apples = 7 apples.", 7),
        ("The answer is 5% of 200 = 10", 10),
        ("It is 0.6 or 60%", 60),
        ("The answer is that since he owed $7, he has $26 - $7 = $19", 19),
        ("The answer is 80% of the girls because 12/15 = 0.8", 80),
        ("The answer is that she saves $20, so she has 20 + 70 = $90", 90),
        ("The answer is (75/100)*100=75% of them", 75),
        ("The answer is 24 eggs, which is 24/12 = 2 dozen", 2),
        ("Week 3:210 pages", 210),
        ("We get 3Y/3 = 120/3 or Y = 40", 40),
        ("The answer is 6 (that is, 2 * 3 = 6, or half of 12)", 6),
        ("The answer is 7 hours or 420 minutes", 7),
        ("The answer is 12 = 3 * 4", 12),
        ("The answer is 5 (3 + 2).", 5),
        ("Answer: 7-day week", 7),
        ("It is 12 and not 13", 12),
        ("The answer is not 3 but 4", 4),
        ("The answer is 3 million", 3_000_000),
        (r"\boxed{\$2.5 \text{ billion}}", 2_500_000_000),
        ("It weighs 2 thousand tons", 2_000),
        ("The area is 16 m^2", 16),
        ("The area is 16 cm^{2}", 16),
        ("9 km/h", 9),
        ("$8/hour", 8),
        ("0,5", 0.5),
        ("It costs 2,74 in all", 2.74),
        ("A: 18", 18),
        # thoughts do not count, and a tag holds the answer
        ("<think>The answer is 3</think> It is 7", 7),
        ("<answer>7</answer> in 3 steps", 7),
        ("<answer>\n7\n</answer> so x = 3", 7),
        ("<think><answer>3</answer></think><answer>2 + 5 = 7</answer>", 7),
        # marks and units in the reference
        ("72", "She sold 48 / 2 = 24, and 48 + 24 = 72 in all.\n#### 72"),
        ("72", r"\boxed{72}"),
        ("72", "$72."),
    ],
)
def test_number_right(response: str, reference: Any) -> None:
    assert number(response, reference, {}).value == 1


@pytest.mark.parametrize(
    ("response", "reference"),
    [
        ("", 1),
        ("none", 1),
        ("five", 5),
        ("13", 12),
        ("12.0001", 12),
        ("-12", 12),
        ("12", -12),
        ("12 is not it, 13 is", 12),
        ("x2", 2),
        (r"\boxed{3/4}", 3),
        (r"\boxed{3/4}", 4),
        ("3/4", 4),
        ("3^4", 3),
        ("3^4", 4),
        (r"\boxed{3^4}", 3),
        (r"\boxed{3^{4}}", 4),
        (r"\boxed{3x}", 3),
        (r"\boxed{3\pi}", 3),
        (r"\boxed{\sqrt{3}}", 3),
        (r"\boxed{\frac{3}{4}}", 3),
        (r"\frac{3}{4}", 4),
        (r"\boxed{3\frac{1}{4}}", 3),
        ("The answer is 3 1/4", 3),
        (r"\boxed{3 \times 10^4}", 3),
        (r"3 \times 10^4", 10),
        ("The answer is 3 + 4", 3),
        ("The answer is 3 or 4", 3),
        (r"\boxed{3!}", 3),
        ("3 million", 3),
        ("The answer is 3 million", 3),
        ("The answer is not 3", 3),
        ("It isn't 3.", 3),
        ("The answer is x > 3", 3),
        ("The answer is x = 3 or x = 4", 3),
        ("The answer is x = 3 or x = 4", 4),
        ("The answer is 3 apples + 4 apples = 7 apples.", 3),
        ("The answer is 12:30", 12),
        ("It was 12:30", 30),
        ("It was 2024-05-06", 2024),
        ("0,125", 125),
        ("0,5", 5),
        ("It costs 2,74 in all", 74),
        ("1e9999999999", 1),
        ("1e999999999", 1),
        ("50%", 0.5),
        ("0.30000000000000004", 0.3),
        ("1234567890123456789012345678901", "1234567890123456789012345678902"),
        ("The answer is 5. Or 6.", 6),
        ("#### 72\n73", 73),
        ("12,345,67", 1234567),
        ("<think>The answer is 3</think> It is 7", 3),
        ("<think>The answer is 3", 3),
        ("<answer>7</answer> in 3 steps", 3),
        ("It is 7. <answer>I do not know</answer>", 7),
        ("\ud800", 1),
    ],
)
def test_number_wrong(response: str, reference: Any) -> None:
    score = number(response, reference, {})
    assert score.value == 0 and score.valid


@pytest.mark.parametrize("reference", ["", "many", None, "3/4", "1 or 2", "1,2", True, float("nan"), [1], "72 apples"])
def test_number_refuses_a_reference_that_is_none(reference: Any) -> None:
    score = number("1", reference, {})
    assert not score.valid and "must be one number" in score.detail


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("12", 1),
        (" 12.\n", 1),
        ("$12", 1),
        ("12%", 1),
        ("12.00", 1),
        ("13", 0),
        ("It is 12", 0),
        ("12 12", 0),
        ("3,12", 0),
    ],
)
def test_number_strict(response: str, value: float) -> None:
    assert number(response, 12, {}, strict=True).value == value


@pytest.mark.parametrize(
    ("response", "tolerance", "value"),
    [("3.14", 0.01, 1), ("3.15", 0.01, 1), ("3.151", 0.01, 0), ("3.13", 0.01, 1), ("3.129", "0.01", 0), ("4", 1, 1)],
)
def test_number_tolerance_is_exact(response: str, tolerance: Any, value: float) -> None:
    assert number(response, "3.14", {}, tolerance=tolerance).value == value


@pytest.mark.parametrize(
    ("response", "relative", "tolerance", "value"),
    [
        ("101", 0.01, 0, 1),
        ("101.01", 0.01, 0, 0),
        ("99", 0.01, 0, 1),
        ("98", 0.01, 2, 1),
        ("98", 0.02, 1, 1),
        ("100", 0, 0, 1),
        ("0", 1, 0, 1),
        ("-1", 1, 0, 0),
    ],
)
def test_number_relative_tolerance(response: str, relative: float, tolerance: float, value: float) -> None:
    assert number(response, 100, {}, relative=relative, tolerance=tolerance).value == value


def test_number_relative_tolerance_of_a_negative_reference() -> None:
    assert number("-101", -100, {}, relative=0.01).value == 1
    assert number("101", -100, {}, relative=0.01).value == 0


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), "much", None])
def test_number_refuses_a_tolerance_that_is_none(bad: Any) -> None:
    assert "must be numbers from 0 up" in number("1", 1, {}, tolerance=bad).detail
    assert not number("1", 1, {}, relative=bad).valid


@pytest.mark.parametrize(
    ("response", "reference", "value"),
    [
        ("Paris", "paris", 1),
        ("  The  Eiffel\tTower. ", "eiffel tower", 1),
        ("an apple", "the apple!", 1),
        ("“Paris”", '"Paris"', 1),
        ("Ｐａｒｉｓ", "Paris", 1),
        ("e\u0301cole", "école", 1),
        ("ecole", "école", 0),
        ("Straße", "STRASSE", 1),
        ("don't", "dont", 1),
        ("U.S.", "US", 1),
        ("well-known", "well known", 1),
        ("and/or", "and or", 1),
        ("3.5", "35", 0),
        ("3.5", "3.5.", 1),
        ("-5", "5", 0),
        ("1,234", "1234", 1),
        ("1,2", "12", 0),
        ("50%", "50", 0),
        ("C#", "C", 0),
        ("C++", "C", 0),
        ("$5", "5", 0),
        ("東京。", "東京", 1),
        ("「東京」", "東京", 1),
        ("Москва!", "москва", 1),
        ("القاهرة؟", "القاهرة", 1),
        ("ﬁne", "fine", 1),
        ("Rome", ["Roma", "rome"], 1),
        ("Rome", ["Paris", "Lyon"], 0),
        ("12", 12, 1),
        ("", "Paris", 0),
        ("", "", 1),
        ("the", "The", 1),
        (".", "The", 0),
        ("!", "?", 0),
        ("?", "?", 1),
        ("A", "a", 1),
        ("B", "a", 0),
        ("the cat sat", "cat the sat", 1),
    ],
)
def test_normalised(response: str, reference: Any, value: float) -> None:
    assert normalised(response, reference, {}).value == value


@pytest.mark.parametrize(
    ("response", "reference", "options", "value"),
    [
        ("Paris", "paris", {"ignore_case": False}, 0),
        ("Paris.", "Paris", {"ignore_punctuation": False}, 0),
        ("ecole", "École", {"ignore_accents": True}, 1),
        ("東 京", "東京", {}, 0),
        ("東 京", "東京", {"ignore_spaces": True}, 1),
        ("the cat", "cat", {"articles": ""}, 0),
        ("der Hund", "Hund", {"articles": "der die das"}, 1),
        ("Der Hund", "Hund", {"articles": "der die das", "ignore_case": False}, 0),
    ],
)
def test_normalised_options(response: str, reference: str, options: dict[str, Any], value: float) -> None:
    assert normalised(response, reference, {}, **options).value == value


@pytest.mark.parametrize(
    ("response", "reference", "value"),
    [
        ("the cat sat", "The cat sat.", 1),
        ("cat", "the cat sat", 2 / 3),
        ("a dog", "the cat sat", 0),
        ("", "cat", 0),
        ("", "", 1),
        ("x", "", 0),
        ("cat cat", "cat", 2 / 3),
        ("sat cat", "cat sat", 1),
        ("cat", ["dog", "the cat"], 1),
        ("東京都", "東京", 4 / 5),
        ("กขค", "กข", 4 / 5),
        ("東京 tower", "tower 東京", 1),
        ("the", "the", 1),
        ("москва река", "река", 2 / 3),
    ],
)
def test_f1(response: str, reference: Any, value: float) -> None:
    assert f1(response, reference, {}).value == pytest.approx(value)


def test_f1_components() -> None:
    score = f1("the cat sat down here", "cat sat", {})
    assert score.components == {"precision": 0.5, "recall": 1.0}


@pytest.mark.parametrize("verifier", [normalised, f1])
def test_an_empty_list_of_references_is_an_error(verifier: Any) -> None:
    assert "got an empty list" in verifier("x", [], {}).detail and not verifier("x", [], {}).valid


@pytest.mark.parametrize(
    ("response", "said"),
    [
        ("7", "7"),
        ("<think>3</think>7", "7"),
        ("3</think>7", "7"),
        ("<think>1</think>2</think>7", "7"),
        ("<think>3</think>", ""),
        (" <think>3", ""),
        ("<think>1</think>\n<think>2", ""),
        ("I <think> so", "I <think> so"),
        ("", ""),
    ],
)
def test_after_thought(response: str, said: str) -> None:
    assert after_thought(response) == said


def test_tokens() -> None:
    assert tokens("go 東京, now") == ["go", "東", "京", ",", "now"]
    assert tokens(" \n") == []


@pytest.mark.parametrize(
    ("response", "reference", "options", "value"),
    [
        ("abc 123", r"\d+", {}, 1),
        ("abc", r"\d+", {}, 0),
        ("abc 123", r"\d+", {"full": True}, 0),
        (" 123\n", r"\d+", {"full": True}, 1),
        ("ABC", "abc", {}, 0),
        ("ABC", "abc", {"ignore_case": True}, 1),
        ("a\nb", "a.b", {}, 0),
        ("a\nb", "(?s)a.b", {}, 1),
        ("x", "unused", {"pattern": "x"}, 1),
        ("x", {"any": "thing"}, {"pattern": "x"}, 1),
        ("東京です", "東京", {}, 1),
        ("[[a]]", r"[[a]", {}, 1),
    ],
)
def test_regex(response: str, reference: Any, options: dict[str, Any], value: float) -> None:
    assert regex(response, reference, {}, **options).value == value


@pytest.mark.parametrize(
    "reference", ["", None, 3, "(", "a{2,1}", "(?P<n>a)(?P<n>b)", "[z-a]", "a{99999999999999}", r"\1"]
)
def test_regex_refuses_a_pattern_that_is_none(reference: Any) -> None:
    score = regex("x", reference, {})
    assert not score.valid and "pattern of 'regex'" in score.detail


@pytest.mark.parametrize(
    "response",
    [
        *("B", "b", "(B)", "(b)", "B.", "B)", "b)", "B:", "[B]", "**B**", "**B.** Paris", "`B`", "$B$", '"B"', " B\n"),
        *("B. Paris", "B) Paris", "(B) Paris", "b. Paris", "Option B", "B, because A is wrong."),
        *("Answer: B", "Answer: (B)", "Answer: **B**", "**Answer:** B", "**Answer: B**", "answer is b", "Answer:\n\nB"),
        "The answer is B.",
        "The answer is (B).",
        "The answer is B because A is too long.",
        "The correct answer is option B: Paris.",
        "The correct option is B",
        "So the best choice is $B$.",
        "Therefore, the final answer is: $\\boxed{B}$.",
        r"\boxed{B}",
        r"\boxed{b}",
        r"\boxed{(B)}",
        r"\boxed{\text{B}}",
        r"\boxed{\textbf{(B) }12}",
        r"\boxed{\mathrm{B}}",
        r"A? No. \boxed{A} no, \boxed{B}",
        "<think>A or C?</think><answer>B</answer>",
        "<answer> (B) Paris </answer>",
        "I choose B.",
        "I would go with option B.",
        "Option B is correct.",
        "B is the correct answer.",
        "(B) is right, (A) is not.",
        "I think it is B",
        "It must be (B).",
        "(A) would be 3, so the answer is (B)",
        "The answer is A. Wait, the answer is B.",
        "Answer: A\nHmm.\nAnswer: B",
        "Some thoughts. (B)",
        "Some thoughts.\n\nB. Paris",
        "Some thoughts: **B**",
        "The answer is B and not C.",
        "The answer is B, I think.",
        "The answer is B, a city.",
        "答案是B。",
        "答案：B",
        "正确答案是 B",
        "正确选项是：B",
        "答えはBです",
        "정답은 B입니다",
        "Die Antwort ist B.",
        "Antwort: B",
        "La respuesta es B",
        "Respuesta: (B)",
        "La réponse est B",
        "Réponse : B",
        "La risposta è B",
        "Ответ: B",
        "Ответ: В",  # the Cyrillic letter
        *("B\nBecause it is.", "B\n\nExplanation: A is wrong.", "(B)\n\nBecause (A) is wrong", "(A) is wrong, so\n\nB"),
        *("The answer is clearly B", "The answer is thus B", "The answer is therefore (B)", "The answer would be B"),
        *("The answer to the question is B", "The correct choice would be B", "B is the answer", "Hence B."),
        *("## Answer\nB", "**Final Answer**\n\nB", "### Final Answer\n**B**\n", "B - Paris", "Answer - B"),
        *("<answer>Option B</answer>", '{"answer": "B"}', r"Answer: \(B\)", r"Answer: \textbf{(B)}"),
        "La respuesta correcta es B",
        "The correct answer is not A but B",
        "<think>The answer is A?</think>B",
        r"<think>\boxed{A}</think>The answer is B",
    ],
)
def test_choice_right(response: str) -> None:
    assert choice(response, "B", {}).value == 1


@pytest.mark.parametrize(
    "response",
    [
        *("", "A", "C.", "nothing", "Bananas are yellow", "Be careful", "x = B + C", "B-tree", "vitamin B12", "K", "."),
        "The answer is A or B",
        "The answer is B or C.",
        "The answer is (B) or maybe (A)",
        r"\boxed{B \text{ and } A}",
        r"\boxed{A} or \boxed{B}",
        "A\n\nB",
        "<think>I guess the answer is B.</think>\n\nA",
        r"<think>\boxed{B}",
        "<think>The answer is B.</think>",
        "Answer: B, C",
        "Answer: (A) and (B)",
        "Answer: B/C",
        r"\boxed{A}, not B",
        r"\boxed{B} or rather \boxed{A}",
        "The answer is a bee",
        "Answer: I think so",
        "A. Rome\nB. Paris\nC. Lyon",
        "(A) is possible, (B) too",
        "The answer is B. No, the answer is C.",
        "B'nai",
        "答案是A",
        "the answer is Berlin",
        "\ud800",
    ],
)
def test_choice_wrong(response: str) -> None:
    score = choice(response, "B", {})
    assert score.value == 0 and score.valid and (score.detail or response == "")


@pytest.mark.parametrize(("pick", "value"), [("first", 1), ("last", 0)])
def test_choice_pick(pick: Any, value: float) -> None:
    assert choice("The answer is B. The answer is C.", "B", {}, pick=pick).value == value
    assert choice(r"\boxed{B}. No, \boxed{C}", "B", {}, pick=pick).value == value


@pytest.mark.parametrize("reference", ["B", "b", "(B)", "B.", " B) Paris", "B: Paris", 1, "**B**"])
def test_choice_reference(reference: Any) -> None:
    assert choice("B", reference, {}).value == 1
    assert choice("C", reference, {}).value == 0


@pytest.mark.parametrize("reference", ["", "Paris", "K", "?", None, True, 10, -1, 1.0, "AB", [], "Be"])
def test_choice_refuses_a_reference_that_is_none(reference: Any) -> None:
    score = choice("B", reference, {})
    assert not score.valid and "must be one of the letters" in score.detail


def test_choice_letters() -> None:
    assert all(choice(f"Answer: {letter}", letter, {}).value == 1 for letter in "ABCDEFGHIJ")
    assert choice("Answer: E", "D", {}, letters="ABCD").detail == "no letter in the response"
    assert choice("wahr: r", "R", {}, letters="RF").value == 0
    assert choice("r", "R", {}, letters="RF").value == 1
    assert not choice("B", "B", {}, letters="1-9").valid
    assert not choice("B", "B", {}, pick="middle").valid  # type: ignore[arg-type]


def test_every_letter_of_a_bare_response_is_read_back() -> None:
    for letter in "ABCDEFGHIJ":
        for form in ("{}", "({})", "{}.", "**{}**", "Answer: {}", r"\boxed{{{}}}", "The answer is {}."):
            assert choice(form.format(letter), letter, {}).value == 1, form
            assert choice(form.format(letter), "A" if letter != "A" else "B", {}).value == 0, form


_TEXT = (
    st.text() | st.text("0123456789,.eE+-$%# =\\{}answeri\u2212\n") | st.text(st.characters(categories=["Cs", "Nd"]))
)


@settings(max_examples=300, deadline=None)
@given(response=_TEXT, reference=_TEXT, flag=st.booleans())
def test_never_raises(response: str, reference: str, flag: bool) -> None:
    exact(response, reference, {}, ignore_case=flag)
    number(response, reference, {}, strict=flag)
    assert number(response, 1, {}, strict=flag).value in (0, 1)
    assert exact(response, response, {}).value == 1
    assert normalised(response, response, {}, ignore_accents=flag, ignore_spaces=flag).value == 1
    assert normalised(response, reference, {}, ignore_case=flag, ignore_punctuation=flag).value in (0, 1)
    assert f1(response, response, {}).value == pytest.approx(1)
    assert 0 <= f1(response, reference, {}).value <= 1
    assert regex(response, r"\d+", {}, full=flag).value in (0, 1)
    regex("x", response, {}, full=flag)
    assert choice(response, "B", {}, pick="first" if flag else "last").value in (0, 1)
    choice("B", response, {})


@settings(max_examples=100, deadline=None)
@given(st.decimals(allow_nan=False, allow_infinity=False, places=4), st.sampled_from(["{:f}", "{:,f}", "It is {:f}."]))
def test_every_decimal_is_read_back(value: Any, form: str) -> None:
    assert number(form.format(value), str(value), {}).value == 1


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize(
    "unit",
    [
        "1",
        "234,",
        "answer is ",
        "####",
        " ",
        "-",
        "1.",
        "1e",
        "$",
        "\\boxed{",
        "5  x",
        "#### 1\n",
        "answer",
        "(A)",
        "A ",
        "**",
        ">*-",
        "東",
    ],
)
def test_time_is_linear_in_the_response(unit: str) -> None:
    start = time.process_time()
    number(unit * (60_000 // len(unit)), 1, {})
    number("5" + unit * (60_000 // len(unit)) + "x", 1, {}, strict=True)
    for verifier in (normalised, f1, choice):
        verifier(unit * (30_000 // len(unit)), "B", {})
    assert time.process_time() - start < 6


@pytest.mark.parametrize("score", [normalised, f1])
def test_thoughts_are_no_part_of_the_text(score: Any) -> None:
    assert score("<think>London? Rome?</think> Paris", "Paris", {}).value == 1
    assert score("<think>Paris</think> London", "Paris", {}).value == 0
    assert score("<think>Paris", "Paris", {}).value == 0


@pytest.mark.parametrize("response", ['{"a": 5}', "{'a': 5}", '{"a": 5, "b": 6}', '{ "A" : "x" }', '["a", 5]'])
def test_the_keys_of_json_are_no_choice(response: str) -> None:
    assert choice(response, "A", {}).value == 0


@pytest.mark.parametrize("response", ['{"answer": "A"}', '"A"', "{A}", "'a'"])
def test_a_letter_in_quotes_or_braces_is_a_choice(response: str) -> None:
    assert choice(response, "A", {}).value == 1
