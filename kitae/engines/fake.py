"""A deterministic engine without a model, for testing environments, verifiers and pipelines in milliseconds.

    engine = FakeEngine(lambda request: tokenizer.encode("42"))

It keeps the contract of `Engine`: versions, pause, abort and per-request errors. It knows no text, so stop strings
are ignored.
"""

import asyncio
from collections.abc import Callable, Sequence

from kitae.engines.base import Completion, EngineStats, Request, Sampled, WeightUpdate
from kitae.errors import EngineError, RequestError
from kitae.types import FinishReason


class FakeEngine:
    """Answers every request with `respond(request)`, one token per `seconds_per_token`; log-probs are all -1.

    `respond` may raise `RequestError`. The answer is cut at max_tokens (finish "length") and after the first stop
    token (finish "stop"); without either it also ends with "stop".
    """

    shares_weights = True

    def __init__(
        self, respond: Callable[[Request], Sequence[int]], *, seconds_per_token: float = 0.0, version: int = 0
    ) -> None:
        self._respond = respond
        self._delay = seconds_per_token
        self._version = version
        self._running: dict[str, FinishReason | None] = {}  # how it is to end early
        self._sampled: dict[str, tuple[list[int], list[int]]] = {}  # tokens and versions of what is running
        self._paused = False
        self._closed = False
        self._changed = asyncio.Event()  # one of the three above; a new event after each change
        self._prompt_tokens = 0
        self._generated = 0
        self._busy = 0.0

    async def generate(self, request: Request) -> Completion:
        if self._closed:
            raise EngineError("the engine is closed")
        if not request.prompt_tokens:
            raise RequestError(f"request {request.id!r}: the prompt is empty")
        if request.id in self._running:
            raise RequestError(f"request id {request.id!r} is in flight already")
        planned = list(self._respond(request))[: request.sampling.max_tokens]
        tokens, versions = list(request.prior.tokens), list(request.prior.versions)
        self._running[request.id] = None
        self._sampled[request.id] = (tokens, versions)
        self._prompt_tokens += len(request.prompt_tokens)
        try:
            for token in planned[len(tokens) :]:
                await asyncio.sleep(self._delay)
                while self._paused and not self._running[request.id] and not self._closed:
                    await self._changed.wait()
                if self._closed:
                    raise EngineError("the engine was closed")
                if early := self._running[request.id]:
                    return _completion(request, tokens, versions, early)
                tokens.append(token)
                versions.append(self._version)
                self._generated += 1
                self._busy += self._delay
                if token in request.sampling.stop_tokens:
                    return _completion(request, tokens, versions, "stop")
        finally:
            del self._running[request.id], self._sampled[request.id]
        full = len(tokens) == request.sampling.max_tokens
        return _completion(request, tokens, versions, "length" if full else "stop")

    async def update_weights(self, update: WeightUpdate) -> int:
        self._version = update.version
        return self._version

    async def pause(self) -> None:
        self._paused = True

    async def resume(self) -> None:
        self._paused = False
        self._wake()

    async def abort(self, request_id: str) -> None:
        if request_id in self._running:
            self._running[request_id] = "abort"
            self._wake()

    async def park(self) -> None:
        self._running = dict.fromkeys(self._running, "parked")
        self._wake()

    def progress(self) -> dict[str, Sampled]:
        return {id: Sampled(tuple(t), (-1.0,) * len(t), tuple(v)) for id, (t, v) in self._sampled.items()}

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def stats(self) -> EngineStats:
        return EngineStats(
            version=self._version,
            prompt_tokens=self._prompt_tokens,
            prompt_tokens_shared=0,
            generated_tokens=self._generated,
            preemptions=0,
            running=len(self._running),
            waiting=0,
            busy_seconds=self._busy,
        )

    def sync_metrics(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        self._closed = True
        self._wake()


def _completion(request: Request, tokens: list[int], versions: list[int], finish: FinishReason) -> Completion:
    return Completion(request.id, tuple(tokens), (-1.0,) * len(tokens), tuple(versions), finish)
