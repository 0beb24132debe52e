"""The environments that a recipe can name."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from kitae.envs.base import Agent, Environment, EpisodeLimits, SingleTurn, World
from kitae.envs.blocking_calls import in_thread
from kitae.envs.config import EnvConfig
from kitae.envs.games.game_world import Games
from kitae.envs.mcp.mcp_world import Mcp
from kitae.envs.openenv.openenv_world import OpenEnv
from kitae.envs.tools.tool_world import Tools
from kitae.errors import ConfigError
from kitae.plugins import is_plugin, load_function, nearest
from kitae.types import Prompt, Turn

Params = Mapping[str, Any]


class Simple:
    """A world whose episodes share nothing: `Simple(SingleTurn)` makes each by `SingleTurn(prompt, **params)`."""

    def __init__(self, kind: Callable[..., Environment | Agent], params: Params | None = None) -> None:
        self._kind = kind
        self._params = dict(params or {})

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def make(self, prompt: Prompt) -> Environment | Agent:
        return self._kind(prompt, **self._params)


def _single(params: Params) -> World:
    """One question, one answer."""
    if params:
        raise ConfigError(f"env.params: the environment 'single' takes none, got {', '.join(params)}")
    return Simple(SingleTurn)


def _command(params: Params, hidden: Sequence[Path] = ()) -> World:
    """The user's own program, which queries the model over HTTP."""
    try:
        from kitae.envs.command.command_world import CommandWorld
    except ImportError as missing:
        raise ConfigError(f"env.name = 'command' needs kitae[serve]: {missing}") from None
    return CommandWorld(params, hidden)


def _verifiers(params: Params, hidden: Sequence[Path] = ()) -> World:
    """Environments of Prime Intellect's package `verifiers`, in an interpreter that has it."""
    try:
        from kitae.envs.prime_verifiers.prime_world import VerifiersWorld
    except ImportError as missing:
        raise ConfigError(f"env.name = 'verifiers' needs kitae[serve]: {missing}") from None
    return VerifiersWorld(params, hidden)


def _shell(params: Params, turns: int = 8, seconds: float = 60.0) -> World:
    """An agent with a shell in a box, and tests that judge what it leaves there."""
    from kitae.envs.shell.shell_world import Shell

    return Shell(params, turns, seconds)


WORLDS: dict[str, Callable[..., World]] = {
    "single": _single,
    "tools": Tools,
    "games": Games,
    "mcp": Mcp,
    "command": _command,
    "verifiers": _verifiers,
    "shell": _shell,
    "openenv": OpenEnv,
}

_PROGRAMS = ("command", "verifiers", "mcp")  # what the model writes may run in them


def open_world(config: EnvConfig, hidden: Sequence[Path] = ()) -> World:
    """The world that a recipe names. Its params are checked here. hidden: files and folders that hold references, which
    programs of its episodes must not see."""
    if is_plugin(config.name):
        return _own(config)
    if config.name not in WORLDS:
        known = ", ".join(WORLDS)
        hint = nearest(config.name, WORLDS)
        raise ConfigError(f"env.name must be one of {known}, or file.py:Class, got {config.name!r}{hint}")
    params = {**config.params, "command": config.command} if config.command else config.params
    if config.name == "shell":
        return _shell(params, config.turns, config.seconds)
    return WORLDS[config.name](params, hidden) if config.name in _PROGRAMS else WORLDS[config.name](params)


def limits_of(config: EnvConfig, context: int | None = None) -> EpisodeLimits:
    """context: how many tokens the model can read; None: not known."""
    turns = 1 if config.name == "single" else config.turns
    return EpisodeLimits(turns, config.seconds, config.tokens, context, config.turn_tokens, config.deadline)


def _own(config: EnvConfig) -> World:
    kind = load_function(config.name, "environment", ("prompt",), ConfigError)
    agent = hasattr(kind, "run")
    plain = []
    for name in ("enter", "run", "close") if agent else ("start", "step", "close"):
        method = getattr(kind, name, None)
        if inspect.iscoroutinefunction(method):
            continue
        if agent or not inspect.isfunction(method):
            raise ConfigError(f"env.name {config.name!r} must have `async def {name}`, got none")
        plain.append(name)
    try:
        inspect.signature(kind).bind(None, **config.params)
    except TypeError as problem:
        raise ConfigError(f"env.params do not fit {config.name!r}: {problem}") from None
    return Simple(partial(_Threaded, kind) if plain else kind, config.params)


class _Threaded:
    """An environment some of whose methods are no coroutines: these run in threads, where they may block."""

    def __init__(self, kind: Callable[..., Any], prompt: Prompt, **params: Any) -> None:
        self._environment = kind(prompt, **params)

    async def start(self) -> Any:
        return await _called(self._environment.start)

    async def step(self, turn: Turn) -> Any:
        return await _called(self._environment.step, turn)

    async def close(self) -> None:
        await _called(self._environment.close)


async def _called(method: Callable[..., Any], *values: Any) -> Any:
    return await (method(*values) if inspect.iscoroutinefunction(method) else in_thread(method, *values))
