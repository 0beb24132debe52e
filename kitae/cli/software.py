"""`kitae tasks`: tasks about software for agents with a shell; and how folders of tasks are validated."""

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kitae.errors import DataError

_AT_ONCE = 8  # tasks that are tried


def tasks(
    folder: Annotated[Path, typer.Argument(help="Where the task folders are written; it must be new.")],
    count: Annotated[int, typer.Option(min=1, help="How many.")] = 320,
    seed: Annotated[int, typer.Option(help="Which faults are drawn.")] = 0,
) -> None:
    """Write tasks about software for agents with a shell.

    Small modules with a fault each, in Harbor's format. Train on them with env.name=shell env.params.tasks=FOLDER, and
    check them with `kitae validate FOLDER`.
    """
    from kitae.envs.shell.software_tasks import write_tasks

    if folder.exists():
        raise DataError(f"the folder must be new, got {str(folder)!r}, which exists")
    print(f"{len(write_tasks(folder, count, seed))} tasks in {folder}; check them with: kitae validate {folder}")


def validate_tasks(params: dict[str, Any], turns: int, seconds: float, limit: int | None) -> None:
    """Print what is wrong with tasks: their solution must pass, and doing nothing must fail."""
    from kitae.envs.shell.shell_world import Shell

    world = Shell(params, turns, seconds)
    for refusal in world.refused:
        print(f"cannot be run here: {refusal}")
    names = list(world.tasks)[:limit]
    bad = asyncio.run(_bad(world, names))
    for name, reason in bad:
        print(f"{name}: {reason}")
    print(json.dumps({"tasks": len(names), "bad": len(bad), "refused": len(world.refused)}))
    if bad or world.refused:
        raise SystemExit(1)


async def _bad(world: Any, names: list[str]) -> list[tuple[str, str]]:
    room, found = asyncio.Semaphore(_AT_ONCE), dict[str, str]()

    async def check(name: str) -> None:
        async with room:
            task = world.tasks[name]
            try:
                reward, words = await world.tried(task, solve=True)
                if reward < 1:
                    found[name] = f"its solution gives {reward:g}: {words[-300:]}"
                    return
                reward, words = await world.tried(task, solve=False)
                if reward >= 1:
                    found[name] = f"doing nothing gives {reward:g}"
            except Exception as problem:  # of one task, told with its name
                found[name] = str(problem) or type(problem).__name__

    async with world, asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(check(name))
    return sorted(found.items())
