"""The environment `openenv`: an episode with a server that speaks OpenEnv, each in a session of its own.

    GET /schema    the fields of an action
    /ws            {"type": "reset" | "step", "data": {…}}
    answers        {"type": "observation", "data": {"observation", "reward", "done"}}

The model acts by calling the tool `act`, whose arguments are the fields of the server's actions. What it reads is the
observation as JSON, or the one field that `show` names. Rewards are the server's.
"""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar, Self

from pydantic import Field

from kitae.envs.base import Observation, Opening
from kitae.envs.config import read_params
from kitae.envs.games.game_world import seed_of
from kitae.envs.tools.base import readable, shortened
from kitae.errors import ConfigError
from kitae.section import Section
from kitae.types import Message, Prompt, Tool, Turn

_LARGEST = 2**24  # bytes of a message
_CONNECT = 20.0  # seconds


class OpenEnvParams(Section):
    """Params of the environment `openenv`."""

    url: str = Field(description="The server's address: http://127.0.0.1:8000.")
    system: str = Field("", description="A system message before the first observation.")
    show: str = Field("", description="The field of an observation that the model reads; default: all, as JSON.")
    reset: dict[str, Any] = Field(default_factory=dict, description="What reset gets beside the seed.")
    output: int = Field(4000, ge=50, description="Characters of an observation, at most; the middle is cut.")


class ServerRefused(Exception):
    """The server does not do what it was asked for, so the episode cannot go on."""


class OpenEnv:
    """An episode with a server that speaks OpenEnv.

    A `World`. The schema of its actions is read once, when it is entered.
    """

    params: ClassVar = OpenEnvParams

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.given = read_params(OpenEnvParams, params, "openenv")
        self.url = self.given.url.rstrip("/")
        try:
            from websockets.asyncio.client import connect  # noqa: F401
        except ImportError:
            raise ConfigError("the environment 'openenv' needs a package: pip install 'kitae[openenv]'") from None
        self.tool: Tool = {}

    async def __aenter__(self) -> Self:
        import httpx

        try:
            async with httpx.AsyncClient(timeout=_CONNECT, trust_env=False) as client:
                told = (await client.get(f"{self.url}/schema")).raise_for_status().json()["action"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as problem:
            raise ConfigError(f"env.params.url: {self.url!r} is no OpenEnv server: {problem!r}") from None
        fields = {name: kind for name, kind in told.get("properties", {}).items() if name != "metadata"}
        parameters = {"type": "object", "properties": fields, "required": told.get("required", [])}
        if "$defs" in told:
            parameters["$defs"] = told["$defs"]
        inside = {"name": "act", "description": told.get("description") or "Acts.", "parameters": parameters}
        self.tool = {"type": "function", "function": inside}
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def make(self, prompt: Prompt) -> "OpenEnvEpisode":
        return OpenEnvEpisode(self, prompt)


class OpenEnvEpisode:
    """A session with the server: an `Environment`."""

    def __init__(self, world: OpenEnv, prompt: Prompt) -> None:
        self._world, self._prompt = world, prompt
        self._line: Any = None

    async def start(self) -> Opening:
        from websockets.asyncio.client import connect

        address = f"ws{self._world.url.removeprefix('http')}/ws"
        self._line = await connect(address, open_timeout=_CONNECT, max_size=_LARGEST, proxy=None)
        given = {**self._world.given.reset, "seed": seed_of(self._prompt)}
        seen = await self._ask("reset", given)
        system = (Message("system", self._world.given.system),) if self._world.given.system else ()
        return Opening((*system, Message("user", self._shown(seen))), (self._world.tool,))

    async def step(self, turn: Turn) -> Observation:
        if turn.problem:
            return Observation((Message("tool", f"Error: {turn.problem}"),), reward=0.0)
        if not turn.calls:
            return Observation(done=True, reward=0.0)
        messages, total = list[Message](), 0.0
        for call in turn.calls:
            try:
                seen = await self._ask("step", dict(call.arguments))
            except ServerRefused as refusal:
                messages.append(Message("tool", f"Error: {refusal}", call_id=call.id, name=call.name))
                continue
            total += float(seen.get("reward") or 0.0)
            messages.append(Message("tool", self._shown(seen), call_id=call.id, name=call.name))
            if seen.get("done"):
                return Observation(tuple(messages), done=True, reward=total)
        return Observation(tuple(messages), reward=total)

    async def close(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            with suppress(Exception):
                async with asyncio.timeout(_CONNECT):
                    await line.send(json.dumps({"type": "close"}))
                    await line.close()

    async def _ask(self, what: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        await self._line.send(json.dumps({"type": what, "data": data}))
        answer = json.loads(await self._line.recv())
        found = answer.get("data") or {}
        if answer.get("type") == "error":
            if what == "step" and found.get("code") == "VALIDATION_ERROR":
                raise ServerRefused(str(found.get("message"))[:500])
            raise RuntimeError(f"the server refuses {what}: {found.get('code')}: {str(found.get('message'))[:500]}")
        return found if isinstance(found, Mapping) else {}

    def _shown(self, seen: Mapping[str, Any]) -> str:
        inside, show = seen.get("observation") or {}, self._world.given.show
        text = str(inside.get(show, "")) if show else json.dumps(inside, ensure_ascii=False)
        return shortened(readable(text), self._world.given.output)
