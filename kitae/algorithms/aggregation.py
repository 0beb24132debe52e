"""S7, aggregation: one weight per loss token, computed once on everything an optimizer step trains on.

A micro-batch's loss is then a plain weighted sum, so neither the cut into micro-batches, nor packing, nor the number
of ranks can change the gradient. n_i: loss tokens of sequence i; N: of all; B: sequences; P: prompts.
"""

from collections import Counter
from collections.abc import Sequence

from kitae.types import Sample


def token_weights(samples: Sequence[Sample], kind: str, constant_length: int = 0) -> list[float]:
    """The weight that each loss token of each sample carries."""
    counts = [s.loss_tokens for s in samples]
    sequences = len(samples)
    if kind == "token-mean":
        return [1 / max(1, sum(counts))] * sequences
    if kind == "seq-mean-token-mean":
        return [1 / (sequences * n) if n else 0.0 for n in counts]
    if kind == "seq-mean-token-sum":
        return [1 / sequences] * sequences
    if kind == "constant-length":
        assert constant_length > 0
        return [1 / (sequences * constant_length)] * sequences
    assert kind == "prompt-mean", kind
    per_prompt: Counter[int] = Counter()
    for s, n in zip(samples, counts, strict=True):
        per_prompt[s.group] += n
    return [1 / (len(per_prompt) * max(1, per_prompt[s.group])) for s in samples]
