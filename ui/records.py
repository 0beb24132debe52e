"""Write the records of the API down as TypeScript: `python ui/records.py` prints what `ui/src/records.ts` holds."""

import types
import typing
from dataclasses import fields
from typing import Any

from kitae.ui.records import RECORDS

_NAMES = {int: "number", float: "number", str: "string", bool: "boolean", Any: "unknown", type(None): "null"}


def typescript() -> str:
    lines = ["// Made by ui/records.py of kitae/ui/records.py: make ui."]
    for record in RECORDS:
        hints = typing.get_type_hints(record)
        lines += ["", f"export interface {record.__name__} {{"]
        lines += [f"  {field.name}: {_type(hints[field.name])};" for field in fields(record)]
        lines += ["}"]
    return "\n".join(lines) + "\n"


def _type(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        found = _type(inner[0])
        return f"({found})[]" if "|" in found else f"{found}[]"
    if origin is dict:
        return f"Record<string, {_type(inner[1])}>"
    if origin is types.UnionType:
        return " | ".join(map(_type, inner))
    return _NAMES[hint] if hint in _NAMES else str(hint.__name__)


if __name__ == "__main__":
    print(typescript(), end="")
