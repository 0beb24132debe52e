"""The processes that talk to MCP servers, through the official package; see `kitae.envs.episode_processes`.

    setup  {"command", "env", "cwd"}      greeting  {"tools"}: as JSON schemas of functions
    job    {"name", "arguments"}          answer    {"text", "refused", "reward", "state"}, or {"problem"}

Reward and state are what the server says in the `_meta` of a result, as `kitae/reward` and `kitae/state`.

Each process starts a server of its own, which dies with it, and keeps one session. A server that writes without end
makes its process reach the memory limit; the process then ends, and the server with it.
"""

import asyncio
import os
import resource
import shutil
import threading
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from kitae.errors import ConfigError
from kitae.workers.die_with_parent import tethered
from kitae.workers.templates.template_main import Answer, serve

_MEMORY = 2**31  # bytes
_PAGES = 1_000  # of a list of tools
_LONGEST = 100_000  # characters of an answer, at most
_WORDS, _LAST_WORDS = 2_000, 0.5  # bytes of a server's stderr that are kept; seconds to read what is left of it
_CLOSED = -32000  # the package's error code for a closed connection


def main() -> None:
    serve(load)


def load(setup: Mapping[str, Any]) -> tuple[Mapping[str, Any], Answer]:
    """Start the server once to list its tools."""
    try:
        import mcp  # noqa: F401
    except ImportError:
        raise ConfigError("the environment 'mcp' needs a package: pip install 'kitae[mcp]'") from None
    command = setup["command"]
    if shutil.which(command[0]) is None:
        raise ConfigError(f"env.params.command: there is no program {command[0]!r}")
    words = _Words()
    try:
        tools = asyncio.run(_tools(setup, words))
    except BaseException as problem:
        reason = f"{_reason(problem)}{words.last()}"
        raise ConfigError(f"env.params.command: {' '.join(command)!r} is no MCP server: {reason}") from None
    if not tools:
        raise ConfigError(f"env.params.command: {' '.join(command)!r} must have tools, got none")
    return {"tools": tools}, _Session(setup).answer


class _Words:
    """What a server writes to stderr, of which the end is kept."""

    def __init__(self) -> None:
        self._tail = b""
        read, write = os.pipe()
        self.file = os.fdopen(write, "wb", 0)
        self._thread = threading.Thread(target=self._read, args=(read,), daemon=True)
        self._thread.start()

    def _read(self, read: int) -> None:
        while part := os.read(read, 2**16):
            self._tail = (self._tail + part)[-_WORDS:]
        os.close(read)

    def last(self) -> str:
        self.file.close()  # the server, which has the other end, is gone or ending
        self._thread.join(_LAST_WORDS)
        words = self._tail.decode(errors="replace").strip()
        return f"; its stderr ends with:\n{words}" if words else ""


class _Session:
    """The session of one process, opened at the first job."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._setup = setup
        self._words: _Words
        self._loop: asyncio.AbstractEventLoop | None = None
        self._jobs: asyncio.Queue[tuple[Mapping[str, Any], asyncio.Future[Mapping[str, Any]]]]

    def answer(self, job: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._loop is None:
            resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
            self._loop = asyncio.new_event_loop()
            self._jobs = asyncio.Queue()
            self._words = _Words()
            self._task = self._loop.create_task(self._serve())
        return self._loop.run_until_complete(self._ask(job))

    async def _ask(self, job: Mapping[str, Any]) -> Mapping[str, Any]:
        answered: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        await self._jobs.put((job, answered))
        either: set[asyncio.Future[Any]] = {answered, self._task}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            return {"problem": f"the session ended: {_reason(self._task.exception())}{self._words.last()}"}
        answer = answered.result()
        return {"problem": f"{answer['problem']}{self._words.last()}"} if "problem" in answer else answer

    async def _serve(self) -> None:
        """Open the session and handle all requests in one task, because the same task must close what it opened."""
        async with AsyncExitStack() as stack:
            session = await _session(stack, self._setup, self._words)
            while True:
                job, answered = await self._jobs.get()
                answered.set_result(await _called(session, job))


async def _called(session: Any, job: Mapping[str, Any]) -> Mapping[str, Any]:
    import mcp

    refusals: type[Exception] = mcp.MCPError if hasattr(mcp, "MCPError") else mcp.McpError  # its name since version 2
    try:
        result = await session.call_tool(job["name"], job["arguments"])
    except refusals as refusal:
        code = getattr(getattr(refusal, "error", refusal), "code", None)
        if code == _CLOSED:
            return {"problem": f"the server is gone: {refusal}"[:1000]}
        return {"text": str(refusal)[:_LONGEST], "refused": True}
    found = result.model_dump(by_alias=True, mode="json")
    told = found.get("_meta") or {}
    named = {"reward": told.get("kitae/reward"), "state": told.get("kitae/state")}
    return {"text": _text(found.get("content") or [])[:_LONGEST], "refused": bool(found.get("isError")), **named}


def _text(content: list[Any]) -> str:
    """The text of an answer; other content is replaced by its kind."""
    shown = []
    for part in content:
        kind = part.get("type")
        if kind == "text":
            shown.append(str(part.get("text", "")))
        elif kind == "resource" and "text" in part.get("resource", {}):
            shown.append(str(part["resource"]["text"]))
        else:
            shown.append(f"[{kind}]")
    return "\n".join(shown)


async def _tools(setup: Mapping[str, Any], words: _Words) -> list[Mapping[str, Any]]:
    from mcp.types import PaginatedRequestParams

    tools: list[Mapping[str, Any]] = []
    async with AsyncExitStack() as stack:
        session = await _session(stack, setup, words)
        cursor = None
        for _ in range(_PAGES):
            params = PaginatedRequestParams(cursor=cursor) if cursor else None
            found = (await session.list_tools(params=params)).model_dump(by_alias=True, mode="json")
            tools += [_function(tool) for tool in found["tools"]]
            cursor = found.get("nextCursor")
            if not cursor:
                break
    return tools


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool as chat templates expect it."""
    inside = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool.get("inputSchema") or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": inside}


async def _session(stack: AsyncExitStack, setup: Mapping[str, Any], words: _Words) -> Any:
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client

    program, *arguments = tethered(setup["command"])
    server = StdioServerParameters(command=program, args=arguments, env=setup["env"], cwd=setup["cwd"] or None)
    errors: Any = words.file
    read, write = await stack.enter_async_context(stdio_client(server, errlog=errors))
    session = await stack.enter_async_context(ClientSession(read, write))
    await session.initialize()
    return session


def _reason(problem: BaseException | None) -> str:
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    return f"{type(problem).__name__}: {problem}"[:1000] if problem else "it is over"
