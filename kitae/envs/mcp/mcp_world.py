"""The environment `mcp`: a question of the data, and the tools of an MCP server to answer it with."""

import asyncio
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field

from kitae.envs.config import program_variables, read_params
from kitae.envs.episode_context import read_reward
from kitae.envs.episode_processes import EpisodeProcess, EpisodeProcesses
from kitae.envs.tools.base import ToolAnswer, ToolEpisode, ToolRefusal
from kitae.errors import ConfigError
from kitae.sandbox.program_sandbox import HOME, ProgramSandbox, places, sandboxed
from kitae.section import Section
from kitae.types import Prompt, Tool, ToolCall


class McpParams(Section):
    """Params of the environment `mcp`."""

    command: tuple[str, ...] = Field(min_length=1, description="The program that is the server, and its arguments.")
    env: dict[str, str] = Field(default_factory=dict, description="Variables of the server's environment.")
    pass_on: tuple[str, ...] = Field((), description="Names of variables of ours that the server gets too.")
    cwd: str = Field("", description="The folder in which it runs.")
    sandbox: ProgramSandbox = Field(
        "none", description="Where it runs: none: with your rights; or bwrap, with a home and /tmp of its own."
    )
    readable: tuple[str, ...] = Field((), description="Further files and folders that it can read in the sandbox.")
    writable: tuple[str, ...] = Field((), description="Files and folders that it can write in the sandbox.")
    network: bool = Field(False, description="Whether it reaches the machine's network from the sandbox.")
    tools: tuple[str, ...] = Field((), description="Which of its tools the model may call; none: all.")
    shared: bool = Field(False, description="One server for all episodes, instead of one for each.")
    seconds: float = Field(30.0, gt=0, description="Seconds for each call; a server that takes longer is ended.")
    calls: int | None = Field(
        None, ge=0, description="Calls of tools in an episode, at most; further ones are refused."
    )
    output: int = Field(2000, ge=50, description="Characters of an answer of a tool, at most; the middle is cut.")


class ServerFailed(Exception):
    """The server did not answer, so the episode cannot go on."""


class Mcp:
    """A question of the data, and the tools of an MCP server to answer it with.

    A `World`. The tools are listed once, when it is entered.
    """

    params: ClassVar = McpParams

    def __init__(self, params: Mapping[str, Any], hidden: Sequence[Path] = ()) -> None:
        self._params = given = read_params(McpParams, params, "mcp")
        own = {} if given.sandbox == "none" else {"HOME": HOME, "TMPDIR": "/tmp"}
        self.variables = program_variables(given.pass_on, {**own, **given.env})
        command = list(given.command)
        if given.sandbox == "bwrap" and shutil.which(command[0]):
            command = sandboxed(
                command,
                Path(given.cwd or "."),
                self.variables.get("PATH", os.defpath),
                readable=places(given.readable),
                writable=places(given.writable),
                hidden=[place.absolute() for place in hidden],
                alone=not given.network,
            )
        setup = {"command": command, "env": self.variables, "cwd": given.cwd}
        self._processes = EpisodeProcesses(
            "kitae.envs.mcp.mcp_process", setup, "speaker with an MCP server", ConfigError
        )
        self._tools: tuple[Tool, ...] = ()
        self._common: _Server | None = None

    async def __aenter__(self) -> Self:
        await self._processes.__aenter__()
        found = {tool["function"]["name"]: tool for tool in self._processes.greeting["tools"]}
        wanted = self._params.tools or tuple(found)
        if missing := [name for name in wanted if name not in found]:
            await self._processes.__aexit__(None, None, None)
            raise ConfigError(f"env.params.tools: the server has no tool {missing[0]!r}; it has {', '.join(found)}")
        self._tools = tuple(found[name] for name in wanted)
        if self._params.shared:
            self._common = _Server(self._processes.create(), self._params.seconds)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._processes.__aexit__(None, None, None)

    def make(self, prompt: Prompt) -> ToolEpisode:
        server = self._common or _Server(self._processes.create(), self._params.seconds)
        tools = [_ServerTool(tool, server, closes=self._common is None) for tool in self._tools]
        return ToolEpisode(prompt, tools, self._params.output, calls=self._params.calls)


class _Server:
    """A session with a server, which handles one request at a time."""

    def __init__(self, process: EpisodeProcess, seconds: float) -> None:
        self._process, self._seconds = process, seconds
        self._lock = asyncio.Lock()

    async def ask(self, job: Mapping[str, Any]) -> Mapping[str, Any]:
        async with self._lock:
            return await self._process.ask(job, self._seconds)

    async def close(self) -> None:
        await self._process.close()


class _ServerTool:
    """An `EpisodeTool` for one tool of a server."""

    def __init__(self, tool: Tool, server: _Server, closes: bool) -> None:
        self.tool = tool
        self._server, self._closes = server, closes

    async def call(self, call: ToolCall) -> ToolAnswer:
        answer = await self._server.ask({"name": call.name, "arguments": dict(call.arguments)})
        if "problem" in answer:
            await self._server.close()
            raise ServerFailed(answer["problem"])
        if answer["refused"]:
            raise ToolRefusal(answer["text"])
        return ToolAnswer(str(answer["text"]), read_reward(answer.get("reward")), str(answer.get("state") or ""))

    async def close(self) -> None:
        if self._closes:
            await self._server.close()
