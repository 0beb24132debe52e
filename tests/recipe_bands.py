"""How much worse than measured a run of a recipe may end."""

import math

from kitae.cli.recipes import Measurement


def falls_short(runs: list[Measurement], end: float, prompts: int) -> bool:
    """Whether a run ended worse than the worst of these, by more than twice what `prompts` held-out ones scatter.

    Ends of 0.96 and 0.98 with 128 prompts: an end below 0.925 falls short. A loss may be twice the largest.
    """
    if runs[0].score == "loss":
        return end > 2 * max(m.end for m in runs)
    worst = min(m.end for m in runs)
    return end < worst - 2 * math.sqrt(max(worst * (1 - worst), 1 / prompts) / prompts)
