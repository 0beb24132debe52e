"""Settings of what the model talks to, params of environments as settings, and the variables that a program sees."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import Field, JsonValue, ValidationError

from kitae.errors import ConfigError
from kitae.plugins import nearest
from kitae.section import Section

S = TypeVar("S", bound=Section)


class EnvConfig(Section):
    """What an episode is: one question and one answer, or a conversation with tools, a game or a program."""

    name: str = Field(
        "single",
        description="single: one question, one answer; see docs/agents.md, or your own: file.py:Class.",
    )
    command: str = Field(
        "", description="An agent program that is run for each episode, with name = 'command': python agent.py."
    )
    params: dict[str, JsonValue] = Field(default_factory=dict, description="Options of the environment.")
    turns: int = Field(8, ge=1, description="Turns of the model in one episode, at most.")
    tokens: int = Field(2048, ge=1, description="Tokens of one observation, at most; a longer one is an error.")
    seconds: float = Field(60.0, gt=0, description="Seconds for each call of the environment.")
    turn_tokens: int | None = Field(
        None, ge=1, description="Tokens of one turn of the model, at most; the environment gets a longer one cut."
    )
    deadline: float | None = Field(
        None, gt=0, description="Seconds for a whole episode, the model's time included; a longer one is cut off."
    )


def read_params(kind: type[S], params: Mapping[str, Any], name: str, place: str = "env.params") -> S:
    """`read_params(ToolsParams, {"tools": ["python"]}, "tools")`; raises one error with all that is wrong."""
    try:
        return kind.model_validate(dict(params))
    except ValidationError as error:
        raise ConfigError("\n".join(_described(problem, kind, name, place) for problem in error.errors())) from None


def _described(problem: Any, kind: type[Section], name: str, place: str) -> str:
    place = ".".join(map(str, (place, *problem["loc"])))
    if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1:
        key = str(problem["loc"][0])
        return f"{place}: the environment {name!r} has no such parameter{nearest(key, kind.model_fields)}"
    if problem["type"] == "missing":
        return f"{place}: the environment {name!r} needs it"
    return f"{place}: {problem['msg'].removeprefix('Value error, ')}, got {problem['input']!r}"


_NEEDED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "TMPDIR")
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS")
_PREFIX = "LC_"
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


def program_variables(pass_on: Sequence[str] = (), given: Mapping[str, str] | None = None) -> dict[str, str]:
    """What every program needs, the variables of ours that the recipe names, and those that it gives.

    The address of a proxy is passed on unless it holds a password.
    """
    found = {name: text for name, text in os.environ.items() if _is_plain(name, text) or name in pass_on}
    return {**found, **(given or {})}


def _is_plain(name: str, text: str) -> bool:
    plain = name in (*_NEEDED, *_CERTIFICATES) or name.startswith(_PREFIX)
    return plain or (name.lower() in _PROXIES and "@" not in text)
