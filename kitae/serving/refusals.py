"""What a client is told when it gets no answer, in the shape that OpenAI's clients read."""

from typing import Any

from kitae.errors import RequestError

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "unmet_request_error",
    429: "rate_limit_error",
}


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
        return {"retry-after": str(self.seconds)} if self.seconds else {}

    def as_json(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}
