"""An event loop in a thread of its own, for those who call from none, or from another that is running."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from kitae.errors import EngineError

T = TypeVar("T")


class LoopThread:
    """`LoopThread("kitae-model").wait(work())`: what `work` returns or raises, whoever asks, from any thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        return not self._loop.is_closed()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        if not self.is_open:
            work.close()
            raise EngineError("the model is closed: load it again")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
