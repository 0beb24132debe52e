"""Functions from a user's own file, named in a recipe as `path/to/file.py:function`."""

import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from kitae.errors import KitaeError


def is_plugin(name: str) -> bool:
    path, colon, _ = name.rpartition(":")
    return bool(colon) and path.endswith(".py")


def load_function(name: str, what: str, arguments: Iterable[str], error: type[KitaeError]) -> Callable[..., Any]:
    """Execute the file and return the function, which must take `arguments` by position.

    `what` says in messages what the function is for ("verifier"). Further parameters are options: they must be
    nameable, and whoever calls the function fills them.
    """
    file, _, function = name.rpartition(":")
    path = Path(file).expanduser()
    module = _load(path, what, error)
    found = getattr(module, function, None)
    if not callable(found):
        own = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise error(f"{what} {name!r} needs a function {function!r} in {path}{nearest(function, own)}")
    wanted = list(arguments)
    try:
        inspect.signature(found).bind_partial(*wanted)
    except (TypeError, ValueError):  # ValueError: a builtin without a signature
        raise error(f"{what} {name!r} must take ({', '.join(wanted)}), got {function}{_signature(found)}") from None
    return found  # type: ignore[no-any-return]


_LOADED: dict[tuple[str, int, int], ModuleType] = {}


def _load(path: Path, what: str, error: type[KitaeError]) -> ModuleType:
    """The module of a file, executed once for all functions in it; a file that has changed is executed again."""
    if not path.is_file():
        raise error(f"the file of the {what} must exist, got {str(path)!r} in {Path.cwd()}")
    key = (str(path.resolve()), path.stat().st_mtime_ns, path.stat().st_size)
    if key not in _LOADED:
        _LOADED[key] = _execute(path, what, error)
    return _LOADED[key]


def _execute(path: Path, what: str, error: type[KitaeError]) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"kitae_user_{path.stem}", path.resolve())
    assert spec is not None and spec.loader is not None  # a .py file always has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as problem:
        raise error(f"the file of the {what} must import, but {path} raised {problem!r}") from problem
    return module


def _signature(function: Any) -> str:
    try:
        return str(inspect.signature(function))
    except ValueError:
        return "(…)"


def nearest(word: str, valid: Iterable[str]) -> str:
    near = difflib.get_close_matches(word.lower(), list(valid), 1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
