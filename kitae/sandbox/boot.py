"""How the modules of `inside` are loaded in a sandbox: as code through the interpreter's pipe, never as files."""

import functools
import marshal
from importlib import resources

from kitae.sandbox.inside import MODULES

PACKAGES = ("kitae", "kitae.sandbox", "kitae.sandbox.inside")  # created before their modules
BOOT = f"""
import marshal, os, sys
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
for name, code in marshal.loads(read(int.from_bytes(read(8), "little"))):
    sys.modules[name] = module = type(sys)(name)
    exec(code, module.__dict__)
module.main()
"""


@functools.cache
def inside_sources() -> tuple[tuple[str, str], ...]:
    """The modules that run inside, as (module, source), in the order in which they load."""
    folder = resources.files(PACKAGES[-1])
    return tuple((f"{PACKAGES[-1]}.{name}", (folder / f"{name}.py").read_text("utf-8")) for name in MODULES)


@functools.cache
def inside_code() -> bytes:
    """The compiled modules, without docstrings. Compiling them here, for the same interpreter, saves time and hides the
    files' paths."""
    return marshal.dumps(
        [(name, compile(text, f"{name}.py", "exec", dont_inherit=True, optimize=2)) for name, text in inside_sources()]
    )
