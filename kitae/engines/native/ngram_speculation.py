"""N-gram speculative decoding: the next tokens of a sequence are drafted from its own text, without a second model.

A draft is what followed the last tokens the previous time they occurred in the text. Each draft token is one more row
of a decoding step. It is accepted where the row before it samples just that token with its own random number, so a
sequence gets the tokens that it would have got one by one; rejected drafts cost rows and nothing else. On a GPU
`kitae.kernels.cuda.speculation` does the same without the host.
"""

from collections.abc import Iterable

DRAFT_TOKENS = 4  # of each sequence in a step, where few sequences are decoded
LONGEST_MATCH = 3  # tokens that are looked for


class NgramDrafts:
    """A text, with the place where each short run of its tokens occurred last before its end."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}  # the place after a run
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            end = len(self._tokens)
            for n in range(1, min(LONGEST_MATCH, end) + 1):
                self._next[tuple(self._tokens[end - n :])] = end
            self._tokens.append(token)

    def draft(self, count: int) -> list[int]:
        """`count` tokens that followed the longest known run at the end of the text, repeated if the text is shorter.

        The draft is empty where even the last token of the text is new.
        """
        for n in range(min(LONGEST_MATCH, len(self._tokens)), 0, -1):
            if (start := self._next.get(tuple(self._tokens[-n:]))) is not None:
                period = len(self._tokens) - start
                return [self._tokens[start + i % period] for i in range(count)]
        return []
