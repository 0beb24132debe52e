"""The environment `tools`: a question of the data, and tools to answer it with."""

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, JsonValue, model_validator

from kitae.data.messages import read_messages
from kitae.envs.config import read_params
from kitae.envs.tools.base import EpisodeTool, ToolEpisode
from kitae.envs.tools.calculator import Calculator
from kitae.envs.tools.own_tools import OwnEpisode, OwnTool, load_tool, methods_of
from kitae.envs.tools.python import Python, python_processes
from kitae.envs.tools.search import Index, Search
from kitae.errors import ConfigError, DataError
from kitae.plugins import is_plugin, nearest
from kitae.sandbox.sandbox_jobs import Limits
from kitae.sandbox.session import SandboxChoice
from kitae.section import Section
from kitae.types import Message, Prompt

TOOLS = ("python", "calculator", "search")


class PythonParams(Section):
    """Params of the tool `python`."""

    time_limit: float = Field(4.0, gt=0, le=600, description="Seconds of processor time for each call.")
    memory_mb: int = Field(512, ge=64, description="Memory of all its processes together.")
    packages: bool = Field(False, description="Whether packages installed beside Kitae can be imported.")
    sandbox: SandboxChoice = Field("auto", description="auto, bwrap, unshare, or none, which protects nothing.")


class SearchParams(Section):
    """Params of the tool `search`."""

    path: str = Field(description="A folder of .txt, .md and .jsonl files, or one of them.")
    results: int = Field(3, ge=1, le=50, description="Passages in an answer.")


class ToolsParams(Section):
    """Params of the environment `tools`."""

    tools: tuple[str, ...] = Field(
        min_length=1, description="Which tools there are: python, calculator, search, or your own: file.py:function."
    )
    output: int = Field(2000, ge=50, description="Characters of an answer of a tool, at most; the middle is cut.")
    calls: int | None = Field(
        None, ge=0, description="Calls of tools in an episode, at most; further ones are refused."
    )
    examples: tuple[dict[str, JsonValue], ...] = Field(
        (), description="Messages to show before each prompt, calls and their results included, as in OpenAI's API."
    )
    python: PythonParams = PythonParams()
    search: SearchParams | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for name in self.tools:
            if name not in TOOLS and not is_plugin(name):
                raise ValueError(f"a tool is one of {', '.join(TOOLS)}, or file.py:function{nearest(name, TOOLS)}")
        if len(set(self.tools)) < len(self.tools):
            raise ValueError("tools must name each tool once")
        if "search" in self.tools and self.search is None:
            raise ValueError("the tool 'search' needs search.path")
        return self


class Tools:
    """A question of the data, and tools to answer it with.

    A `World`. The index and the template of Python consoles are made once.
    """

    params: ClassVar = ToolsParams

    def __init__(self, params: Mapping[str, Any]) -> None:
        self._params = read_params(ToolsParams, params, "tools")
        self._examples = _messages(self._params.examples)
        python = self._params.python
        limits = Limits(time_limit=python.time_limit, memory_mb=python.memory_mb, output_mb=1)
        self._own = {name: load_tool(name) for name in self._params.tools if name not in TOOLS}
        self._consoles = python_processes(python.sandbox, python.packages, limits)
        self._index: Index | None = None
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        if self._params.search is not None and "search" in self._params.tools:
            self._index = await asyncio.to_thread(Index.of, Path(self._params.search.path))
        if "python" in self._params.tools:
            await self._open.enter_async_context(self._consoles)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    def make(self, prompt: Prompt) -> ToolEpisode:
        tools, instances = list[EpisodeTool](), list[Any]()
        for name in self._params.tools:
            own = self._own.get(name)
            if inspect.isclass(own):
                instances.append(own())
                tools += [OwnTool(getattr(instances[-1], method)) for method in methods_of(own)]
            else:
                tools.append(self._tool(name) if own is None else OwnTool(own))
        given = self._params
        if instances:
            return OwnEpisode(prompt, tools, given.output, self._examples, given.calls, instances)
        return ToolEpisode(prompt, tools, given.output, self._examples, given.calls)

    def _tool(self, name: str) -> EpisodeTool:
        if name == "python":
            return Python(self._consoles.create(), self._params.python.time_limit)
        if name == "search":
            assert self._index is not None and self._params.search is not None
            return Search(self._index, self._params.search.results)
        return Calculator()


def _messages(examples: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    try:
        return read_messages(examples) if examples else ()
    except DataError as problem:
        raise ConfigError(f"env.params.examples: {problem}") from None
