"""A server over HTTP as its users describe it."""

import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from kitae.errors import RemoteError


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A model behind an HTTP server, and how to treat it.

    `Service(base_url="http://localhost:8000/v1", model="qwen3-8b", key_env="OPENAI_API_KEY")`
    key_env: the environment variable with the key; "" or an unset variable: none is sent. requests_per_minute: evenly
    spaced; 0: no limit. backoff: seconds before the first retry, doubled for each further one. request_timeout: of one
    try; deadline: of all of them. cache: a folder, "": none.
    """

    base_url: str
    model: str
    key_env: str = ""
    concurrency: int = 16
    requests_per_minute: float = 0.0
    retries: int = 4
    backoff: float = 0.5
    request_timeout: float = 60.0
    deadline: float = 180.0
    cache: str = ""

    def __post_init__(self) -> None:
        _check_url(self.base_url)
        for name, value, least in (
            ("concurrency", self.concurrency, 1),
            ("requests_per_minute", self.requests_per_minute, 0),
            ("retries", self.retries, 0),
            ("backoff", self.backoff, 0),
        ):
            if not value >= least:
                raise RemoteError(f"{name} must be at least {least}, got {value}")
        for name, seconds in (("request_timeout", self.request_timeout), ("deadline", self.deadline)):
            if not seconds > 0:
                raise RemoteError(f"{name} must be above 0 seconds, got {seconds}")

    @property
    def key(self) -> str:
        key = os.environ.get(self.key_env, "").strip() if self.key_env else ""
        if not (key.isascii() and key.isprintable()):
            raise RemoteError(f"the key in ${self.key_env} must be printable ASCII, got other characters")
        return key

    def url(self, path: str) -> str:
        base = self.base_url.rstrip("/")
        return base if base.endswith(path) else base + path


def _check_url(url: str) -> None:
    """Refuse what is no base URL; the message never repeats the part in which secrets are written."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise RemoteError("base_url must be an http or https URL, got one that cannot be read") from None
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise RemoteError("base_url must have no user, password, query or fragment; the key belongs in key_env")
    if parts.scheme not in ("http", "https") or not host:
        raise RemoteError(f"base_url must be an http or https URL, got {url!r}")
