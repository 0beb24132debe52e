"""Who runs on which processor cores when engines have processes of their own."""

import pytest

from kitae.pipeline.session import share_cores


@pytest.mark.parametrize(
    ("cores", "engines", "threads", "trainer", "shares"),
    [
        (8, 1, 0, [0, 1, 2, 3], [[4, 5, 6, 7]]),
        (8, 2, 0, [0, 1, 2, 3], [[4, 5], [6, 7]]),
        (8, 3, 2, [0, 1], [[2, 3], [4, 5], [6, 7]]),
        (2, 1, 0, [0], [[1]]),
        (2, 2, 1, [0], [[1], [1]]),
        (4, 2, 2, [0], [[1, 2], [1, 3]]),
        (4, 1, 9, [0], [[1, 2, 3]]),
        (1, 2, 1, [], [[], []]),
        (0, 1, 0, [], [[]]),
    ],
)
def test_share_cores(cores: int, engines: int, threads: int, trainer: list[int], shares: list[list[int]]) -> None:
    assert share_cores(range(cores), engines, threads) == (trainer, shares)
