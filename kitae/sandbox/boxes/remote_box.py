"""Boxes on other machines, which run `kitae sandbox-host`. A box is opened where the smallest share is taken; a host
that does not answer is asked again after a while. Boxes of a host that is gone are lost; the others go on.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self

from kitae.errors import ConfigError
from kitae.sandbox.boxes.base import BoxLimits, BoxLost, BoxRefused, BoxWorld, Ran
from kitae.sandbox.boxes.box_host import frame, unframed

if TYPE_CHECKING:
    pass

_CONNECT, _SLACK, _LOOK = 10.0, 60.0, 120.0  # seconds
_REST = 15.0  # seconds until a host that failed is asked again
_FULL_WAIT = 0.5  # seconds until full hosts are asked again
_FULL_LIMIT = 600.0


class RemoteBoxes:
    """A kind of box: `RemoteBoxes(["http://10.0.0.5:7070"], key="…")`."""

    name = "remote"

    def __init__(self, hosts: Sequence[str], key: str) -> None:
        import httpx

        if not hosts:
            raise ConfigError("remote boxes need hosts, got none")
        self._hosts = [host.rstrip("/") for host in hosts]
        self._client = httpx.AsyncClient(
            headers={"authorization": f"Bearer {key}"}, timeout=httpx.Timeout(_LOOK, connect=_CONNECT),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64), trust_env=False,
        )  # fmt: skip
        self._failed: dict[str, float] = {}
        self._taken = dict.fromkeys(self._hosts, 0)
        self._open = set[RemoteBox]()

    async def check(self) -> None:
        for host in self._hosts:
            try:
                answer = (await self._client.get(f"{host}/health")).json()
                await self.ask(f"{host}/boxes/none", {"do": "close"}, b"", _LOOK)
            except BoxLost as loss:
                if "no such box" not in str(loss):
                    raise ConfigError(f"the sandbox host {host}: {loss}") from None
            except Exception as problem:
                raise ConfigError(f"the sandbox host {host} does not answer: {problem!r}") from None
            if not isinstance(answer, dict) or "most" not in answer:
                raise ConfigError(f"{host} is no sandbox host")

    async def open(self, limits: BoxLimits, world: BoxWorld | None = None) -> "RemoteBox":
        """Waits while all hosts are full. Raises `BoxLost` if none answers."""
        order = {"limits": asdict(limits), "world": "" if world is None else world.kind}
        end, problem = time.monotonic() + _FULL_LIMIT, "every host is full"
        while time.monotonic() < end:
            full = False
            for host in sorted(self._hosts, key=lambda host: self._taken[host]):
                if time.monotonic() - self._failed.get(host, -_REST) < _REST:
                    continue
                self._taken[host] += 1
                try:
                    answer, _ = await self.ask(f"{host}/boxes", order, b"" if world is None else world.data, _LOOK)
                    return RemoteBox(self, host, answer["id"], self._open)
                except _Full:
                    full = True
                except BoxLost as loss:
                    problem, self._failed[host] = str(loss), time.monotonic()
                self._taken[host] -= 1
            if not full:
                break
            await asyncio.sleep(_FULL_WAIT)
        raise BoxLost(f"no host opens a box: {problem}")

    async def ask(
        self, url: str, order: Mapping[str, Any], data: bytes, seconds: float
    ) -> tuple[dict[str, Any], bytes]:
        import httpx

        timeout = httpx.Timeout(seconds, connect=_CONNECT)
        try:
            answer = await self._client.post(url, content=frame(order, data), timeout=timeout)
        except httpx.HTTPError as problem:
            raise BoxLost(f"the host does not answer: {problem!r}") from None
        if answer.status_code == 503:
            raise _Full
        if answer.status_code != 200:
            reason = "it refuses the key" if answer.status_code == 401 else f"status {answer.status_code}"
            raise BoxLost(f"the host answers with an error: {reason}")
        try:
            head, found = unframed(answer.content)
        except ValueError:
            raise BoxLost("the host answers with no frame") from None
        if "lost" in head:
            raise BoxLost(head["lost"])
        if "refused" in head:
            raise BoxRefused(head["refused"])
        return head, found

    def left(self, host: str) -> None:
        self._taken[host] -= 1

    async def close(self) -> None:
        for box in list(self._open):
            await box.close()
        await self._client.aclose()


class _Full(Exception):
    """All boxes of a host are taken."""


class RemoteBox:
    """A `Box`; see `RemoteBoxes.open`."""

    def __init__(self, boxes: RemoteBoxes, host: str, id: str, among: "set[RemoteBox]") -> None:
        self._boxes, self._host, self._id, self._among = boxes, host, id, among
        among.add(self)

    async def run(self, command: str, *, seconds: float = 60.0, output: int = 20_000, folder: str = "/") -> Ran:
        order = {"do": "run", "command": command, "seconds": seconds, "output": output, "folder": folder}
        head, said = await self._ask(order, seconds=seconds + _SLACK)
        return Ran(head["status"], said.decode(errors="replace"), head["ended"])

    async def read(self, path: str, most: int = 2**24) -> bytes:
        return (await self._ask({"do": "read", "path": path, "most": most}))[1]

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        await self._ask({"do": "write", "path": path, "mode": mode}, data)

    async def snapshot(self, folders: Sequence[str] = ("/",)) -> BoxWorld:
        head, data = await self._ask({"do": "snapshot", "folders": list(folders)})
        return BoxWorld(head["world"], data)

    async def close(self) -> None:
        if self in self._among:
            self._among.discard(self)
            self._boxes.left(self._host)
            with suppress(BoxLost):  # the host is gone, or will close it by itself
                await self._ask({"do": "close"}, seconds=_CONNECT)

    async def _ask(
        self, order: Mapping[str, Any], data: bytes = b"", seconds: float = _LOOK
    ) -> tuple[dict[str, Any], bytes]:
        return await self._boxes.ask(f"{self._host}/boxes/{self._id}", order, data, seconds)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
