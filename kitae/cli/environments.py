"""`kitae environments`: what a model can talk to, and what each environment can be told."""

from collections.abc import Iterator
from typing import get_args

from kitae.envs.environment_registry import WORLDS
from kitae.section import Section


def environments() -> None:
    """List the environments, each with its params."""
    for name, world in WORLDS.items():
        print(f"{name:10} {_summary(world.__doc__)}")
        params: type[Section] | None = getattr(world, "params", None)
        for key, default, description in _described(params, "") if params else ():
            print(f"    {key:20} {default:12} {description}")
    print(f"{'file.py:Class':10} Your own: async start, step and close; it is made as Class(prompt, **env.params).")


def _summary(text: str | None) -> str:
    """The first sentence of a docstring."""
    return " ".join((text or "").split("\n\n")[0].split())


def _described(params: type[Section], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, field in params.model_fields.items():
        inside = [kind for kind in (field.annotation, *get_args(field.annotation)) if _is_section(kind)]
        if inside:
            yield from _described(inside[0], f"{prefix}{name}.")
        else:
            default = "needed" if field.is_required() else _shown(field.get_default(call_default_factory=True))
            yield f"{prefix}{name}", default, field.description or ""


def _is_section(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _shown(default: object) -> str:
    return str(default) if default not in ("", (), {}) else "-"
