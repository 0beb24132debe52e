"""The environment `shell`: an agent with a shell in a box, and tests that judge what it leaves there.

An episode takes a box with its task's world, which is made once and shared. When the agent answers without a call, or
has had its last turn, its files go into a second box, which begins like the first one; the tests run there. So no
process of the agent reaches them, and it never sees them. An episode whose tokens are used up before that has reward 0.
"""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from kitae.data.tasks import find_task
from kitae.envs.base import Observation, Opening
from kitae.envs.config import read_params
from kitae.envs.games.game_world import seed_of
from kitae.envs.shell.shell_task import ShellTask, TaskRefused, judged, make_world
from kitae.envs.shell.shell_tools import shell_tools
from kitae.envs.shell.swe_rows import read_rows
from kitae.envs.shell.task_folders import find_folders, read_folder
from kitae.envs.tools.base import ToolEpisode
from kitae.errors import ConfigError
from kitae.sandbox.boxes.base import Box, Boxes, BoxLimits, BoxWorld
from kitae.sandbox.boxes.box_pool import BoxPool
from kitae.sandbox.boxes.bubblewrap_box import BubblewrapBoxes
from kitae.sandbox.boxes.container_box import ContainerBoxes
from kitae.sandbox.boxes.remote_box import RemoteBoxes
from kitae.section import Section
from kitae.types import Message, Prompt, Turn

_HELD_OUT = 8  # one task in so many
_SLACK = 5.0  # seconds of a call that are left when the tests' time is over
_WORDS = "You work in {folder} of a Linux machine. Use the tools; when the task is done, answer without a call.\n\n"


class ShellParams(Section):
    """Params of the environment `shell`."""

    tasks: str = Field(description="A folder of task folders (Harbor), or a .jsonl file of SWE rows.")
    box: Literal["bubblewrap", "container", "remote"] = Field("bubblewrap", description="The kind of box.")
    image: str = Field("", description="Of containers, for tasks without one of their own.")
    engine: tuple[str, ...] = Field((), description="The engine's command; default: podman or docker.")
    options: tuple[str, ...] = Field((), description="Further words of the engine's run.")
    hosts: tuple[str, ...] = Field((), description="Addresses of `kitae sandbox-host`, of remote boxes.")
    key_env: str = Field("KITAE_SANDBOX_KEY", description="The variable with the key of the hosts.")
    readable: tuple[str, ...] = Field((), description="Further folders of this machine in bubblewrap's boxes.")
    repositories: str = Field("", description="The folder with the repositories of SWE rows, by owner/name.")
    network: Literal["task", "none"] | tuple[str, ...] = Field(
        "task", description="task: as each task says; none; or a list of hosts, reached by HTTP."
    )
    memory_mb: int | None = Field(None, ge=64, description="Of a box; default: as the task says.")
    most: int = Field(64, ge=2, description="Boxes at the same time.")
    seconds: float = Field(30.0, gt=0, description="Seconds for one command of the agent.")
    output: int = Field(4000, ge=100, description="Characters of an answer of a tool; the middle is cut.")
    calls: int | None = Field(None, ge=0, description="Calls of tools in an episode; further ones are refused.")


class Shell:
    """An agent with a shell in a box, and tests that judge what it leaves there.

    A `World`. turns, seconds: those of the recipe: the tests run after the last turn at the latest, and must be done
    within the seconds of a call.
    """

    params: ClassVar = ShellParams

    def __init__(self, params: Mapping[str, Any], turns: int, seconds: float) -> None:
        self._params = given = read_params(ShellParams, params, "shell")
        self.turns, self.seconds = turns, seconds
        self.boxes = _boxes(given)
        place = Path(given.tasks).expanduser()
        if not place.exists():
            raise ConfigError(f"env.params.tasks must be a folder or a file, got {given.tasks!r}")
        self.refused: list[str] = []
        self.tasks = self._read(place)
        if not self.tasks:
            raise ConfigError(f"none of the tasks can be run here. {self.refused[0]}")
        held = {name for n, name in enumerate(self.tasks) if n % _HELD_OUT == _HELD_OUT - 1}
        self.splits = {"test": sorted(held) or sorted(self.tasks), "train": sorted(set(self.tasks) - held)}
        self._images: dict[str, asyncio.Task[str]] = {}
        self.pool = BoxPool(self.boxes, BoxLimits(), given.most)

    def _read(self, place: Path) -> dict[str, ShellTask]:
        if place.suffix == ".jsonl":
            return read_rows(place, Path(self._params.repositories), self.refused)
        found = dict[str, ShellTask]()
        for folder in find_folders(place):
            try:
                task = read_folder(folder, containers=self._params.box == "container")
            except TaskRefused as refusal:
                self.refused.append(str(refusal))
                continue
            found[task.name] = replace(task, limits=self._limits(task.limits))
        return found

    def _limits(self, told: BoxLimits) -> BoxLimits:
        given = self._params
        network = told.network if given.network == "task" else given.network
        return replace(told, network=network, memory_mb=given.memory_mb or told.memory_mb)

    async def __aenter__(self) -> Self:
        await self.boxes.check()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.pool.close()

    def make(self, prompt: Prompt) -> "ShellEpisode":
        return ShellEpisode(self, self.task_of(prompt), prompt, self._params)

    def task_of(self, prompt: Prompt) -> ShellTask:
        """By its name in a row's column `task`, or by its number among those of the prompt's split."""
        if (name := prompt.context.get("task")) is not None:
            if name not in self.tasks:
                raise ConfigError(f"there is no task {name!r} in env.params.tasks")
            return self.tasks[name]
        number, question = seed_of(prompt), str(prompt.context.get("question", ""))
        split = find_task("episodes").split_of(question) if question == f"Episode {number}" else "train"
        names = self.splits["train" if split == "train" else "test"]
        return self.tasks[names[number % len(names)]]

    async def world(self, task: ShellTask) -> BoxWorld | None:
        """What the task's boxes begin with. Raises `TaskRefused` if it cannot be made here."""
        if isinstance(self.boxes, ContainerBoxes):
            return await self._image(task, self.boxes)
        return await self.pool.world(task.name, lambda box: make_world(box, task), task.limits)

    async def take(self, task: ShellTask) -> Box:
        return await self.pool.take(await self.world(task), task.limits)

    async def judge(self, task: ShellTask, box: Box) -> tuple[float, str]:
        """The reward for what lies in an agent's box, given by the tests in a second one; the first is given back, so
        that boxes that wait for tests cannot keep them from each other."""
        try:
            left = await self._left(task, box)
        finally:
            await self.pool.give_back(box)
        if left.kind == "tar" and task.kept != ("/",):

            async def without_kept(second: Box) -> BoxWorld:
                await make_world(second, task)
                await second.run("rm -rf " + " ".join(f"'{path}'" for path in task.kept))
                return await second.snapshot()

            left = left.over(await self.pool.world(f"{task.name} without what is kept", without_kept, task.limits))
        second = await self.pool.take(left, task.limits)
        try:
            return await judged(second, task, self.seconds - _SLACK)
        finally:
            await self.pool.give_back(second)

    async def tried(self, task: ShellTask, solve: bool) -> tuple[float, str]:
        """The reward for the task's own solution, or for doing nothing."""
        box = await self.take(task)
        try:
            for put in task.solution if solve else ():
                await box.write(put.path, put.data, put.mode)
            command = task.told(task.solve if solve else "true")
            done = await box.run(command, seconds=task.judge_seconds, folder=task.folder)
        except BaseException:
            await self.pool.give_back(box)
            raise
        reward, words = await self.judge(task, box)
        return reward, words if not done.status else f"the solution itself fails: {done.told.strip()[-500:]}"

    async def _left(self, task: ShellTask, box: Box) -> BoxWorld:
        """What the tests see of an agent's files: of a container all, as an engine has no part of one."""
        return await box.snapshot(("/",) if isinstance(self.boxes, ContainerBoxes) else task.kept)

    async def _image(self, task: ShellTask, boxes: ContainerBoxes) -> BoxWorld | None:
        if task.image:
            return BoxWorld("image", task.image.encode())
        place = next((f for f in find_folders(Path(self._params.tasks)) if f.name == task.name), None)
        if place is None or not (place / "environment" / "Dockerfile").exists():
            return None
        if task.name not in self._images:
            self._images[task.name] = asyncio.create_task(boxes.build(place / "environment"))
        return BoxWorld("image", (await asyncio.shield(self._images[task.name])).encode())


class ShellEpisode(ToolEpisode):
    """An episode in a box. `BoxLost` fails it: the machine's fault, not the model's."""

    judged = False

    def __init__(self, world: Shell, task: ShellTask, prompt: Prompt, params: ShellParams) -> None:
        self._world, self._task = world, task
        self._box: Box | None = None
        self._steps = 0
        tools = shell_tools(self._get, task.folder, params.seconds, params.output)
        super().__init__(prompt, tools, params.output, calls=params.calls)

    def _get(self) -> Box:
        assert self._box is not None, "an episode begins with `start`"
        return self._box

    async def start(self) -> Opening:
        self._box = await self._world.take(self._task)
        opening = await super().start()
        text = _WORDS.format(folder=self._task.folder) + self._task.instruction
        return replace(opening, messages=(Message("user", text),))

    async def step(self, turn: Turn) -> Observation:
        seen = await super().step(turn)
        self._steps += 1
        if not seen.done and self._steps < self._world.turns:
            return replace(seen, reward=0.0)
        box, self._box = self._get(), None
        reward, words = await self._world.judge(self._task, box)
        said = Message("user", f"The tests give {reward:g}.\n{words}")
        return Observation((*seen.messages, said), done=True, reward=reward)

    async def close(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            await self._world.pool.give_back(box)


def _boxes(given: ShellParams) -> Boxes:
    if given.box == "container":
        return ContainerBoxes(given.image, given.engine, given.options)
    if given.box == "bubblewrap":
        return BubblewrapBoxes(given.readable)
    key = os.environ.get(given.key_env, "")
    if not given.hosts or not key:
        raise ConfigError(f"remote boxes need env.params.hosts and a key in the variable {given.key_env}")
    return RemoteBoxes(given.hosts, key)
