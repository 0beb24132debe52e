"""A box: a machine of an agent's own, with files, processes and a shell, which ends with its episode.

    async with await boxes.open(BoxLimits(memory_mb=512)) as box:
        await box.write("/work/a.py", b"print(6 * 7)")
        await box.run("python3 /work/a.py", seconds=10)          Ran(0, "42\\n")
        world = await box.snapshot()                             boxes.open(limits, world) begins there

Who makes boxes is a kind: bubblewrap on this machine (`bubblewrap_box`), a container engine (`container_box`), hosts
that run `kitae sandbox-host` (`remote_box`). What each isolates is in docs/sandboxes.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Ended = Literal["exited", "timeout", "memory", "processes"]


class BoxLost(Exception):
    """The box is gone: it was killed, its engine or host failed. The machine's fault, not that of what ran in it."""


class BoxRefused(Exception):
    """What was asked for cannot be done in this box: no such file, a disk that is full. The message says why."""


@dataclass(frozen=True, slots=True)
class BoxLimits:
    """What a box may use: `BoxLimits(memory_mb=512, network=("pypi.org",))`.

    memory_mb, processes: of all its processes together. Who uses more loses all of them. disk_mb: of all files that it
    writes. network: "none", "all" of the machine's, or a list of hosts, reached by HTTP(S) through a proxy.
    """

    memory_mb: int = 1024
    disk_mb: int = 512
    processes: int = 256
    network: Literal["none", "all"] | tuple[str, ...] = "none"


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended: `Ran(0, "42\\n")`, or `Ran(None, "…", "timeout")`. output: stdout and stderr together, with
    the middle of a longer one cut out."""

    status: int | None
    output: str
    ended: Ended = "exited"

    @property
    def told(self) -> str:
        """For a model to read."""
        why = {"timeout": "it took too long", "memory": "it used too much memory", "processes": "too many processes"}
        end = f"[killed: {why[self.ended]}]" if self.ended != "exited" else f"[exit status {self.status}]"
        if self.status == 0:
            return self.output
        return f"{self.output}{end}" if self.output[-1:] in ("", "\n") else f"{self.output}\n{end}"


@dataclass(frozen=True, slots=True)
class BoxWorld:
    """Files of a box at one moment, as its kind keeps them: `BoxWorld("tar", b"…")`, `BoxWorld("image", b"name")`."""

    kind: str
    data: bytes

    def over(self, below: "BoxWorld") -> "BoxWorld":
        """These files laid over those of another world; both are tar files."""
        assert self.kind == below.kind == "tar", f"only tar files can be laid over each other, got {self.kind}"
        return BoxWorld("tar", below.data + self.data)


class Box(Protocol):
    """One request at a time. Every method raises `BoxLost` if the box is gone."""

    async def run(self, command: str, *, seconds: float = 60.0, output: int = 20_000, folder: str = "/") -> Ran:
        """A command of bash. Processes that it leaves in the background live on, unless it ran out of time."""
        ...

    async def read(self, path: str, most: int = 2**24) -> bytes: ...
    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None: ...
    async def snapshot(self, folders: Sequence[str] = ("/",)) -> BoxWorld:
        """The files below these folders, without those of the system beneath. All processes stand still meanwhile."""
        ...

    async def close(self) -> None: ...


class Boxes(Protocol):
    """A kind of box. `name` is shown; `check` raises `ConfigError` if it does not work here."""

    name: str

    async def check(self) -> None: ...
    async def open(self, limits: BoxLimits, world: BoxWorld | None = None) -> Box: ...
    async def close(self) -> None: ...
