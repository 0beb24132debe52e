import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitae.verifiers.text import exact, number


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
        ("10 - 3", 3),
        ("10-3", 3),
        ("10 -3", -3),
        ("1,2,3", 3),
        ("1, 234", 234),
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
        ("1e9999999999", 1),
        ("1e999999999", 1),
        ("50%", 0.5),
        ("0.30000000000000004", 0.3),
        ("1234567890123456789012345678901", "1234567890123456789012345678902"),
        ("The answer is 5. Or 6.", 6),
        ("#### 72\n73", 73),
        ("12,345,67", 1234567),
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


_TEXT = (
    st.text() | st.text("0123456789,.eE+-$%# =\\{}answeri\u2212\n") | st.text(st.characters(categories=["Cs", "Nd"]))
)


@settings(max_examples=100, deadline=None)
@given(response=_TEXT, reference=_TEXT, flag=st.booleans())
def test_never_raises(response: str, reference: str, flag: bool) -> None:
    exact(response, reference, {}, ignore_case=flag)
    number(response, reference, {}, strict=flag)
    assert number(response, 1, {}, strict=flag).value in (0, 1)
    assert exact(response, response, {}).value == 1


@settings(max_examples=100, deadline=None)
@given(st.decimals(allow_nan=False, allow_infinity=False, places=4), st.sampled_from(["{:f}", "{:,f}", "It is {:f}."]))
def test_every_decimal_is_read_back(value: Any, form: str) -> None:
    assert number(form.format(value), str(value), {}).value == 1


@pytest.mark.parametrize(
    "unit", ["1", "234,", "answer is ", "####", " ", "-", "1.", "1e", "$", "\\boxed{", "5  x", "#### 1\n"]
)
def test_time_is_linear_in_the_response(unit: str) -> None:
    start = time.perf_counter()
    number(unit * (200_000 // len(unit)), 1, {})
    number("5" + unit * (200_000 // len(unit)) + "x", 1, {}, strict=True)
    assert time.perf_counter() - start < 2
