"""Would speculation pay? How many tokens of a run's answers their own text and earlier answers would have foretold.

    python benchmarks/drafts.py runs/gsm8k-001 [--first 100] [--depth 4 8 16] [--match 3]

A draft is what followed the last tokens, up to `--match` of them, the last time they occurred: in the prompt and the
answer itself, or also in earlier answers to the same prompt. Accepting a draft's token with the model's probability of
it, and else sampling from the other tokens, keeps the distribution; so a draft's tokens are accepted exactly as far as
they agree with what was sampled without drafts, and a journal tells what an engine with drafts would have done.

Prints, for answers from step `--first` on, tokens per pass and rows per token (drafts that were wrong included), and
what these come to on one H200 with 1.5 billion parameters, by its limits: reading weights, or products of all rows.
Attention and sampling are left out, which flatters drafts. Of answers in several turns, all after the prompt counts.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kitae.store.journal import Journal

READ_MS, PRODUCT_MS = 0.74, 0.0040  # 3.1 GB at 4.2 TB/s; 3.1 GFLOP a row at 774 TFLOP/s
BATCHES = (1, 16, 64, 512)


@dataclass(slots=True)
class Tally:
    tokens: int = 0
    passes: int = 0
    rows: int = 0

    def speed_up(self, sequences: int) -> float:
        """Of `sequences` decoded together, against one token a pass."""
        rows = sequences * self.rows / self.passes
        return self.tokens / self.passes * pass_ms(sequences) / pass_ms(rows)


def pass_ms(rows: float) -> float:
    return max(READ_MS, PRODUCT_MS * rows)


class Memory:
    """Where each short run of tokens occurred last, and what followed."""

    def __init__(self, match: int) -> None:
        self._match = match
        self._last: dict[tuple[int, ...], tuple[Sequence[int], int]] = {}

    def add(self, tokens: Sequence[int], end: int) -> None:
        """The runs that end before `end`, now that the token there is known."""
        for n in range(1, min(self._match, end) + 1):
            self._last[tuple(tokens[end - n : end])] = (tokens, end)

    def draft(self, tokens: Sequence[int], end: int, depth: int) -> Sequence[int]:
        """What followed the longest known run that ends before `end`."""
        for n in range(min(self._match, end), 0, -1):
            if (found := self._last.get(tuple(tokens[end - n : end]))) is not None:
                where, at = found
                known = end if where is tokens else len(where)
                return where[at : min(at + depth, known)]
        return ()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--first", type=int, default=1, help="step from which on answers count")
    parser.add_argument("--depth", type=int, nargs="+", default=[4, 8, 16], help="tokens of a draft")
    parser.add_argument("--match", type=int, default=3, help="most tokens that are looked for")
    a = parser.parse_args()
    print(f"{'drafts from':<22}{'depth':>6}{'tokens/pass':>13}{'rows/token':>12}" + "".join(f"{n:>7}" for n in BATCHES))
    for earlier in (False, True):
        for depth in a.depth:
            t = tally(a.run, a.first, depth, a.match, earlier)
            if not t.passes:
                parser.error(f"{a.run} must have answers from step {a.first} on, got none")
            speed = "".join(f"{t.speed_up(n):>7.2f}" for n in BATCHES)
            name = "and earlier answers" if earlier else "prompt and answer"
            print(f"{name:<22}{depth:>6}{t.tokens / t.passes:>13.2f}{t.rows / t.tokens:>12.2f}{speed}")
    print("last columns: speed-up of so many sequences at once, by the limits")


def tally(run: Path, first: int, depth: int, match: int, earlier: bool) -> Tally:
    memories: dict[str, Memory] = defaultdict(lambda: Memory(match))
    total = Tally()
    for step, prompt, answers in asked(run):
        for tokens, start in answers if step >= first else ():
            decode(tokens, start, depth, memories[prompt] if earlier else Memory(match), match, total)
        for tokens, start in answers if earlier else ():
            for end in range(start, len(tokens)):
                memories[prompt].add(tokens, end)
    return total


def decode(tokens: list[int], start: int, depth: int, older: Memory, match: int, total: Tally) -> None:
    """Its own text first, then what earlier answers said: the longer draft of the two."""
    own, at, known = Memory(match), start, 0
    while at < len(tokens):
        for end in range(known, at):
            own.add(tokens, end)
        known = at
        draft = max(own.draft(tokens, at, depth), older.draft(tokens, at, depth), key=len)
        agree = 0
        while agree < len(draft) and at + agree < len(tokens) and draft[agree] == tokens[at + agree]:
            agree += 1
        total.passes += 1
        total.rows += 1 + len(draft)
        new = min(agree + 1, len(tokens) - at)
        total.tokens += new
        at += new


def asked(run: Path) -> Iterator[tuple[int, str, list[tuple[list[int], int]]]]:
    """Step, prompt and its answers, each with the prompt before it and where it starts."""
    journal = Journal(run / "journal.sqlite", read_only=True)
    try:
        for number, step, fate, _ in journal.groups():
            if fate == "skipped":
                continue
            group = journal.group(number)
            chains = [r.chains[0] for r in group.rollouts if r.chains]
            yield step, group.prompt.id, [(list(c.tokens), len(c.prompt_tokens)) for c in chains]
    finally:
        journal.close()


if __name__ == "__main__":
    main()
