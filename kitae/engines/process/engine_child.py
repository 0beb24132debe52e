"""One process of a `ProcessEngine`, from its start to its end, and the conversation with it.

Beside what loses any process (`kitae.workers.connection`), one that has work and takes no step is lost.
"""

from collections.abc import Callable

from kitae.engines.base import EngineStats
from kitae.errors import KitaeError
from kitae.workers.base import Post
from kitae.workers.connection import Deadlines, Link
from kitae.workers.frames import Frame


class Child(Link):
    """`hear` is called with every frame that answers no call, `on_loss` once, when it is lost."""

    def __init__(
        self,
        post: Post,
        limits: Deadlines,
        error: type[KitaeError],
        hear: "Callable[[Child, Frame], None]",
        on_loss: "Callable[[Child], None]",
    ) -> None:
        super().__init__(post, limits, error)
        self.stats = EngineStats(0, 0, 0, 0, 0, 0, 0, 0.0)
        self._rests = False  # paused
        self._before = self.stats
        self._still = 0.0  # seconds
        self._tell = hear
        self._report_loss = on_loss

    def _notice(self, frame: Frame) -> None:
        self.stats = EngineStats(**frame.header.pop("stats"))
        self._rests = frame.header.pop("rests")

    def _hear(self, frame: Frame) -> None:
        self._tell(self, frame)

    def _on_loss(self) -> None:
        self._report_loss(self)

    def _stalled(self, passed: float) -> str:
        now, before = self.stats, self._before
        moves = (now.generated_tokens, now.prompt_tokens, now.busy_seconds)
        moved = moves != (before.generated_tokens, before.prompt_tokens, before.busy_seconds)
        has_work = now.running + now.waiting > 0 and not self._rests
        self._before, self._still = now, self._still + passed if has_work and not moved else 0.0
        if self._still >= self.limits.stall:
            return f"it had work and took no step for {self.limits.stall:g} s"
        return ""
