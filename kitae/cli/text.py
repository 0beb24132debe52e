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


def table(rows: Sequence[Sequence[str]], *, left: int = 1, width: int | None = None) -> str:
    """Columns as wide as they must be; the first `left` of them begin at the left, the others end at the right.

    width: columns that have no room beside the others come in a second table below, which begins with the first column
    too.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    if width is not None and sum(widths) + 2 * (len(widths) - 1) > width:
        fits = next((n for n in range(len(widths) - 1, 1, -1) if sum(widths[:n]) + 2 * (n - 1) <= width), 2)
        if fits < len(widths):
            first = table([row[:fits] for row in rows], left=min(left, fits))
            rest = [[row[0], *row[fits:]] for row in rows]
            return f"{first}\n\n{table(rest, left=max(1, left - fits + 1), width=width)}"
    for row in rows:
        cells = (c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
