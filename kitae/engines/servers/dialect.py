"""How servers of one kind are spoken to. What is said, and when, is for `kitae.engines.servers.server_engine`.

A dialect has no state. It knows routes, bodies and answers, and what a server of its kind must be started with.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

from kitae.engines.base import Request, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.servers.server_client import Json, Line, LineLost


@dataclass(frozen=True, slots=True)
class Launch:
    """A server that Kitae starts: `Launch("venv/bin/python", Path("/tmp/model"), "float32", 4096, "cpu")`.

    program: the interpreter of the environment that has it, as words of a command line. model: the folder it loads.
    context: most tokens of a sequence. device: where the trainer computes. cores: processors for it, where it shares
    this machine with the trainer. packages: a folder from which the server can import Kitae, for what runs inside it.
    gpus: the variable of the environment that says which GPUs it sees, if it is told.
    """

    program: str
    model: Path
    dtype: str
    context: int
    device: str
    cores: tuple[int, ...] = ()
    packages: Path = Path()
    gpus: Mapping[str, str] = field(default_factory=dict)

    def on(self, cores: Sequence[int], gpus: Mapping[str, str]) -> "Launch":
        return replace(self, cores=tuple(cores), gpus=gpus)


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """New tokens `[start, end)` were sampled by this version: `VersionSpan(3, start=0, end=17)`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """News of a request: `StreamEvent((42, 7), (-0.1, -0.7))`, at last `StreamEvent(finish="stop", spans=(…))`.

    spans: of all tokens that it sampled for this request, where it says. cached: tokens of the prompt that it had
    computed before.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish: Literal["stop", "length", "abort"] | None = None
    spans: tuple[VersionSpan, ...] = ()
    cached: int = 0


class Dialect(Protocol):
    """kind: of the server, as people call it. alive: a route that a server which is well answers, also when paused.

    `refusal`: why it cannot sample like that, or None. `request`: route and body for the tokens after `request.prior`;
    `news`: what one event of the answer says, after `known` tokens. `greet`: the server can do all that is needed,
    else `Refusal`. `pause` returns when no step is running; what is in flight stays, and goes on after `resume`.
    `load`: the weights of a folder (`kitae.engines.servers.model_folder`); the names of those that did not arrive
    whole, in which case nothing was changed. `forget`: no new request may use what was computed with the weights
    before; with recompute, no running one either. `version`: what it says that it serves. `score`: log-probs of all
    tokens but the first, at temperature 1; the server must not be paused.
    """

    kind: str
    alive: str

    def command(self, launch: Launch, config: EngineConfig, port: int) -> list[str]: ...
    def environment(self, launch: Launch, config: EngineConfig) -> dict[str, str]: ...
    def refusal(self, sampling: SamplingParams) -> str | None: ...
    def request(self, name: str, request: Request, version: int) -> tuple[str, Json]: ...
    def news(self, event: Json, known: int) -> StreamEvent: ...
    async def greet(self, line: Line) -> None: ...
    async def pause(self, line: Line) -> None: ...
    async def resume(self, line: Line) -> None: ...
    async def abort(self, line: Line, name: str) -> None: ...
    async def load(self, line: Line, folder: Path) -> Sequence[str]: ...
    async def forget(self, line: Line, *, recompute: bool) -> None: ...
    async def label(self, line: Line, version: int) -> None: ...
    async def version(self, line: Line) -> int: ...
    async def score(self, line: Line, tokens: Sequence[int]) -> tuple[float, ...]: ...


def spell(options: Mapping[str, object], flags: Sequence[str]) -> list[str]:
    """The words of a command line: `{"port": 8001}` and `["quiet"]` are `--port 8001 --quiet`."""
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [*words, *(f"--{flag}" for flag in flags)]


def read_spans(told: Sequence[Mapping[str, object]] | None) -> tuple[VersionSpan, ...]:
    """Both kinds of server write them in the same way."""
    return tuple(VersionSpan(read_version(s["version"]), int(str(s["start"])), int(str(s["end"]))) for s in told or ())


def read_version(label: object) -> int:
    """The number of a version that Kitae has set."""
    try:
        return int(str(label))
    except ValueError:
        raise LineLost(f"it must serve a version that Kitae has set, got {label!r}") from None
