import pytest

from kitae.verifiers.math import last_boxed, math


def box(text: str) -> str:
    return rf"So it is $\boxed{{{text}}}$."


@pytest.mark.parametrize(
    ("response", "reference"),
    [
        # in a box
        (box("12"), "12"),
        (box("12"), 12),
        (box("0.5"), "1/2"),
        (box("0.5"), 0.5),
        (box(r"\frac{1}{2}"), "0.5"),
        (box(r"\frac12"), "1/2"),
        (box("1,234"), "1234"),
        (box(r"\$5"), "5"),
        (box(r"10\%"), "10%"),
        (box(r"5 \text{ cm}"), "5"),
        (box(r"100^\circ"), "100"),
        (box("x**2"), "x^2"),
        (box("1 + x^2"), "x^2+1"),
        (box("(x+1)^2"), "x^2+2x+1"),
        (box(r"\frac{x^2-1}{x-1}"), "x+1"),
        (box(r"\sqrt{50}"), r"5\sqrt{2}"),
        (box("2^{10}"), "1024"),
        (box("5!"), "120"),
        (box(r"\binom{5}{2}"), "10"),
        (box("0.333333"), "1/3"),
        (box("3+4i"), "4i+3"),
        (box("x=5"), "5"),
        (box("5"), "x=5"),
        (box(r"\{1,2\}"), r"\{2,1\}"),
        (box("2, 3"), "3, 2"),
        (box("(1, 2)"), "(1,2)"),
        (box("[0,1)"), "[0,1)"),
        (box(r"x \le 3"), r"x \leq 3"),
        (box(r"(-\infty, 2]"), r"(-\infty,2]"),
        (box(r"\begin{pmatrix}1\\2\end{pmatrix}"), r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (box(r"\text{Monday}"), "Monday"),
        (box(r"\text{(A)}"), "A"),
        # the last complete box counts
        (box("3") + " No: " + box("4"), "4"),
        (box("4") + r" Then \boxed{unfinished", "4"),
        (r"\boxed{x = \boxed{5}}", "5"),
        (box("7") + " The answer is 8", "7"),
        # no box
        ("12", "12"),
        ("1+x^2", "x^2+1"),
        ("sqrt(2)", r"\sqrt{2}"),
        (r"$\frac{3}{4}$", "0.75"),
        (r"\[ x = \frac{3}{4} \]", "3/4"),
        (r"The final answer is \(\frac{3}{4}\).", "3/4"),
        (r"The answer is 5\sqrt{2}.", r"\sqrt{50}"),
        ("The answer is (C).", "C"),
        ("**Answer: 12**", "12"),
        ("so 6*7 = 42", "42"),
        ("#### 72", "72"),
        ("答案是 5", "5"),
        ("Monday", "Monday"),
        ("no solution", "no solution"),
        # the reference in its wrappings
        ("12", "$12$"),
        ("12", r"We add and get \boxed{12}"),
        ("72", "48 + 24 = 72\n#### 72"),
    ],
)
def test_right(response: str, reference: object) -> None:
    assert math(response, reference, {}).value == 1


@pytest.mark.parametrize(
    ("response", "reference"),
    [
        ("", "1"),
        ("I do not know", "1"),
        (box(""), "1"),
        (box("13"), "12"),
        (box("-12"), "12"),
        (box("0.333"), "1/3"),
        (box("3.14"), r"\pi"),
        (box("x+2"), "x+1"),
        (box("y"), "x"),
        (box("[0,1]"), "[0,1)"),
        (box("1, 2"), "1"),
        (box("B"), "A"),
        (box("3") + " No: " + box("4"), "3"),
        (r"5\sqrt{2}", "5"),
        (r"The answer is 5\sqrt{2}.", "5"),
        ("the answer is 5 or 6", "5"),
        ("the answer is 5 or 6", "6"),
        (box(r"\frac{1}{0}"), "1"),
        (box(r"\frac{1}{"), "1"),
        ("{" * 2_000, "1"),
        ("1+" * 1_000 + "1", "1"),
        (box("(" * 800 + ")" * 800), "1"),
        (r"\boxed{" * 2_000, "1"),
        ("\ud800\x00", "1"),
    ],
)
def test_wrong(response: str, reference: str) -> None:
    score = math(response, reference, {})
    assert score.value == 0 and score.valid


@pytest.mark.parametrize("reference", ["", "  ", r"\boxed{}"])
def test_an_empty_reference_is_an_error(reference: str) -> None:
    assert not math("1", reference, {}).valid


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("", None),
        ("12", None),
        (r"\boxed{1}", "1"),
        (r"\boxed {1}", "1"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"\boxed{1} \boxed{2}", "2"),
        (r"\boxed{1} \boxed{2", "1"),
        (r"} { \boxed{3}", "3"),
        (r"\boxed{}", ""),
    ],
)
def test_last_boxed(text: str, inside: str | None) -> None:
    assert last_boxed(text) == inside
