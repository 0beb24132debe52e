"""Reward functions that were given from Python: how they reach the workers, and how a resumed run finds them again.

    kitae.train(reward=f) ─► given(f): a name for the settings, and a copy by value
                                 │                     │ `held`: in a file of this session, for as long as the run works
                                 ▼                     ▼
              "/home/me/train.py:f@3f9c2e71a0b4"    the template of the verifier's workers loads it

The name says where the function was defined and ends in a mark, which is made of its code and of what it captures.
While the process that gave the function works on the run, workers load the copy, so lambdas, closures and objects of a
notebook's cell will do. Nothing pickled stays in the run folder: another process, as `kitae resume` is, finds the
function in its file or module again, and it must bear the same mark there. What was defined in a session of Python that
is over must be given again.

The mark leaves out comments, formatting, other modules, and the insides of objects that are neither plain values nor of
classes of the same file. It holds within a minor version of Python, whose compiler made the code.
"""

import base64
import builtins
import dis
import hashlib
import importlib
import inspect
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from kitae.errors import ConfigError, VerifierError
from kitae.plugins import load_function

SESSION = "session"
"""Where a function was defined that no file has: a notebook, the interpreter, or inside of another function."""

_NAME = re.compile(r"(?P<where>.+):(?P<function>[^:@]+)@(?P<mark>[0-9a-f]{12})")
_held: dict[str, list[Path]] = {}  # by name, the copies that this process has, one for each run


@dataclass(frozen=True, slots=True)
class GivenName:
    """`GivenName("/home/me/train.py", "accuracy", "3f9c2e71a0b4")`; where: a file, a module, or `SESSION`."""

    where: str
    function: str
    mark: str

    def __str__(self) -> str:
        return f"{self.where}:{self.function}@{self.mark}"

    @property
    def label(self) -> str:
        """`"accuracy"`."""
        return label_of(self.function)


@dataclass(frozen=True, slots=True)
class GivenFunction:
    """A function, as the settings name it, and its copy."""

    name: GivenName
    copy: bytes


def label_of(qualified: str) -> str:
    return qualified.rpartition(".")[2].strip("<>")


def given_name(name: str) -> GivenName | None:
    """What the name of a verifier says, if it is that of a given function."""
    found = _NAME.fullmatch(name)
    return None if found is None else GivenName(found["where"], found["function"], found["mark"])


def is_given(name: str) -> bool:
    return given_name(name) is not None


def given(function: Callable[..., Any]) -> GivenFunction:
    """Raises `ConfigError` if a copy cannot be made, and says of which of its variables."""
    import cloudpickle

    core = _core(function)
    try:
        copy = cloudpickle.dumps(function)
    except Exception as error:  # each type that cannot be copied raises what it likes
        raise ConfigError(_why_not(function, error)) from None
    home = _home(function) if isinstance(function, FunctionType) else SESSION
    return GivenFunction(GivenName(home, core.__qualname__, mark_of(function)), copy)


@contextmanager
def held(functions: Iterable[GivenFunction]) -> Iterator[None]:
    """While the block runs, pools of this process send these copies to their workers."""
    mine = {str(each.name): each.copy for each in functions}
    with tempfile.TemporaryDirectory(prefix="kitae-functions-") as folder:  # private to the user
        for number, (name, copy) in enumerate(mine.items()):
            if name in _held and _held[name][-1].read_bytes() != copy:
                raise ConfigError(
                    f"the reward {name} is in use by another run of this process, with other objects in it: give one "
                    "of them another name, or end that run first"
                )
            (Path(folder) / f"{number}.pickle").write_bytes(copy)
        new = {name: Path(folder) / f"{number}.pickle" for number, name in enumerate(mine)}
        for name, path in new.items():
            _held.setdefault(name, []).append(path)
        try:
            yield
        finally:
            for name, path in new.items():
                _held[name].remove(path)
                if not _held[name]:
                    del _held[name]


def names_in(verifier: str, params: Mapping[str, Any]) -> list[str]:
    """The given functions that a verifier is made of, also as parts of a sum."""
    found = [verifier] if is_given(verifier) else []
    styled = params.get("function")  # of a function in the style of another trainer
    for name in styled if isinstance(styled, list) else [styled]:
        found += [name] if isinstance(name, str) and is_given(name) else []
    parts = params.get("parts")
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, Mapping) and isinstance(part.get("name"), str):
            inner = part.get("params")
            found += names_in(part["name"], inner if isinstance(inner, Mapping) else {})
    return found


def check_given(verifier: str, params: Mapping[str, Any]) -> None:
    """Raises `VerifierError` for a function that is neither held nor to be found. Nothing of the user's is executed."""
    for name in names_in(verifier, params):
        if name in _held:
            continue
        known = given_name(name)
        assert known is not None
        if known.where == SESSION:
            raise VerifierError(
                f"the reward {known.label!r} was defined in a session of Python, which no file has: go on from there "
                f"with kitae.resume(RUN, reward={known.label})"
            )
        if known.where.endswith(".py") and not Path(known.where).is_file():
            raise VerifierError(
                f"the reward {known.label!r} was defined in {known.where}, which is gone; {_again(known)}"
            )


def copies_for(verifier: str, params: Mapping[str, Any]) -> dict[str, str]:
    """Files with copies, by name: for the template of a pool on this machine."""
    return {name: str(_held[name][-1]) for name in names_in(verifier, params) if name in _held}


def copies_in_text(verifier: str, params: Mapping[str, Any]) -> dict[str, str]:
    """The copies themselves: for a pool in a process that may be on another machine."""
    files = copies_for(verifier, params)
    return {name: base64.b64encode(Path(file).read_bytes()).decode() for name, file in files.items()}


def from_text(copies: Mapping[str, str]) -> list[GivenFunction]:
    made = ((given_name(name), base64.b64decode(copy)) for name, copy in copies.items())
    return [GivenFunction(name, copy) for name, copy in made if name is not None]


def hold_files(files: Mapping[str, str]) -> None:
    """In a template, which has what its pool holds."""
    _held.update({name: [Path(file)] for name, file in files.items()})


def load_given(name: str) -> Callable[..., Any]:
    """The function itself. This executes code of the user's: call it in a worker process alone."""
    known = given_name(name)
    assert known is not None
    if name in _held:
        import cloudpickle

        try:
            found: Callable[..., Any] = cloudpickle.loads(_held[name][-1].read_bytes())
        except Exception as error:
            raise VerifierError(
                f"the reward {known.label!r} cannot be loaded in a worker: {type(error).__name__}: {error}"
            ) from error
        return found
    found = _found_again(known)
    if (mark := mark_of(found)) != known.mark:
        raise VerifierError(
            f"the reward {known.label!r} of {known.where} is not what the run began with (mark {known.mark}, now "
            f"{mark}): its code or a value that it captures was changed, or this is another version of Python. Restore "
            "it, or begin a new run from this one's model"
        )
    return found


def mark_of(function: Callable[..., Any]) -> str:
    """Of the code of a function and of what it captures: `"3f9c2e71a0b4"`."""
    digest = hashlib.blake2b(digest_size=6)
    for text in _described(function, getattr(_core(function), "__module__", ""), set()):
        digest.update(f"{len(text)}:{text}".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _found_again(known: GivenName) -> Callable[..., Any]:
    if known.where.endswith(".py"):
        head, *rest = known.function.split(".")
        found: Any = load_function(f"{known.where}:{head}", "reward", (), VerifierError)
    else:
        try:
            found = importlib.import_module(known.where)
        except Exception as error:
            raise VerifierError(
                f"the reward {known.label!r} is of the module {known.where}, which does not import here: {error!r}; "
                f"{_again(known)}"
            ) from error
        rest = known.function.split(".")
    for name in rest:
        found = getattr(found, name, None)
    if not callable(found):
        raise VerifierError(f"{known.where} has no {known.function!r} any more; {_again(known)}")
    return found  # type: ignore[no-any-return]


def _again(known: GivenName) -> str:
    return f"give it again from Python: kitae.resume(RUN, reward={known.label})"


def _core(function: Any) -> Any:
    """What has a name: the function in a partial, the class of an object that can be called."""
    while hasattr(function, "func") and not hasattr(function, "__qualname__"):
        function = function.func
    return function if hasattr(function, "__qualname__") else type(function)


def _home(function: FunctionType) -> str:
    """Where another process finds it: a file, or a module of a package."""
    module, file = sys.modules.get(function.__module__), os.path.abspath(function.__code__.co_filename)
    if "<" in function.__qualname__ or not os.path.isfile(file) or not file.endswith(".py"):
        return SESSION
    if os.path.abspath(getattr(module, "__file__", None) or "") != file:  # a cell of a notebook has a file too
        return SESSION
    return function.__module__ if "." in function.__module__ else file


def _described(value: Any, home: str, seen: set[int]) -> Iterator[str]:
    """In words that are the same in every process: code and plain values in full, libraries by their names."""
    if isinstance(value, list | tuple):
        yield type(value).__name__
        for each in value:
            yield from _described(each, home, seen)
    elif isinstance(value, set | frozenset):
        yield from sorted("".join(_described(each, home, seen)) for each in value)
    elif isinstance(value, Mapping):
        yield from sorted(
            "=".join(("".join(_described(k, home, seen)), "".join(_described(v, home, seen)))) for k, v in value.items()
        )
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes | re.Pattern):
        yield repr(value)
    elif isinstance(value, ModuleType):
        yield value.__name__
    elif id(value) in seen:
        yield "again"
    else:
        seen.add(id(value))
        yield from _described_code(value, home, seen)


def _described_code(value: Any, home: str, seen: set[int]) -> Iterator[str]:
    module = getattr(value, "__module__", "")
    if isinstance(value, FunctionType):
        yield value.__qualname__
        if module in (home, "__main__"):
            yield from _code(value.__code__)
            for name, captured in _captured(value):
                yield name
                yield from _described(captured, home, seen)
    elif isinstance(value, BuiltinFunctionType):
        yield value.__qualname__
    elif inspect.ismethod(value):
        yield from _described([value.__func__, value.__self__], home, seen)
    elif isinstance(value, type):
        yield value.__qualname__
        if module in (home, "__main__"):
            own = {name: each for name, each in vars(value).items() if isinstance(each, FunctionType)}
            yield from _described(own, home, seen)
    elif hasattr(value, "func") and hasattr(value, "args") and hasattr(value, "keywords"):  # functools.partial
        for each in (value.func, value.args, value.keywords):
            yield from _described(each, home, seen)
    else:
        yield from _described(type(value), home, seen)
        if type(value).__module__ in (home, "__main__") and hasattr(value, "__dict__"):
            yield from _described(vars(value), home, seen)


def _code(code: CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield " ".join(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code(constant)
        else:
            yield from _described(constant, "", set())


def _captured(function: FunctionType) -> list[tuple[str, Any]]:
    """What a function reads from outside, and its defaults, by name."""
    found = list[tuple[str, Any]]()
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found.append((name, cell.cell_contents))
        except ValueError:  # it is assigned later
            continue
    names = sorted(_globals_of(function.__code__))
    found += [(name, function.__globals__[name]) for name in names if name in function.__globals__]
    found += [(f"default {i}", value) for i, value in enumerate(function.__defaults__ or ())]
    return found + sorted((function.__kwdefaults__ or {}).items())


def _globals_of(code: CodeType) -> set[str]:
    names = {str(i.argval) for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _globals_of(constant)
    return {name for name in names if not hasattr(builtins, name)}


def _why_not(function: Callable[..., Any], error: Exception) -> str:
    """Which variable cannot be copied, and what to do instead."""
    import cloudpickle

    core, culprit = _core(function), ""
    pieces = (
        _captured(function) if isinstance(function, FunctionType) else sorted(getattr(function, "__dict__", {}).items())
    )
    for name, value in pieces:
        try:
            cloudpickle.dumps(value)
        except Exception as problem:
            kind = type(value).__qualname__
            culprit, error = f" because of its variable {name!r}, which is of type {kind}", problem
            break
    label = label_of(core.__qualname__)
    return (
        f"the reward {label!r} cannot be sent to the verifier's workers{culprit}: {type(error).__name__}: {error}\n"
        "Make that inside the function, at its first call; or put both into a file, which each worker loads for "
        f'itself: reward="rewards.py:{label}"'
    )
