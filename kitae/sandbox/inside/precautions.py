"""What keeps the tests from running the candidate's text, and from losing a failure: see `attend`."""

from __future__ import annotations

import _string  # type: ignore[import-not-found]
import os
import sys

from kitae.sandbox.inside.port import OURS, TESTS, describe
from kitae.sandbox.inside.usage import SCRATCH
from kitae.sandbox.inside.wire import NotData

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet
    from typing import Any

    from kitae.sandbox.inside.port import CheckerPort

_ARITHMETIC = {  # nodes of plain arithmetic
    "Add", "And", "BinOp", "BitAnd", "BitOr", "BitXor", "BoolOp", "Compare", "Constant", "Dict", "Div", "Eq",
    "Expression", "FloorDiv", "Gt", "GtE", "In", "Invert", "Is", "IsNot", "LShift", "List", "Load", "Lt", "LtE",
    "Mod", "Mult", "Not", "NotEq", "NotIn", "Or", "Pow", "RShift", "Set", "Sub", "Tuple", "UAdd", "USub", "UnaryOp",
}  # fmt: skip
_IMPORTING = ("_frozen_importlib", "importlib._bootstrap")
_IMPORTERS = ("importlib._bootstrap_external", "_frozen_importlib_external", "zipimport")
# Modules that compile no text but their own, filled with names that they have checked; `ast` only parses, and the
# checker compiles the tests.
_COMPILERS = (
    f"{OURS}.checker", "ast", "attr._make", "collections", "dataclasses", "gettext",
    "scipy.stats._distn_infrastructure", "types", "unittest.mock",
)  # fmt: skip
_RUNNING = ("eval", "exec", "compile", "timeit", "repeat", "Timer")  # whose arguments are texts of the tests
_AROUND = {  # what timeit puts around its texts
    "def", "inner", "_it", "_timer", "_stmt", "_setup", "pass", "_t0", "_t1", "for", "_i", "in", "return"
}  # fmt: skip
_DATA = {
    "array": ("array", "_array_reconstructor"),
    "builtins": ("bytearray", "complex", "frozenset", "range", "set", "slice"),
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque"),
    "copyreg": ("_reconstructor",),
    "datetime": ("date", "datetime", "time", "timedelta", "timezone"),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "pathlib": ("PosixPath", "PurePosixPath", "PureWindowsPath"),
    "uuid": ("UUID",),
}


def attend(port: CheckerPort, texts: list[str]) -> Guard:
    """Prepare this process for the tests.

    From their first request on, whatever they compile, unpickle or load may be the candidate's. Every way to do that
    raises one of the interpreter's audit events, so it is refused there, whoever asks: eval, exec, timeit, a library.
    Random seeds apply to the candidate too, and no failure is lost that unittest, a thread or a loop keeps to itself.
    """
    guard = Guard(port, texts)
    sys.addaudithook(guard.hear)
    sys.unraisablehook = lambda lost: _lose(port, lost.exc_value) if _is_of_tests(lost.exc_traceback) else None
    text = "\n".join(texts)
    for word, prepare in (
        ("seed", _share_seeds),
        ("unittest", _keep_failures),
        ("thread", _watch_threads),
        ("concurrent", _watch_futures),
        ("asyncio", _watch_loops),
        ("np.", _compare_elements),
        ("numpy", _compare_elements),
    ):
        if word in text.lower():
            prepare(port)
    return guard


def whole(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that lets no StopIteration out, which would end a loop of the tests."""
    try:
        return function(*arguments)
    except StopIteration:
        raise RuntimeError("StopIteration in a function") from None


class Guard:
    """Refuses what may run text of the candidate: `hear` is the audit hook."""

    def __init__(self, port: CheckerPort, texts: list[str]) -> None:
        self._port, self._texts = port, texts
        self._own: tuple[set[str], set[str]] | None = None

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        rule = _RULES.get(event)
        if rule is not None and self._port.used:
            rule(self, sys._getframe(1).f_globals.get("__name__"), *arguments)

    def compiles(self, caller: Any, source: Any, name: Any) -> None:
        if caller in _COMPILERS:
            return
        if caller in _IMPORTERS:
            _refuse_scratch("a module", name)
        elif type(source) in (str, bytes, bytearray):
            text = source if type(source) is str else bytes(source).decode(errors="replace")
            if not (
                self._is_own(text, _AROUND if caller == "timeit" else set()) or _is_arithmetic(text) or _importing()
            ):
                raise TypeError(f"text that the candidate may have made is no program: {text[:100]!r}")
        elif source is not None and not _importing():
            raise TypeError("a tree that the candidate may have made is no program")

    def opens(self, caller: Any, path: Any, *_: Any) -> None:
        if caller in _IMPORTERS:
            _refuse_scratch("a module", path)

    def imports(self, _: Any, name: Any, path: Any, *__: Any) -> None:
        if path is not None:
            _refuse_scratch("a module", path)

    def loads_library(self, _: Any, *arguments: Any) -> None:
        _refuse_scratch("a library", arguments[-1])

    def makes_code(self, caller: Any, *_: Any) -> None:
        if caller not in (*_COMPILERS, *_IMPORTERS) and not _importing():
            raise TypeError("code that the candidate may have made is no program")

    def finds_class(self, _: Any, module: str, name: str) -> None:
        own = module == TESTS and isinstance(self._port.namespace.get(name), type)
        if not own and name not in _DATA.get(module, ()) and module.partition(".")[0] != "numpy":
            raise TypeError(f"{module}.{name} in a pickle is no data")

    def filled(self, bound: Any, *arguments: Any, **keywords: Any) -> Any:
        """Call `format` of a text or a `Formatter`, unless the text's fields read what objects keep to themselves."""
        of_text = type(bound) is type(len)
        text = bound.__self__ if of_text else arguments[0] if arguments else ""
        if isinstance(text, str) and any(map(_is_private, _attributes(text))) and not self._is_own(text, set()):
            raise TypeError(f"a field of {text[:100]!r} reads a private attribute")
        return bound(*arguments, **keywords)

    def _is_own(self, text: str, around: AbstractSet[str]) -> bool:
        """Whether a text is in the tests, or made of names in texts that they execute: `exec(f"y = f({i})")`."""
        if self._own is None:
            self._own = _texts_of(self._texts)
        exact, names = self._own
        return text in exact or _names_in(text) <= names | around


def _attributes(template: str) -> list[str]:
    """The names of attributes that the fields of a format string read."""
    found: list[str] = []
    try:
        for _, field, inner, _ in _string.formatter_parser(template):
            path = _string.formatter_field_name_split(field or "")[1]
            found += [*(str(part) for is_attribute, part in path if is_attribute), *_attributes(inner or "")]
    except ValueError:  # it is no format string
        pass
    return found


def _is_private(name: str) -> bool:
    return name.startswith("_")


def _importing() -> bool:
    """Whether a module is being imported, which then runs text of its own."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") not in _IMPORTING:
        frame = frame.f_back
    return frame is not None


def _texts_of(tests: list[str]) -> tuple[set[str], set[str]]:
    """The texts in tests; and the names in those that are parts of what they execute."""
    import ast

    exact: set[str] = set()
    names: set[str] = set()
    for test in tests:
        try:
            nodes = list(ast.walk(ast.parse(test)))
        except SyntaxError:  # a prompt may be text
            continue
        exact |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        for node in nodes:
            called = node.func if isinstance(node, ast.Call) else None
            if getattr(called, "attr", getattr(called, "id", "")) in _RUNNING:
                parts = [part for argument in node.args for part in ast.walk(argument)]  # type: ignore[attr-defined]
                texts = [part.value for part in parts if isinstance(part, ast.Constant) and type(part.value) is str]
                names |= {name for text in texts for name in _names_in(text)}
    return exact, names


def _names_in(text: str) -> set[str]:
    import re

    return set(re.findall(r"[^\W\d]\w*", text))


def _is_arithmetic(text: str) -> bool:
    import ast

    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError:
        return False
    return all(type(node).__name__ in _ARITHMETIC for node in ast.walk(tree))


def _refuse_scratch(what: str, path: Any) -> None:
    """Refuse a file in a folder that the candidate can write to."""
    text = os.fsdecode(path) if isinstance(path, str | bytes) else ""
    for found in (os.path.abspath(text), os.path.realpath(text)):
        if any(found == folder or found.startswith(f"{folder}/") for folder in SCRATCH):
            raise ImportError(f"{what} that the candidate may have written: {text[:100]!r}")


_RULES: dict[str, Callable[..., None]] = {
    "compile": Guard.compiles,
    "open": Guard.opens,
    "import": Guard.imports,
    "ctypes.dlopen": Guard.loads_library,
    "sqlite3.load_extension": Guard.loads_library,
    "marshal.load": Guard.makes_code,
    "marshal.loads": Guard.makes_code,
    "code.__new__": Guard.makes_code,
    "pickle.find_class": Guard.finds_class,
}


def _lose(port: CheckerPort, error: BaseException | None) -> None:
    """Note what failed where nothing passes it on."""
    if error is not None:
        port.lost = port.lost or describe(error)


def _is_of_tests(step: Any) -> bool:
    while step is not None and step.tb_frame.f_globals.get("__name__") != TESTS:
        step = step.tb_next
    return step is not None


def _share_seeds(port: CheckerPort) -> None:
    import random

    seed = random.seed

    def both(*arguments: Any, **keywords: Any) -> None:
        seed(*arguments, **keywords)
        port.ask("seed", list(arguments), keywords)

    random.seed = both


def _watch_threads(port: CheckerPort) -> None:
    import threading

    threading.excepthook = lambda lost: _lose(port, lost.exc_value)


def _watch_loops(port: CheckerPort) -> None:
    import asyncio

    loop = asyncio.BaseEventLoop
    loop.default_exception_handler = lambda _, context: _lose(port, context.get("exception"))  # type: ignore


def _watch_futures(port: CheckerPort) -> None:
    from concurrent.futures import Future

    keep = Future.set_exception

    def set_exception(self: Any, error: Any) -> None:
        self._kept = [error]
        port.kept.append(self._kept)
        keep(self, error)

    def asked(give: Callable[..., Any]) -> Callable[..., Any]:
        def tell(self: Any, *arguments: Any, **keywords: Any) -> Any:
            try:
                return give(self, *arguments, **keywords)
            finally:
                vars(self).get("_kept", []).clear()

        return tell

    Future.set_exception = set_exception  # type: ignore[method-assign, assignment]
    Future.result = asked(Future.result)  # type: ignore[method-assign]
    Future.exception = asked(Future.exception)  # type: ignore[method-assign]


def review(port: CheckerPort) -> None:
    """At the end of a test, note an exception that its futures have kept. Where one was asked for, as `map` of a pool
    does, the others may be left, but for assertions."""
    left = [error for record in port.kept for error in record]
    asked = len(left) < len(port.kept)
    for error in left:
        if not asked or isinstance(error, AssertionError):
            _lose(port, error)
    port.kept.clear()


def _compare_elements(port: CheckerPort) -> None:
    """Let no comparison of arrays pass because one of them has no elements, which numpy spreads over any other."""
    try:
        import numpy
        from numpy import testing
    except ImportError:
        return
    if port.empty is not None:
        return

    def mixed(values: Any) -> bool:
        try:
            return len({numpy.size(value) == 0 for value in values}) > 1
        except ValueError:  # lists of different lengths
            return False

    class Empty(numpy.ndarray):  # type: ignore[type-arg]
        def __array_ufunc__(self, function: Any, method: str, *values: Any, **keywords: Any) -> Any:
            if mixed(values):
                raise ValueError("an array without elements is compared with something that has some")
            plain = [value.view(numpy.ndarray) if isinstance(value, Empty) else value for value in values]
            made = getattr(function, method)(*plain, **keywords)
            return made.view(Empty) if isinstance(made, numpy.ndarray) else made

    def minded(real: Any) -> Any:
        def compare(*values: Any, **keywords: Any) -> Any:
            if not mixed(values[:2]):
                return real(*values, **keywords)
            if real.__module__ == "numpy":
                return numpy.bool_(False)
            raise AssertionError("an array without elements is compared with something that has some")

        compare.__wrapped__ = real  # type: ignore[attr-defined]
        return compare

    port.empty = Empty
    for module, names in (
        (numpy, ("allclose", "isclose", "array_equiv")),
        (
            testing,
            [name for name in dir(testing) if name.startswith("assert_") and ("equal" in name or "close" in name)],
        ),
    ):
        for name in names:
            setattr(module, name, minded(getattr(module, name)))


def _keep_failures(port: CheckerPort) -> None:
    import unittest

    run = unittest.TextTestRunner.run

    def checked(self: Any, test: Any) -> Any:
        result = run(self, test)
        problems = [*result.errors, *result.failures]
        if problems or result.unexpectedSuccesses:
            raise AssertionError(problems[0][1].strip().rpartition("\n")[2] if problems else "unexpected success")
        if len(result.skipped) >= result.testsRun:
            if port.used:
                raise AssertionError("unittest has run no test")
            raise NotData("the tests must have something for unittest to run")
        return result

    def main(*arguments: Any, **keywords: Any) -> Any:
        return unittest.TestProgram(*arguments, **(keywords | {"exit": False}))

    unittest.TextTestRunner.run = checked  # type: ignore[method-assign]
    unittest.main = main  # type: ignore[assignment]
