"""Two stages of your own: an advantage that counts rare successes more, and a gate with a soft edge.

In a recipe (paths are relative to the folder in which `kitae` is called):

    [algorithm]
    preset = "grpo"
    advantage = { name = "examples/custom_algorithm.py:rare_success", power = 0.5 }
    gate = { name = "examples/custom_algorithm.py:soft_clip", width = 0.2 }

or on the command line, with a tiny random model, in seconds:

    kitae train examples/custom_algorithm.toml

Data comes by position, settings by keyword, from the table of the stage. Everything is checked before a model loads:
that the file imports, that the function takes what the stage gives, that every keyword without a default is set, and
that every setting is a keyword of the function.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from kitae.algorithms.advantages import GroupRewards
from kitae.algorithms.loss_tokens import TokenBatch
from kitae.types import FloatArray


def rare_success(group: GroupRewards, *, power: float = 0.5) -> FloatArray:
    """(R − mean) × (1 − mean)^power for rewards in [0, 1]: a success that the policy seldom has weighs more.

    `group` has rewards_G (shaped), scores_G (raw) and lengths_G (loss tokens) of the judged samples of one prompt. A
    group advantage returns one number for each of them.
    """
    rewards_G = group.rewards_G
    if len(rewards_G) < 2:
        return np.zeros_like(rewards_G)
    mean = float(rewards_G.mean())
    return (rewards_G - np.float32(mean)) * np.float32(max(0.0, 1.0 - mean) ** power)


def soft_clip(ratio_N: Tensor, tokens: TokenBatch, *, width: float) -> Tensor:
    """−A w tanh((r − 1) / w): the gradient is −A at r = 1 and fades as r leaves 1 ± w, on both sides.

    `tokens` has advantage_N, logp_N and more (kitae/algorithms/loss_tokens.py). A gate returns the loss of each
    token; the aggregation weights come later. Let gradients reach ratio_N or tokens.logp_N, or nothing is learnt.
    """
    return -tokens.advantage_N * width * ((ratio_N - 1) / width).tanh()


def any_digit(response: str, reference: Any, context: Mapping[str, Any]) -> bool:
    """The score of the demonstration: a random model is right in two of five answers, and learns in 20 steps."""
    return any(c.isdigit() for c in response)
