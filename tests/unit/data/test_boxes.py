import pytest

from kitae.data.boxes import last_boxed


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


def test_last_boxed_never_joins() -> None:
    assert last_boxed(r"\boxed{1} and \boxed{2}") == "2"
