"""Requests are read here: their bodies within bounds of size, time and memory, and all work with them in threads.

    body ─► a lane, which is one thread: small requests do not wait for large ones ─► JSON ─► what `make` makes of it

So whatever a request holds, the event loop goes on meanwhile, and other requests are answered.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Generic, TypeVar

from starlette.requests import Request

from kitae.serving.http_bodies import Json, receive_body, unless_gone
from kitae.serving.refusals import Refused
from kitae.serving.request_bodies import READING, ReadingLimits, read_json

T = TypeVar("T")
P = TypeVar("P")

_SMALL = 32 * 2**10  # bytes of a body that is read in a few milliseconds
_WAIT = 5  # seconds after which it makes sense to ask again where too much is being read


class RequestReader(Generic[P]):
    """`await RequestReader([PromptReader.of(…), …]).read(request, make)`: what `make(body, prompts)` returns.

    prompts: what makes tokens, for each of the two lanes; one for both where nothing in it is changed by use.
    """

    def __init__(self, prompts: Sequence[P], limits: ReadingLimits = READING) -> None:
        self.limits = limits
        self._prompts = prompts[0], prompts[-1]
        self._lanes = tuple(ThreadPoolExecutor(1, f"kitae-reading-{name}") for name in ("small", "large"))
        self._held = 0

    async def read(self, request: Request, make: Callable[[Json, P], T]) -> T:
        with self._room() as hold:
            body = await receive_body(request, self.limits, hold)
            large = len(body) > _SMALL

            def work() -> T:
                return make(read_json(body, self.limits), self._prompts[large])

            running = asyncio.get_running_loop().run_in_executor(self._lanes[large], work)
            return await (unless_gone(request.receive, running) if large else running)

    @contextmanager
    def _room(self) -> Iterator[Callable[[int], None]]:
        """`hold(bytes)` tells how long a body has become by now."""
        mine = 0

        def hold(size: int) -> None:
            nonlocal mine
            size = size if size > _SMALL else 0
            if self._held - mine + size > self.limits.all_bytes:
                message = f"requests of at most {self.limits.all_bytes} bytes may be read at once, got more"
                raise Refused(f"{message}; try again in {_WAIT} s", 429, code="queue_full", seconds=_WAIT)
            self._held += size - mine
            mine = size

        try:
            yield hold
        finally:
            self._held -= mine
