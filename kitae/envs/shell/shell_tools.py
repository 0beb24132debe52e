"""The tools of an agent with a shell: bash, and files by their paths."""

from collections.abc import Awaitable, Callable
from typing import Any

from kitae.envs.tools.base import ToolRefusal, describe
from kitae.sandbox.boxes.base import Box, BoxRefused
from kitae.types import Tool, ToolCall

_LONGEST = 200_000  # characters of an argument
_STATE = "/tmp/.shell-state"  # the folder and the variables of the shell, between two calls
_SHELL = """
trap 'status=$?; {{ declare -p || export -p; printf "cd %q\\n" "$PWD"; }} > {state} 2>/dev/null; exit $status' EXIT
[ -f {state} ] && . {state} 2>/dev/null
{command}
"""


class ShellTool:
    """An `EpisodeTool` that works on the episode's box."""

    def __init__(self, tool: Tool, work: Callable[[dict[str, Any]], Awaitable[str]]) -> None:
        self.tool = tool
        self._work = work

    async def call(self, call: ToolCall) -> str:
        for name, value in call.arguments.items():
            if len(str(value)) > _LONGEST:
                raise ToolRefusal(f"{name} must have at most {_LONGEST} characters, got {len(str(value))}")
        try:
            return await self._work(dict(call.arguments))
        except BoxRefused as refusal:
            raise ToolRefusal(str(refusal)) from None

    async def close(self) -> None:
        pass


def shell_tools(box: Callable[[], Box], folder: str, seconds: float, output: int) -> list[ShellTool]:
    """box: gives the episode's, once it has begun. A path that does not begin with / is below `folder`."""

    def place(path: str) -> str:
        return path if path.startswith("/") else f"{folder}/{path}"

    async def bash(given: dict[str, Any]) -> str:
        command = _SHELL.format(state=_STATE, command=given["command"])
        return (await box().run(command, seconds=seconds, output=output, folder=folder)).told or "(no output)"

    async def read_file(given: dict[str, Any]) -> str:
        return (await box().read(place(given["path"]))).decode(errors="replace")

    async def write_file(given: dict[str, Any]) -> str:
        await box().write(place(given["path"]), given["content"].encode(errors="backslashreplace"))
        return f"wrote {given['path']}"

    async def edit_file(given: dict[str, Any]) -> str:
        text = (await box().read(place(given["path"]))).decode(errors="replace")
        if (times := text.count(given["old"])) != 1 or not given["old"]:
            raise ToolRefusal(f"old must occur once in {given['path']}, it occurs {times} times")
        changed = text.replace(given["old"], given["new"])
        await box().write(place(given["path"]), changed.encode(errors="backslashreplace"))
        return f"changed {given['path']}"

    path = "The file's path."
    return [
        ShellTool(describe("bash", "Runs a command of bash; its folder and variables stay for the next one.",
                           command="The command."), bash),
        ShellTool(describe("read_file", "Shows a file.", path=path), read_file),
        ShellTool(describe("write_file", "Writes a file.", path=path, content="All of its text."), write_file),
        ShellTool(describe("edit_file", "Replaces a text that occurs once in a file.", path=path,
                           old="The text as it is.", new="What stands there afterwards."), edit_file),
    ]  # fmt: skip
