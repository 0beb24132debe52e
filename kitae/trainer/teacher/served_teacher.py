"""A teacher behind a server with an OpenAI-style `/v1/completions`, which scores given tokens.

A request holds the token numbers of one response with its prompt; the server returns them (`echo`) with their
log-probs, which are those at a temperature of 1. One more token is generated and dropped, as some servers refuse to
generate none.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

import numpy as np

from kitae.clients.http_client import ask
from kitae.clients.service import Service
from kitae.errors import ModelError, RemoteError
from kitae.types import FloatArray, Sample

_PATH = "/completions"
_PROBE = "The quick brown fox jumps over 13 lazy dogs; 2 + 2 = 4."


class ServedTeacher:
    """Implements `kitae.trainer.base.OutsideTeacher`.

    Sends all samples at once; the client holds back what is more than `service.concurrency`.
    """

    restarts = 0
    takes_turns = False

    def __init__(self, service: Service) -> None:
        self._service = service
        self._url = service.url(_PATH)

    def use_threads(self, count: int) -> None:
        """The server has threads of its own."""

    async def start(self) -> None:
        """The server runs already."""

    async def close(self) -> None:
        """The server may have other clients."""

    async def score(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """The log-probs of the loss tokens of each sample."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._score(s)) for s in samples]
        except ExceptionGroup as failures:  # the first that failed; the others were cancelled
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _score(self, sample: Sample) -> FloatArray:
        tokens = [int(t) for t in np.asarray(sample.tokens_T)]
        logprobs = (await _echo(self._service, tokens))["token_logprobs"]
        found = [logprobs[t] for t in np.flatnonzero(sample.mask_T)]
        if not all(isinstance(x, int | float) and isfinite(x) for x in found):
            bad = next(x for x in found if not (isinstance(x, int | float) and isfinite(x)))
            raise RemoteError(f"the teacher must give a log-prob of every token, got {bad!r} from {self._url}")
        return np.array(found, dtype=np.float32)

    async def check(self, tokenizer: Any) -> None:
        """Raise unless the server answers, returns log-probs of given tokens, and has the student's vocabulary."""
        service = replace(self._service, retries=min(1, self._service.retries), deadline=60.0, cache="")
        tokens = tokenizer.encode(_PROBE, add_special_tokens=False)
        try:
            found = await _echo(service, tokens)
        except RemoteError as problem:
            raise RemoteError(f"method.teacher.url: {problem}") from None
        texts = found.get("tokens")
        if not isinstance(texts, list):
            return
        for number, text in zip(tokens, texts, strict=False):
            if text not in (f"token_id:{number}", ours := tokenizer.decode([number])):
                raise ModelError(
                    f"the teacher must have the student's vocabulary, got {text!r} from {self._url} for token "
                    f"{number}, which is {ours!r} of the student's"
                )


async def _echo(service: Service, tokens: list[int]) -> dict[str, Any]:
    """The server's log-probs of these tokens: `{"tokens": […], "token_logprobs": [None, -0.1, …]}`."""
    body = {
        "model": service.model,
        "prompt": tokens,
        "max_tokens": 1,
        "temperature": 1.0,
        "echo": True,
        "logprobs": 1,
    }

    def read(answer: Any) -> dict[str, Any]:
        try:
            said = answer["choices"][0]["logprobs"]
            logprobs = said["token_logprobs"]
            if len(logprobs) < len(tokens):
                raise RemoteError(
                    f"{service.url(_PATH)} must repeat the prompt with log-probs (echo), got {len(logprobs)} of them "
                    f"for {len(tokens)} tokens"
                )
        except (KeyError, IndexError, TypeError):
            raise RemoteError(
                f"{service.url(_PATH)} must answer with choices[0].logprobs.token_logprobs, got {str(answer)[:200]}"
            ) from None
        return {"tokens": said.get("tokens"), "token_logprobs": logprobs[: len(tokens)]}

    return await ask(service, _PATH, body, read)
