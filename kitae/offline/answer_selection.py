"""Which answers to a prompt are kept, and the rows that they become: what stages read.

    keep      a row                                                          for
    best      prompt, completion, score: the best answer                     SFT
    correct   prompt, completion, score: each different answer that is right SFT
    all       prompt, completion, score, label: every answer                 KTO; SFT takes those with the label true
    pairs     prompt, chosen, rejected, margin and scores: best and worst    DPO, reward models

Answers that could not be judged are never among them, and count as errors, not as 0. One that was cut off is not held
up as an example, unless it is asked for: it would teach to end there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kitae.data.chat import as_dict
from kitae.data.examples import Shape
from kitae.errors import ConfigError
from kitae.types import Group, Prompt, Rollout

Keep = Literal["best", "correct", "all", "pairs"]
KEEPS: tuple[Keep, ...] = get_args(Keep)

_RIGHT = 1.0
_SERVES: dict[Keep, tuple[Shape, ...]] = {
    "best": ("demonstration",),
    "correct": ("demonstration",),
    "all": ("demonstration", "labelled"),
    "pairs": ("demonstration", "labelled", "preference"),
}

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Selection:
    """`Selection("pairs", min_margin=0.5)`.

    min_score: an example must have at least that score; None: 1 for "correct", any for the others. min_margin: a pair
    must be at least so far apart; ties never make one. match_lengths: of several best and worst answers, take the two
    whose lengths differ least, so that length is not what is learnt. truncated: answers that were cut off may be
    examples too.
    """

    keep: Keep
    min_score: float | None = None
    min_margin: float = 0.0
    match_lengths: bool = False
    truncated: bool = False

    def __post_init__(self) -> None:
        if self.keep not in KEEPS:
            raise ConfigError(f"keep must be one of {', '.join(KEEPS)}, got {self.keep!r}")
        if self.keep != "pairs" and (self.min_margin or self.match_lengths):
            raise ConfigError(f"min_margin and match_lengths are for keep = 'pairs', got keep = {self.keep!r}")
        if self.min_margin < 0:
            raise ConfigError(f"min_margin must be at least 0, got {self.min_margin:g}")

    def serves(self, shape: Shape) -> bool:
        """Whether a stage that needs this shape can read the rows."""
        return shape in _SERVES[self.keep]

    def rows(self, group: Group) -> list[Row]:
        judged = [r for r in group.valid if str(r.text).strip()]
        if self.keep == "all":
            return [
                {**_row(group.prompt, r), "label": _score(r) >= _RIGHT and self._ended(r), "finish": r.finish}
                for r in judged
                if self._good_enough(r)
            ]
        examples = [r for r in judged if self._ended(r) and self._good_enough(r)]
        if self.keep == "pairs":
            return self._pairs(group.prompt, examples, judged)
        if self.keep == "best":
            return [_row(group.prompt, max(examples, key=_score))] if examples else []
        different = {str(r.text): r for r in reversed(examples)}  # the first of those that say the same
        return [_row(group.prompt, r) for r in sorted(different.values(), key=lambda r: r.index)]

    def _ended(self, rollout: Rollout) -> bool:
        return self.truncated or rollout.finish != "length"

    def _good_enough(self, rollout: Rollout) -> bool:
        least = self.min_score if self.min_score is not None else _RIGHT if self.keep == "correct" else None
        return least is None or _score(rollout) >= least

    def _pairs(self, prompt: Prompt, examples: Sequence[Rollout], judged: Sequence[Rollout]) -> list[Row]:
        if not examples:
            return []
        high, low = max(map(_score, examples)), min(map(_score, judged))
        if high <= low or high - low < self.min_margin:
            return []
        tops = [r for r in examples if _score(r) == high]
        bottoms = [r for r in judged if _score(r) == low]
        both = [(a, b) for a in tops for b in bottoms if _talk(prompt, a)[0] == _talk(prompt, b)[0]]
        if not both:  # agents that asked different things
            return []
        chosen, rejected = both[0]
        if self.match_lengths:
            chosen, rejected = min(both, key=lambda pair: abs(pair[0].response_length - pair[1].response_length))
        question, better = _talk(prompt, chosen)
        return [
            {
                "id": prompt.id,
                "prompt": question,
                "chosen": better,
                "rejected": _talk(prompt, rejected)[1],
                "margin": high - low,
                "score_chosen": high,
                "score_rejected": low,
            }
        ]


def _score(rollout: Rollout) -> float:
    assert rollout.score is not None
    return float(rollout.score.value)


def _row(prompt: Prompt, rollout: Rollout) -> Row:
    question, answer = _talk(prompt, rollout)
    return {"id": prompt.id, "prompt": question, "completion": answer, "score": _score(rollout)}


def _talk(prompt: Prompt, rollout: Rollout) -> tuple[list[Row], str | list[Row]]:
    """What the model read first, and what followed up to its last turn: as text, or as messages.

    Environments say themselves how a conversation begins, be it with examples. Of an agent with several conversations,
    the last answer is kept, after all that the model had read before it.
    """
    if not rollout.transcript:
        return [as_dict(m) for m in prompt.messages], str(rollout.text)
    spoken = [n for n, message in enumerate(rollout.transcript) if message.role == "assistant"]
    count = sum(s.source == "model" for s in rollout.segments) if len(rollout.chains) == 1 else 1
    begin, end = spoken[-count], spoken[-1] + 1
    turns = rollout.transcript[begin:end]
    question = [as_dict(m) for m in rollout.transcript[:begin]]
    if len(turns) == 1 and not turns[0].calls:
        return question, turns[0].content
    return question, [as_dict(m) for m in turns]
