"""Python in a sandbox, as a tool. Names that a call defines are available to the episode's later calls.

The console runs in a process of its own, because its sandbox blocks while it waits; `main` is that process's entry.

    setup  {"sandbox", "packages", "limits"}      job  {"code"}      answer  {"status", "detail", "output"}
"""

import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kitae.envs.episode_processes import EpisodeProcess, EpisodeProcesses, EpisodeProcessLost
from kitae.envs.tools.base import ToolRefusal, describe
from kitae.errors import KitaeWarning, SandboxError
from kitae.sandbox.python_console import PythonConsole
from kitae.sandbox.sandbox_jobs import Limits
from kitae.sandbox.session import SandboxChoice, find_backend
from kitae.types import ToolCall
from kitae.workers.templates.template_main import Answer, serve

_LONGEST = 50_000  # characters of code
_SLACK = 30.0  # extra seconds, to start a sandbox


def python_processes(sandbox: SandboxChoice, packages: bool, limits: Limits) -> EpisodeProcesses:
    setup = {"sandbox": sandbox, "packages": packages, "limits": asdict(limits)}
    return EpisodeProcesses("kitae.envs.tools.python", setup, "python tool", SandboxError)


class Python:
    """An `EpisodeTool` with a console of its own, started at the first call."""

    tool = describe(
        "python",
        "Runs Python code and shows what it prints and the value of its last line. Names stay defined.",
        code="The code.",
    )

    def __init__(self, process: EpisodeProcess, seconds: float) -> None:
        self._process, self._seconds = process, seconds

    async def call(self, call: ToolCall) -> str:
        code = str(call.arguments["code"])
        if len(code) > _LONGEST:
            raise ToolRefusal(f"code must have at most {_LONGEST} characters, got {len(code)}")
        try:
            answer = await self._process.ask({"code": code}, 2 * self._seconds + _SLACK)
        except EpisodeProcessLost as loss:
            return f"Python was stopped: {loss}. It starts anew: names are no longer defined."
        if answer["status"] == "failed":
            raise SandboxError(answer["detail"])
        said: str = answer["output"].rstrip("\n")
        if answer["status"] != "ended":
            end = f"Python was stopped: {answer['detail']}. It starts anew: names are no longer defined."
            return f"{said}\n{end}" if said else end
        return said or "(no output)"

    async def close(self) -> None:
        await self._process.close()


def main() -> None:
    serve(load)


def load(setup: Mapping[str, Any]) -> tuple[Mapping[str, Any], Answer]:
    """Check that the sandbox works; each forked process opens its own sandbox at its first job."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KitaeWarning)
        find_backend(setup["sandbox"])
    console = PythonConsole(setup["sandbox"], Limits(**setup["limits"]), setup["packages"])

    def answer(job: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            report = console.run(job["code"])
        except (SandboxError, OSError) as problem:
            return {"status": "failed", "detail": str(problem), "output": ""}
        return {"status": report.status, "detail": report.detail, "output": report.output.decode(errors="replace")}

    return {}, answer
