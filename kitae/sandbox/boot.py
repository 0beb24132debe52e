"""How the modules of `inside` are loaded in a sandbox: as code through the interpreter's pipe, never as files."""

import __future__

import functools
import marshal
from collections.abc import Sequence
from importlib import resources
from typing import Any

from kitae.sandbox.inside import LATER, MODULES

PACKAGES = ("kitae", "kitae.sandbox", "kitae.sandbox.inside")  # created before their modules
BOOT = f"""
import gc, marshal, os, sys
gc.disable()
def read(n):
    data = b""
    while len(data) < n:
        part = os.read(0, n - len(data))
        if not part:
            os._exit(1)
        data += part
    return data
for name in {PACKAGES}:
    sys.modules[name] = module = type(sys)(name)
    module.__path__ = []
def load(modules):
    for name, code in marshal.loads(modules):
        sys.modules[name] = module = type(sys)(name)
        exec(code, module.__dict__)
    return module
modules, later = marshal.loads(read(int.from_bytes(read(8), "little")))
load(modules).main(lambda mode: load(later[mode]))
"""


@functools.cache
def inside_sources() -> tuple[tuple[str, str], ...]:
    """All modules that run inside, as (module, source), in an order in which they can be loaded."""
    later = [name for names in LATER.values() for name in names]
    return _sources([*MODULES[:-1], *later, MODULES[-1]])


def _sources(names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    folder = resources.files(PACKAGES[-1])
    return tuple((f"{PACKAGES[-1]}.{name}", (folder / f"{name}.py").read_text("utf-8")) for name in names)


@functools.cache
def inside_code() -> bytes:
    """The compiled modules, without docstrings: those of every sandbox, and those of each mode, packed by themselves.
    Compiling them here, for the same interpreter, saves time and hides the files' paths."""

    def compiled(names: Sequence[str]) -> bytes:
        return marshal.dumps([(name, _compiled(name, text)) for name, text in _sources(names)])

    return marshal.dumps((compiled(MODULES), {mode: compiled(names) for mode, names in LATER.items()}))


def _compiled(name: str, text: str) -> Any:
    text = text.replace("from __future__ import annotations\n", "\n", 1)  # it would load a file inside
    flags = __future__.annotations.compiler_flag
    return compile(text, f"{name}.py", "exec", flags, dont_inherit=True, optimize=2)
