"""Guesses of what a sequence samples next: what followed its last tokens the last time they stood in its own text.

A guess is a row more in a step. It is kept where the row before it samples just that token, by its own random number,
so a sequence gets the tokens that it would have got one by one; wrong guesses cost rows and nothing else. On a GPU
`kitae.kernels.cuda.speculation` does the same without the host.
"""

from collections.abc import Iterable

LONGEST = 3  # tokens that are looked for


class Repeats:
    """A text, and where each short run of its tokens occurred last before its end."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}  # the place after a run
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            end = len(self._tokens)
            for n in range(1, min(LONGEST, end) + 1):
                self._next[tuple(self._tokens[end - n :])] = end
            self._tokens.append(token)

    def guess(self, count: int) -> list[int]:
        """What followed the longest run that ends the text now, over and over if the text ends before `count` tokens;
        nothing if even its last token is new."""
        for n in range(min(LONGEST, len(self._tokens)), 0, -1):
            if (start := self._next.get(tuple(self._tokens[-n:]))) is not None:
                period = len(self._tokens) - start
                return [self._tokens[start + i % period] for i in range(count)]
        return []
