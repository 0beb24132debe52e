"""One server's work on one request, as far as it has told.

Which version sampled a token is known for certain when the answer ends: then the server names the spans of each. Until
then a token counts as one of the version that was served when the news before it came, which is never too new.
"""

import asyncio
from dataclasses import dataclass, field

from kitae.engines.base import Sampled
from kitae.engines.requests_in_flight import Flight
from kitae.engines.servers.dialect import StreamEvent, VersionSpan
from kitae.engines.servers.server_client import LineLost


@dataclass(slots=True, eq=False)
class Attempt:
    """name: of the request at the server. before: what the request had when it was sent. told: new tokens so far, those
    that `waiting` holds included. waiting: news of a server that is shut, with the version they count as. cut: of the
    response, after these tokens; the rest is not wanted. last: the news that ended it."""

    name: str
    flight: "Flight[Attempt]"
    before: Sampled
    stamp: int
    told: int = 0
    waiting: list[tuple[StreamEvent, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cut: int | None = None
    last: StreamEvent | None = None
    cached: int = 0
    task: "asyncio.Task[None] | None" = None

    def note(self, news: StreamEvent, version: int) -> int:
        """That it came while the server serves `version`; the version it counts as."""
        if len(news.tokens) != len(news.logprobs):
            raise LineLost(f"it must send a log-prob for each token, got {len(news.tokens)} and {len(news.logprobs)}")
        self.told += len(news.tokens)
        stamp, self.stamp = self.stamp, version
        self.cached = max(self.cached, news.cached)
        if news.finish not in (None, "stop", "length", "abort"):
            raise LineLost(f"an answer must end with stop, length or abort, got {news.finish!r}")
        if news.finish is not None:
            self.last = news
        return stamp

    def add(self, news: StreamEvent, version: int) -> None:
        self.tokens += news.tokens
        self.logprobs += news.logprobs
        self.versions += [version] * len(news.tokens)

    @property
    def length(self) -> int:
        return len(self.before.tokens) + len(self.tokens)

    @property
    def sampled(self) -> Sampled:
        """All tokens of the response that count, with those it had before."""
        b, part = self.before, slice(0, self.cut)
        return Sampled(
            (*b.tokens, *self.tokens)[part],
            (*b.logprobs, *self.logprobs)[part],
            (*b.versions, *self.versions)[part],
        )

    def date(self, spans: tuple[VersionSpan, ...]) -> None:
        """The versions as the server knows them."""
        found = [span.version for span in spans for _ in range(span.start, span.end)]
        if len(found) < len(self.tokens):
            raise LineLost(f"it must send the version of each of {self.told} tokens, got {spans}")
        self.versions = found[: len(self.tokens)]
