"""Numbers and tables as text."""

from collections.abc import Sequence


def as_size(size: float) -> str:
    """`"1.6 GB"`."""
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def as_time(seconds: float) -> str:
    """`"40 s"`, `"12 min"`, `"3.5 h"`, `"12 d"`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} d"


def table(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Columns as wide as they must be; the first `left` of them begin at the left, the others end at the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = (c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
