"""Refusals in the shapes that OpenAI's and Anthropic's clients read, and the limit on answers under way: a request
beyond it is refused at once, with a time to try again.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kitae.errors import RequestError

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "unmet_request_error",
    429: "rate_limit_error",
}
_MESSAGES_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_LONGEST, _LONGEST_PARAM = 2000, 200  # characters


class Refused(RequestError):
    """`Refused("n must be at least 1, got 0", param="n")`: an answer with status 400 that names the field.

    code: a word for programs. seconds: after how many it makes sense to ask again.
    """

    def __init__(
        self, message: str, status: int = 400, *, param: str | None = None, code: str | None = None, seconds: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.seconds = status, param, code, seconds

    @property
    def headers(self) -> dict[str, str]:
        closing = {"connection": "close"} if self.status == 408 else {}  # the rest of the request may come never
        return closing | ({"retry-after": str(self.seconds)} if self.seconds else {})

    def as_json(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "server_error")
        message, param = _cut(str(self), _LONGEST), self.param and _cut(self.param, _LONGEST_PARAM)
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}

    def as_message(self) -> dict[str, Any]:
        """In Anthropic's shape, which has no place for the name of a field but the sentence."""
        kind = _MESSAGES_KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": _cut(str(self), _LONGEST)}}


def _cut(text: str, most: int) -> str:
    """Messages repeat what was sent, which may be long."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


_LONGEST_WAIT = 60  # seconds
_WEIGHT = 0.1  # of the newest answer in the mean of how long they take


class AdmissionControl:
    """`with admission.take(4): …` holds four places; `taken` is the number of places in use now."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = 0
        self.refused = 0
        self._seconds = 1.0

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        if count > self.most:
            raise Refused(f"one request may have at most {self.most} answers, got {count}", param="n")
        if self.taken + count > self.most:
            self.refused += 1
            wait = max(1, min(_LONGEST_WAIT, round(self._seconds)))
            message = f"all {self.most} places are taken: {self.taken} answers are under way; try again in {wait} s"
            raise Refused(message, 429, code="queue_full", seconds=wait)
        began = time.monotonic()
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count
            self._seconds += _WEIGHT * (time.monotonic() - began - self._seconds)
