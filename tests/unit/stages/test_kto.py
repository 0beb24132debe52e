"""Which answers KTO measures the drift of the policy on."""

import numpy as np
import pytest

from kitae.data.rendering import Rendered
from kitae.errors import DataError
from kitae.stages.base import Item
from kitae.stages.kto import mismatched, partner_of


def item(prompt: int, answer: int, size: int = 3) -> Item:
    tokens = np.array([prompt] * size + [answer] * 4)
    return Item(f"{prompt}-{answer}", (Rendered(tokens, np.arange(len(tokens)) >= size, size),))


def partners(prompts: list[int], block: int) -> list[int]:
    items = [item(prompt, i) for i, prompt in enumerate(prompts)]
    return [items.index(partner_of(i, items, block)) for i in range(len(items))]


def test_answers_are_rotated_within_a_batch() -> None:
    assert partners([1, 2, 3, 4, 5, 6], block=3) == [2, 0, 1, 5, 3, 4]


def test_another_answer_to_the_same_prompt_is_no_partner() -> None:
    """Data made of pairs has both answers to a prompt one after the other."""
    assert partners([1, 1, 2, 2], block=4) == [3, 3, 1, 1]


def test_what_is_alone_in_its_batch_looks_further() -> None:
    assert partners([1, 2, 3], block=2) == [1, 0, 1]
    assert partners([1, 1, 2, 3], block=2) == [3, 3, 3, 2]


def test_one_prompt_is_not_enough() -> None:
    with pytest.raises(DataError, match="kto needs answers to at least two prompts, got one: that of 7-0"):
        partners([7, 7], block=2)


def test_the_answer_of_another_follows_the_prompt_as_far_as_it_fits() -> None:
    ours, theirs = item(1, 10, size=5).sequences[0], item(2, 20, size=2).sequences[0]
    made = mismatched(ours, theirs, limit=100)
    assert made.tokens_T.tolist() == [1] * 5 + [20] * 4
    assert made.mask_T.tolist() == [False] * 5 + [True] * 4
    assert (made.prompt_length, made.cut) == (5, 0)
    short = mismatched(ours, theirs, limit=7)
    assert (short.tokens_T.tolist(), short.cut) == ([1] * 5 + [20] * 2, 2)
