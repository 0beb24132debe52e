"""Sessions with a server that speaks OpenEnv: one that was written for the test, in the real one's messages."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import pytest

from kitae.envs.openenv.openenv_world import OpenEnv
from kitae.errors import ConfigError
from kitae.types import Message, Prompt, ToolCall, Turn

websockets = pytest.importorskip("websockets.asyncio.server")

ACTION = {"properties": {"number": {"type": "integer"}, "metadata": {"type": "object"}}, "required": ["number"]}


async def session(line: Any) -> None:
    target = 0
    async for text in line:
        told = json.loads(text)
        if told["type"] == "close":
            return
        data, done, reward = told["data"], False, 0.0
        if told["type"] == "reset":
            target, said = data["seed"], "Guess."
        elif not isinstance(data.get("number"), int):
            error = {"message": "number must be whole", "code": "VALIDATION_ERROR"}
            await line.send(json.dumps({"type": "error", "data": error}))
            continue
        else:
            done = data["number"] == target
            said, reward = ("Right.", 1.0) if done else ("No.", 0.0)
        seen = {"observation": {"text": said}, "reward": reward, "done": done}
        await line.send(json.dumps({"type": "observation", "data": seen}))


def answer_schema(line: Any, request: Any) -> Any:
    if request.path == "/schema":
        return line.respond(HTTPStatus.OK, json.dumps({"action": ACTION}))
    return None


def served(work: Callable[[str], Awaitable[Any]]) -> Any:
    async def go() -> Any:
        async with websockets.serve(session, "127.0.0.1", 0, process_request=answer_schema) as server:
            return await work(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    return asyncio.run(go())


def test_each_episode_has_a_session_of_its_own() -> None:
    async def work(url: str) -> None:
        async with OpenEnv({"url": url, "show": "text"}) as world:
            assert world.tool["function"]["parameters"]["properties"] == {"number": {"type": "integer"}}

            async def play(seed: int, *numbers: Any) -> list[tuple[str, float | None, bool]]:
                prompt = Prompt("p", (Message("user", "Go"),), None, {"question": "Go", "seed": seed})
                episode = world.make(prompt)
                assert (await episode.start()).messages[-1].content == "Guess."
                found = []
                for number in numbers:
                    seen = await episode.step(Turn("", calls=(ToolCall("act", {"number": number}, "a"),)))
                    found.append((seen.messages[-1].content, seen.reward, seen.done))
                await episode.close()
                return found

            played = await asyncio.gather(play(1, 5, "x", 1), play(2, 1, 2))
            assert played[0] == [("No.", 0, False), ("Error: number must be whole", 0, False), ("Right.", 1, True)]
            assert played[1] == [("No.", 0, False), ("Right.", 1, True)]

    served(work)


def test_an_address_where_nothing_is_says_so() -> None:
    async def enter() -> None:
        async with OpenEnv({"url": "http://127.0.0.1:9"}):
            pass

    with pytest.raises(ConfigError, match="is no OpenEnv server"):
        asyncio.run(enter())
