"""Every worked example is asserted by a test, and by one that reads all of its numbers."""

import pytest
import test_examples_groups
import test_examples_tokens
from fixture_p import COVERED, EXAMPLES, Entry, covers

ELSEWHERE = {"dpo": "test_preferences.py", "bt_rm": "test_preferences.py", "routing": "models/test_routing.py"}


def test_every_worked_example_is_asserted() -> None:
    assert set(EXAMPLES) - set(COVERED) - set(ELSEWHERE) == set()
    assert set(COVERED) | set(ELSEWHERE) == set(EXAMPLES), "a test is about an example that is not there"
    assert not set(COVERED) & set(ELSEWHERE)


def test_the_named_tests_exist() -> None:
    known = {**vars(test_examples_groups), **vars(test_examples_tokens)}
    assert [name for name in COVERED.values() if not callable(known.get(name))] == []


def test_an_example_that_is_read_in_part_would_be_found() -> None:
    entry = Entry({"a": 1, "b": {"c": [2], "d": 3}})
    assert sorted(entry.unread()) == ["a", "b"]
    assert entry["b"]["c"] == [2]
    assert sorted(entry.unread()) == ["a", "b.d"]
    assert dict(entry.items())["b"]["d"] == 3
    assert entry.unread() == []
    entry.forget()
    assert sorted(entry.unread()) == ["a", "b"]

    before = dict(COVERED)
    try:

        @covers("gae")
        def reads_half() -> None:
            assert EXAMPLES["gae"]["lam1"]

        @covers("gae")
        def reads_nothing() -> None:
            assert EXAMPLES["ess"]

        with pytest.raises(AssertionError, match=r"does not assert .*gae\.lam095"):
            reads_half()
        with pytest.raises(AssertionError, match="looks at none"):
            reads_nothing()
    finally:
        COVERED.clear()
        COVERED.update(before)
