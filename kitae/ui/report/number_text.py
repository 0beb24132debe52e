"""Numbers as people read them."""

import math


def number(value: float | None, digits: int = 4) -> str:
    """`"0.5312"`, `"1,024"`, `"2.1e-05"`; nothing is "–"."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def fixed(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.3f}"


def interval(mean: float | None, low: float | None, high: float | None) -> str:
    """`"0.516 [0.430, 0.600]"`."""
    return fixed(mean) if low is None or high is None or mean is None else f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def chance(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def duration(seconds: float) -> str:
    """`"4.2 s"`, `"42 s"`, `"12 min 5 s"`, `"3 h 20 min"`."""
    whole = round(seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    if whole < 100:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
