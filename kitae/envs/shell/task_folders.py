"""Tasks as folders, in the format of Harbor and Terminal-Bench, read as they are.

    instruction.md   task.toml   environment/Dockerfile …   tests/test.sh …   solution/solve.sh …

The agent's box has what the Dockerfile makes, and nothing of tests and solution. The tests find themselves in /tests,
and write /logs/verifier/reward.txt (or .json). Of task.toml are read: time limits, memory and storage, whether there is
a network, variables of the tests, `artifacts` (paths that are kept for the tests; all files by default), and
`docker_image`, which needs containers. Tasks of several steps or services are refused.
"""

import tomllib
from pathlib import Path
from typing import Any

from kitae.envs.shell.dockerfile import Built, put_tree, read_dockerfile
from kitae.envs.shell.shell_task import ShellTask, TaskRefused
from kitae.errors import ConfigError
from kitae.sandbox.boxes.base import BoxLimits

_MEMORY, _DISK = 2048, 10_240  # MiB, where a task says nothing
_MOST_DISK = 2048  # MiB: files of a box are in memory
_SECONDS = 600.0
_DEPTH = 4  # of folders of tasks


def find_folders(place: Path) -> list[Path]:
    """The task folders at or below a place, by name."""
    if (place / "task.toml").exists():
        return [place]
    patterns = ["/".join(["*"] * depth) + "/task.toml" for depth in range(1, _DEPTH + 1)]
    found = sorted({path.parent for pattern in patterns for path in place.glob(pattern)})
    if not found:
        raise ConfigError(f"env.params.tasks: there is no folder with a task.toml below {str(place)!r}")
    return found


def read_folder(folder: Path, containers: bool = False) -> ShellTask:
    """The task of a folder. containers: an engine makes its image. Raises `TaskRefused`."""
    told = _settings(folder)
    around, judge = told.get("environment", {}), told.get("verifier", {})
    if told.get("steps") or (folder / "steps").is_dir():
        raise TaskRefused(f"{folder.name}/task.toml: tasks of several steps are not run")
    if (folder / "environment" / "docker-compose.yaml").exists():
        raise TaskRefused(f"{folder.name}/environment/docker-compose.yaml: tasks of several services are not run")
    dockerfile = folder / "environment" / "Dockerfile"
    image = str(around.get("docker_image", ""))
    if image and not containers and not dockerfile.exists():
        raise TaskRefused(f"{folder.name}/task.toml: docker_image = {image!r} needs a container engine")
    built = Built() if containers or not dockerfile.exists() else read_dockerfile(dockerfile)
    tests, solution = folder / "tests", folder / "solution"
    if not (tests / "test.sh").exists():
        raise TaskRefused(f"{folder.name}/tests/test.sh: there is none")
    network = around.get("allow_internet", around.get("network_mode", "") not in ("no-network", "none", ""))
    disk = min(_megabytes(around, "storage", _DISK), _MOST_DISK)
    return ShellTask(
        name=folder.name,
        instruction=(folder / "instruction.md").read_text("utf-8").strip(),
        folder=str(around.get("workdir") or (built.folder if built.folder != "/" else "/app")),
        steps=tuple(built.steps),
        tests=tuple(put_tree(tests, "/tests", f"{folder.name}/tests")),
        judge="chmod +x /tests/test.sh; exec /tests/test.sh",
        judge_seconds=float(judge.get("timeout_sec", _SECONDS)),
        limits=BoxLimits(_megabytes(around, "memory", _MEMORY), disk, network="all" if network else "none"),
        image=image if containers else "",
        kept=tuple(str(a if isinstance(a, str) else a["source"]) for a in told.get("artifacts", ())) or ("/",),
        solution=tuple(put_tree(solution, "/solution", f"{folder.name}/solution")) if solution.is_dir() else (),
        solve="chmod +x /solution/solve.sh; exec /solution/solve.sh",
        variables={**built.variables, **{name: str(value) for name, value in judge.get("env", {}).items()}},
    )


def _settings(folder: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((folder / "task.toml").read_text("utf-8"))
    except (OSError, ValueError) as problem:
        raise TaskRefused(f"{folder.name}/task.toml cannot be read: {problem}") from None


def _megabytes(around: dict[str, Any], name: str, default: int) -> int:
    """`memory_mb = 2048`, or `memory = "2G"` as it was before."""
    if f"{name}_mb" in around:
        return int(around[f"{name}_mb"])
    text = str(around.get(name, "")).upper().removesuffix("B").removesuffix("I")
    if not text:
        return default
    return int(float(text[:-1]) * 1024) if text.endswith("G") else int(float(text.removesuffix("M")))
