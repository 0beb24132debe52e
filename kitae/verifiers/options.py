"""Options that verifiers share because they query the same kind of server."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from kitae.clients.service import Service

ScoreT = TypeVar("ScoreT", bound=Callable[..., Any])

_IDENTITY = ("base_url", "model", "key_env")  # verifiers have options of their own for these


def service_options(*names: str) -> Callable[[ScoreT], ScoreT]:
    """Add fields of `Service` to a verifier's options: those named, or else all from `concurrency` on.

    They replace `**options` in its signature, from which params are checked and documented: with
    `@service_options("retries", "backoff")`, the signature `f(*, url: str, **options)` ends in `url: str, retries: int
    = 4, backoff: float = 0.5`.
    """
    known = {field.name: field for field in fields(Service)}
    chosen = [known[name] for name in names or known if name not in _IDENTITY]
    options = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in chosen
    ]

    def declare(score: ScoreT) -> ScoreT:
        signature = inspect.signature(score)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        score.__signature__ = signature.replace(parameters=own + options)  # type: ignore[attr-defined]
        return score

    return declare
