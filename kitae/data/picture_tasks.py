"""Generated questions about small pictures: how many discs, which number, on which side there are more.

Pictures are drawn here, pixel by pixel, so that the same seed gives the same file wherever it is drawn.
"""

import io
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kitae.errors import DataError

Canvas = npt.NDArray[np.uint8]
Paint = Callable[[random.Random, Mapping[str, Any]], tuple[str, str, bytes]]

_SHORTEST = 16  # pixels of a side
_GLYPHS = (
    "111101101101111", "010110010010111", "111001111100111", "111001111001111", "101101111001001",
    "111100111001111", "111100111101111", "111001001001001", "111101111101111", "111101111001111",
)  # fmt: skip
"""Of the digits: five rows of three."""


def _blank(rng: random.Random, side: int, wide: int = 1) -> Canvas:
    shade = rng.randint(0, 60)
    return np.full((side, side * wide, 3), shade, dtype=np.uint8)


def _colour(rng: random.Random) -> list[int]:
    return [rng.randint(130, 255) for _ in range(3)]


def _disc(canvas: Canvas, row: float, column: float, radius: float, colour: list[int]) -> None:
    rows, columns = np.ogrid[: canvas.shape[0], : canvas.shape[1]]
    canvas[(rows - row) ** 2 + (columns - column) ** 2 <= radius**2] = colour


def _discs(rng: random.Random, canvas: Canvas, count: int, left: int, width: int) -> None:
    """Discs that do not touch, each in a cell of its own of a grid of three by three."""
    cell = min(canvas.shape[0], width) / 3
    for place in rng.sample(range(9), count):
        row, column = divmod(place, 3)
        radius = cell * rng.uniform(0.25, 0.4)
        slack = cell / 2 - radius
        y, x = (cell * (i + 0.5) + rng.uniform(-slack, slack) for i in (row, column))
        _disc(canvas, y, left + x, radius, _colour(rng))


def _saved(canvas: Canvas) -> bytes:
    try:
        from PIL import Image
    except ImportError:
        raise DataError("pictures need the package pillow: pip install 'kitae[vision]'") from None
    buffer = io.BytesIO()
    Image.fromarray(canvas).save(buffer, format="PNG")
    return buffer.getvalue()


def _count_discs(rng: random.Random, params: Mapping[str, Any]) -> tuple[str, str, bytes]:
    canvas, count = _blank(rng, params["side"]), rng.randint(1, params["most"])
    _discs(rng, canvas, count, 0, params["side"])
    return "How many discs?", str(count), _saved(canvas)


def _compare_sides(rng: random.Random, params: Mapping[str, Any]) -> tuple[str, str, bytes]:
    side, most = params["side"], params["most"]
    canvas, (a, b) = _blank(rng, side, 2), rng.sample(range(1, most + 1), 2)
    _discs(rng, canvas, a, 0, side)
    _discs(rng, canvas, b, side, side)
    return "Which half has more discs, 1 or 2?", "1" if a > b else "2", _saved(canvas)


def _read_number(rng: random.Random, params: Mapping[str, Any]) -> tuple[str, str, bytes]:
    side, digits = params["side"], params["digits"]
    text = "".join(str(rng.randint(int(not i and digits > 1), 9)) for i in range(digits))
    canvas, colour = _blank(rng, side), _colour(rng)
    scale = max(1, min(side // (4 * digits + 1), side // 7))
    top = rng.randint(0, side - 5 * scale)
    left = rng.randint(0, side - (4 * digits - 1) * scale)
    for i, digit in enumerate(text):
        for place, on in enumerate(_GLYPHS[int(digit)]):
            if on == "1":
                row, column = top + place // 3 * scale, left + (4 * i + place % 3) * scale
                canvas[row : row + scale, column : column + scale] = colour
    return "Which number?", text, _saved(canvas)


_SIDE, _EXAMPLES = (_SHORTEST, 512), (0, 4)
PICTURE_TASKS: dict[str, tuple[str, Mapping[str, Any], Mapping[str, tuple[int, int]], Paint]] = {
    "count-discs": (
        "Count the discs in a picture.",
        {"side": 32, "most": 4, "examples": 0},
        {"side": _SIDE, "most": (1, 9), "examples": _EXAMPLES},
        _count_discs,
    ),
    "compare-sides": (
        "Say which half of a picture has more discs.",
        {"side": 32, "most": 4, "examples": 0},
        {"side": _SIDE, "most": (2, 9), "examples": _EXAMPLES},
        _compare_sides,
    ),
    "read-number": (
        "Read a number in a picture.",
        {"side": 32, "digits": 1, "examples": 0},
        {"side": (32, 512), "digits": (1, 6), "examples": _EXAMPLES},
        _read_number,
    ),
}
"""By name: a summary, the settings and their limits, and what draws one."""
