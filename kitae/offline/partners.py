"""Whose answer is put after a prompt that it was not given to: the partner of each answer, of the order alone."""

from collections.abc import Hashable, Sequence
from itertools import chain


def partners_of(prompts: Sequence[Hashable], block: int) -> list[int]:
    """Of each place, another with another prompt: `partners_of("aabb", block=4)` is `[3, 3, 1, 1]`.

    It is the nearest one before it in its block of so many places, in a circle; else the nearest before it of all, in a
    circle too. Where all prompts are the same, there is none: the list is empty.
    """
    if len(set(prompts)) < 2:
        return []
    far = _nearest_others(prompts)
    return [_near(prompts, number, block, far[number]) for number in range(len(prompts))]


def _near(prompts: Sequence[Hashable], number: int, block: int, far: int) -> int:
    start = number - number % block
    size = min(block, len(prompts) - start)
    circle = (start + (number - start - distance) % size for distance in range(1, size))
    return next(other for other in chain(circle, [far]) if prompts[other] != prompts[number])


def _nearest_others(prompts: Sequence[Hashable]) -> list[int]:
    """Of each place, the nearest before it with another prompt; the list is a circle."""
    found = [0] * len(prompts)
    for _ in range(2):  # the second time round, what comes before the first place is known
        for number in range(len(prompts)):
            before = number - 1 if number else len(prompts) - 1
            found[number] = before if prompts[before] != prompts[number] else found[before]
    return found
