"""Which answers KTO measures the drift of the policy on."""

import numpy as np

from kitae.data.rendering import Rendered
from kitae.offline.base import Item
from kitae.offline.kto import mismatched


def item(prompt: int, answer: int, size: int = 3) -> Item:
    tokens = np.array([prompt] * size + [answer] * 4)
    return Item(f"{prompt}-{answer}", (Rendered(tokens, np.arange(len(tokens)) >= size, size),))


def test_the_answer_of_another_follows_the_prompt_as_far_as_it_fits() -> None:
    ours, theirs = item(1, 10, size=5).sequences[0], item(2, 20, size=2).sequences[0]
    made = mismatched(ours, theirs, limit=100)
    assert made.tokens_T.tolist() == [1] * 5 + [20] * 4
    assert made.mask_T.tolist() == [False] * 5 + [True] * 4
    assert (made.prompt_length, made.cut) == (5, 0)
    short = mismatched(ours, theirs, limit=7)
    assert (short.tokens_T.tolist(), short.cut) == ([1] * 5 + [20] * 2, 2)
