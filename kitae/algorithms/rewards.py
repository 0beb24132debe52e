"""S1, reward shaping: raw score → the reward the advantage is computed from."""


def overlong_penalty(length: int, max_tokens: int, buffer: int) -> float:
    """DAPO's soft length penalty: 0 up to `max_tokens - buffer`, then linear down to -1 at `max_tokens`.

    `max_tokens` is the hard generation cap; `length` counts tokens, never characters.
    """
    if buffer == 0:
        return 0.0
    return -min(1.0, max(0.0, (length - (max_tokens - buffer)) / buffer))
