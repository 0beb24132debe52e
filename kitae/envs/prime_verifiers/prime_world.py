"""The environment `verifiers`: episodes of Prime Intellect's environments, each in the interpreter that has them.

The tasks are the environment's own. `data.task = "episodes"` gives each episode a seed, which is the number of a task;
held-out seeds lead to held-out tasks. Other data may name a task by its number, as `seed`.
"""

import asyncio
import json
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, JsonValue

from kitae.data.tasks import find_task
from kitae.envs.command.command_world import CommandAgent, CommandWorld, ProgramParams
from kitae.envs.config import read_params
from kitae.envs.games.game_world import seed_of
from kitae.errors import ConfigError
from kitae.types import Prompt

_ADAPTER = Path(__file__).with_name("prime_adapter.py")
_CACHE = "~/.cache"
_TOKENS = ("~/.cache/huggingface/token", "~/.cache/huggingface/stored_tokens")
_LOADING = 600.0  # seconds, as an environment may download its data


class VerifiersParams(ProgramParams):
    """Settings of the environment `verifiers`."""

    environment: str = Field(description="The environment as its package names it: gsm8k, or a module of the folder.")
    python: str = Field(description="The interpreter that has verifiers and the environment: .venv/bin/python.")
    args: dict[str, JsonValue] = Field(
        default_factory=dict, description="Of the environment: settings of its taskset, or arguments of its loader."
    )
    settings: dict[str, JsonValue] = Field(
        default_factory=dict, description="Further settings of an environment of verifiers.v1: { agent = { … } }."
    )
    network: Literal["episode", "machine"] = Field(
        "machine", description="What it reaches: the machine's network, as it may load data; or its endpoint alone."
    )
    writable: tuple[str, ...] = Field(
        tuple(place for place in (_CACHE,) if Path(place).expanduser().is_dir()),
        description="What it can write in the sandbox; by default caches, so that not each episode downloads its data.",
    )


class VerifiersWorld(CommandWorld):
    """A `World` of agent programs that are all the adapter. sizes: how many tasks each split has."""

    def __init__(self, params: Mapping[str, Any], hidden: Sequence[Path] = ()) -> None:
        given = read_params(VerifiersParams, params, "verifiers")
        if shutil.which(given.python) is None:
            raise ConfigError(f"env.params.python must be an interpreter, got {given.python!r}")
        order = {"environment": given.environment, "args": given.args, "settings": given.settings}
        cache = {"XDG_CACHE_HOME": str(Path(_CACHE).expanduser())} if _CACHE in given.writable else {}
        variables = {"PYTHONPATH": "", **cache, **given.variables, "KITAE_VERIFIERS": json.dumps(order)}
        python = str(Path(given.python).absolute()) if os.sep in given.python else given.python
        shown = {name: getattr(given, name) for name in ProgramParams.model_fields} | {"variables": variables}
        command = shlex.join([python, str(_ADAPTER)])
        tokens = [Path(token).expanduser() for token in _TOKENS]
        super().__init__({**shown, "command": command, "reward": "program", "context": ("task",)}, [*hidden, *tokens])
        self.sizes: Mapping[str, int] = {}

    async def __aenter__(self) -> Self:
        self.sizes = await self._check()
        return await super().__aenter__()

    def make(self, prompt: Prompt) -> CommandAgent:
        return CommandAgent(self, replace(prompt, context={**prompt.context, "task": task_of(prompt)}))

    async def _check(self) -> dict[str, int]:
        """Load the environment once, to check it before a model is loaded."""
        program = await asyncio.create_subprocess_exec(
            *self.command([*self.words, "--check"]),
            cwd=self.params.folder,
            env=self.variables,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            said, _ = await asyncio.wait_for(program.communicate(), _LOADING)
        except TimeoutError:
            raise ConfigError(f"env.params.environment must load within {_LOADING:g} s") from None
        finally:
            if program.returncode is None:
                program.kill()
        lines = said.decode("utf-8", "replace").strip().splitlines() or ["it printed nothing"]
        if program.returncode:
            raise ConfigError(f"the environment of env.params cannot be loaded: {lines[-1]}")
        sizes: dict[str, int] = json.loads(lines[-1])
        return sizes


def task_of(prompt: Prompt) -> dict[str, Any]:
    """The task of an episode: `{"number": 17, "split": "train"}`; with the split "", among all tasks in order."""
    episodes, question = find_task("episodes"), str(prompt.context.get("question", ""))
    number = seed_of(prompt)
    split = episodes.split_of(question) if question == f"Episode {number}" else ""
    return {"number": number, "split": split}
