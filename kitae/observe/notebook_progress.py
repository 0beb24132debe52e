"""Progress in a notebook: curves that are drawn again as steps come, and the last step in words below them."""

import io
import time
from pathlib import Path
from typing import Any

from IPython.display import Image, display
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kitae.config.root import Root
from kitae.observe.plots import CURVES, draw_main, values_of
from kitae.observe.progress import Log, Progress
from kitae.store.run_folder import Metrics

_PAUSE = 1.0  # seconds between two pictures


class NotebookProgress(Progress):
    """A picture in the cell that started the run, replaced at most once a second."""

    def __init__(self, config: Root, folder: Path, log: Log) -> None:
        super().__init__(config, folder, log)
        self._metrics = Metrics(folder / "metrics.jsonl")
        self._handle: Any = None
        self._words = ""
        self._drawn = 0.0

    def __exit__(self, *_: object) -> None:
        self._draw()

    def show_step(self, row: dict[str, Any], eta: str, first: str, cells: list[str], end: str) -> None:
        self._words = "  ".join([first, *cells[:3], end])
        if time.monotonic() - self._drawn > _PAUSE:
            self._draw()

    def _draw(self) -> None:
        rows = self._metrics.rows("step")
        if not rows:
            return
        self._drawn = time.monotonic()
        picture = Image(picture_of(rows, self._metrics.rows("eval"), self._words), format="png")
        if self._handle is None:
            self._handle = display(picture, display_id=True)
        else:
            self._handle.update(picture)


def picture_of(steps: list[dict[str, Any]], evals: list[dict[str, Any]], words: str = "") -> bytes:
    """The reward with held-out scores, and the first two other curves that the run has, as a PNG."""
    others = [(key, values) for key in CURVES if (values := values_of(key, steps))][:2]
    figure = Figure(figsize=(4 * (1 + len(others)), 2.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 1 + len(others), squeeze=False)[0]
    draw_main(axes[0], steps, evals)
    for axis, (key, values) in zip(axes[1:], others, strict=True):
        axis.plot([row["step"] for row in steps], values, ".-")
        axis.set_title(CURVES[key])
    for axis in axes:
        axis.set_xlabel("step")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
    if words:
        figure.suptitle(words, fontsize="small")
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=80)
    return file.getvalue()
