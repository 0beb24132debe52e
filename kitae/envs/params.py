"""Params of environments as settings. Errors name the place in the recipe."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from kitae.errors import ConfigError
from kitae.plugins import nearest
from kitae.section import Section

S = TypeVar("S", bound=Section)


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
