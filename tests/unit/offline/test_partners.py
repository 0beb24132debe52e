"""Whose answers KTO measures the drift of the policy on."""

from kitae.offline.example_batches import partners_of


def test_answers_are_rotated_within_a_batch() -> None:
    assert partners_of([1, 2, 3, 4, 5, 6], block=3) == [2, 0, 1, 5, 3, 4]


def test_another_answer_to_the_same_prompt_is_no_partner() -> None:
    """Data made of pairs has both answers to a prompt one after the other."""
    assert partners_of([1, 1, 2, 2], block=4) == [3, 3, 1, 1]


def test_what_is_alone_in_its_batch_looks_further() -> None:
    assert partners_of([1, 2, 3], block=2) == [1, 0, 1]
    assert partners_of([1, 1, 2, 3], block=2) == [3, 3, 3, 2]
    assert partners_of([1, 2, 2], block=1) == [2, 0, 0]


def test_one_prompt_is_not_enough() -> None:
    assert partners_of([7, 7], block=2) == partners_of([7], block=1) == []
