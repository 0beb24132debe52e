"""Models beside the policy that agent programs may ask by name: a fixed judge, an opponent, a helper.

    [env.params.models]
    "gpt-4o" = "policy"                                                     # a further name of the policy
    judge = { url = "http://127.0.0.1:8000/v1", model = "qwen3-8b", key_env = "JUDGE_KEY" }

A request to another name goes on to its server as it came, in whichever dialect, and so does the answer; neither is
trained on or journalled, and the program never sees the key. An episode that is resumed asks such a model again.
"""

from collections.abc import AsyncGenerator, Mapping
from typing import Literal

import httpx
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kitae.clients.service import Service
from kitae.errors import ConfigError, RemoteError
from kitae.section import Section
from kitae.serving.http_bodies import Json
from kitae.serving.refusals import Refused

_CONNECTING = 10.0  # seconds
_PASSED_ON = ("content-type", "retry-after")  # headers of an answer
_VERSION = "anthropic-version"


class OtherModel(Section):
    """A model of another server."""

    url: str = Field(description="The base URL of its server, with /v1.")
    model: str = Field("", description="Its name there; empty: the one that the program says.")
    key_env: str = Field("", description="The variable with the key; the program does not see it.")


NamedModel = Literal["policy"] | OtherModel


class OtherModels:
    """`OtherModels({"judge": OtherModel(url=…)}).relay("judge", …)` is the server's answer, as it comes."""

    def __init__(self, named: Mapping[str, NamedModel]) -> None:
        self._services = {name: _service(name, one) for name, one in named.items() if isinstance(one, OtherModel)}
        self._client: httpx.AsyncClient | None = None

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._services)

    async def relay(self, name: str, request: Request, body: Json) -> Response:
        service = self._services[name]
        if self._client is None:
            timeout = httpx.Timeout(None, connect=_CONNECTING)
            self._client = httpx.AsyncClient(timeout=timeout, follow_redirects=False)
        path = str(request.scope["path"]).partition("/v1")[2]
        headers = {"authorization": f"Bearer {service.key}", "x-api-key": service.key} if service.key else {}
        headers |= {_VERSION: request.headers[_VERSION]} if _VERSION in request.headers else {}
        sent = self._client.build_request(
            "POST", service.url(path), json={**body, "model": service.model}, headers=headers
        )
        try:
            reply = await self._client.send(sent, stream=True)
        except httpx.HTTPError as error:
            raise Refused(f"the server of {name!r} cannot be reached: {type(error).__name__}", 502) from None
        told = {name: reply.headers[name] for name in _PASSED_ON if name in reply.headers}
        return StreamingResponse(_parts(reply), reply.status_code, told)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()


async def _parts(reply: httpx.Response) -> AsyncGenerator[bytes, None]:
    """What the server says; the connection ends with the stream, also where nobody hears its end."""
    try:
        async for part in reply.aiter_bytes():
            yield part
    finally:
        await reply.aclose()


def _service(name: str, model: OtherModel) -> Service:
    try:
        return Service(base_url=model.url, model=model.model or name, key_env=model.key_env)
    except RemoteError as error:
        raise ConfigError(f"env.params.models.{name}: {error}") from None
