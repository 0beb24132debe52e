"""A task for an agent with a shell, whatever format it came in."""

import json
import math
from dataclasses import dataclass, field

from kitae.sandbox.boxes.base import Box, BoxLimits, BoxRefused, BoxWorld

REWARDS = "/logs/verifier"  # where tests leave the reward: reward.txt or reward.json
_PREPARING = 600.0  # seconds for one command
_WORDS = 2000  # characters of what tests say that are kept


class TaskRefused(Exception):
    """The task cannot be run here. The message names the file and line."""


@dataclass(frozen=True, slots=True)
class Put:
    """A file: `Put("/app/a.py", b"…")`."""

    path: str
    data: bytes
    mode: int = 0o644


@dataclass(frozen=True, slots=True)
class Do:
    """A command that must succeed: `Do("make", "/app", "Dockerfile:4")`. where: the line that says so."""

    command: str
    folder: str
    where: str
    seconds: float = _PREPARING


@dataclass(frozen=True, slots=True)
class ShellTask:
    """steps: how its world is made from an empty box. image: or which container image it is. kept: which of the agent's
    files the tests see; all of them by default. tests: what only the second box has. solution: what only `kitae
    validate` uses. reward: the file in `REWARDS` is read; "status": 1 where the tests' command ends with 0."""

    name: str
    instruction: str
    folder: str
    steps: tuple[Put | Do, ...]
    tests: tuple[Put, ...]
    judge: str
    judge_seconds: float
    limits: BoxLimits
    image: str = ""
    kept: tuple[str, ...] = ("/",)
    solution: tuple[Put, ...] = ()
    solve: str = ""
    reward: str = "file"
    variables: dict[str, str] = field(default_factory=dict)

    def told(self, command: str) -> str:
        """The command with the task's variables."""
        lines = [f"export {name}={_quoted(value)}" for name, value in self.variables.items()]
        return "\n".join([*lines, command])


async def make_world(box: Box, task: ShellTask) -> BoxWorld:
    """The task's world, as it is before the agent begins."""
    await box.run(f"mkdir -p {_quoted(task.folder)} {REWARDS}")
    for step in task.steps:
        if isinstance(step, Put):
            try:
                await box.write(step.path, step.data, step.mode)
            except BoxRefused as refusal:
                raise TaskRefused(f"{task.name}: {step.path} cannot be written: {refusal}") from None
            continue
        done = await box.run(step.command, seconds=step.seconds, folder=step.folder)
        if done.status:
            raise TaskRefused(f"{task.name}: {step.where} fails here: {done.told.strip()[-600:]}")
    return await box.snapshot()


async def judged(box: Box, task: ShellTask, seconds: float) -> tuple[float, str]:
    """The reward that the tests give to what lies in the box, and what they said. The tests have this box alone."""
    await box.run(f"rm -rf {REWARDS} /tests; mkdir -p {REWARDS} /tests")
    for put in task.tests:
        await box.write(put.path, put.data, put.mode)
    done = await box.run(task.told(task.judge), seconds=min(task.judge_seconds, seconds), folder=task.folder)
    words = done.told.strip()[-_WORDS:]
    if task.reward == "status":
        return float(done.status == 0), words
    return await _reward(box), words


async def _reward(box: Box) -> float:
    """0 where the tests left none that can be read."""
    for name in ("reward.json", "reward.txt"):
        try:
            text = (await box.read(f"{REWARDS}/{name}", 100_000)).decode(errors="replace")
            found = json.loads(text)
        except (BoxRefused, ValueError):
            continue
        if isinstance(found, dict):
            numbers = [value for value in found.values() if isinstance(value, int | float)]
            found = found.get("reward", sum(numbers) / len(numbers) if numbers else None)
        if isinstance(found, int | float) and math.isfinite(found):
            return float(found)
    return 0.0


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
