"""What keeps the tests from running the candidate's text, and from losing a failure: see `attend`."""

from __future__ import annotations

import _string  # type: ignore[import-not-found]
import os
import sys

from kitae.sandbox.inside.port import OURS, TESTS
from kitae.sandbox.inside.remotes import Remote
from kitae.sandbox.inside.usage import SCRATCH
from kitae.sandbox.inside.wire import NotData, describe

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
_split = _string.formatter_field_name_split
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
    "numpy": (
        "MaskedArray", "_frombuffer", "_mareconstruct", "_reconstruct", "dtype", "matrix", "ndarray", "recarray",
        "scalar",
    ),
    "pathlib": ("PosixPath", "PurePosixPath", "PureWindowsPath"),
    "uuid": ("UUID",),
}  # fmt: skip


def guarded_getattr(guard: Guard) -> Callable[..., Any]:
    """`getattr` that reads no private attribute by a name which the tests have not written."""

    def read(value: Any, name: Any, *default: Any) -> Any:
        if isinstance(name, str) and _is_private(name) and type(value) is not Remote:
            guard.reads(name, [name])
        return getattr(value, name, *default)

    read.__name__ = read.__qualname__ = "getattr"
    read.__module__ = "builtins"
    return read


def attend(port: CheckerPort, texts: list[str], library: bool) -> Any:
    """Prepare this process for the tests. Returns the `getattr` that they use. library: whether they have modules
    without importing them.

    From their first request on, whatever they compile, unpickle or load may be the candidate's. Every way to do that
    raises one of the interpreter's audit events, so it is refused there, whoever asks: eval, exec, timeit, a library.
    Random seeds apply to the candidate too, and no failure is lost that unittest, a thread or a loop keeps to itself.
    """
    guard = Guard(port, texts)
    sys.addaudithook(guard.hear)
    text = "\n".join(texts)
    if library or any(word in text for word in ("format", "attr", "import")):  # nothing else can read paths in texts
        _guard_fields(guard)
    sys.unraisablehook = lambda lost: port.failures.note(lost.exc_value) if _is_of_tests(lost.exc_traceback) else None
    os.register_at_fork(before=lambda: setattr(port, "used", True))  # a fork's requests are not seen here
    for word, prepare in (
        ("seed", _share_seeds),
        ("unittest", _keep_failures),
        ("thread", _watch_threads),
        ("concurrent", _watch_futures),
        ("asyncio", _watch_loops),
        ("multiprocessing", _watch_processes),
        ("warn", _hear),
        ("assertlogs", _hear),
        ("assertnologs", _hear),
        ("caplog", _hear),
        ("np.", _compare_elements),
        ("numpy", _compare_elements),
    ):
        if word in text.lower():
            prepare(port)
    return guarded_getattr(guard)


def whole(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that lets no StopIteration out, which would end a loop of the tests."""
    try:
        return function(*arguments)
    except StopIteration:
        raise RuntimeError("StopIteration in a function") from None


class Guard:
    """Refuses what may run text of the candidate: `hear` is the audit hook."""

    def __init__(self, port: CheckerPort, texts: list[str]) -> None:
        self._port, self._tests = port, texts
        self._texts: _Texts | None = None
        self._read = False  # whether the tests have read a file that the candidate may have written

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        rule = _RULES.get(event)
        if rule is not None and (self._port.used or self._read or event in _OF_FILES):
            rule(self, sys._getframe(1).f_globals.get("__name__"), *arguments)

    def compiles(self, caller: Any, source: Any, name: Any) -> None:
        if caller in _COMPILERS:
            return
        if caller in _IMPORTERS:
            _refuse_scratch("a module", name)
        elif type(source) in (str, bytes, bytearray):
            text = source if type(source) is str else bytes(source).decode(errors="replace")
            around = _AROUND if caller == "timeit" else set()
            if caller in ("typing", "annotationlib") and text in self.texts.hints:
                return
            if self._port.has_said(text) and not _is_arithmetic(text):
                raise TypeError(f"text that the candidate has answered is no program: {text[:100]!r}")
            if not (self.texts.runs(text, around) or _is_arithmetic(text) or _importing()):
                raise TypeError(f"text that the candidate may have made is no program: {text[:100]!r}")
        elif source is not None and not _importing():
            raise TypeError("a tree that the candidate may have made is no program")

    def opens(self, caller: Any, path: Any, *_: Any) -> None:
        if caller in _IMPORTERS:
            _refuse_scratch("a module", path)
        self._read = self._read or _is_scratch(path)

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
        if not own and name not in _DATA.get("numpy" if module.startswith("numpy.") else module, ()):
            raise TypeError(f"{module}.{name} in a pickle is no data")

    def reads(self, text: Any, attributes: list[str]) -> None:
        """Refuse a text that reads what objects keep to themselves, unless tests or a library have written it."""
        if not any(map(_is_private, attributes)) or any(text in own for own in self.texts.all):
            return
        asking = sys._getframe(2)
        of_module = asking.f_globals.get("__name__") != TESTS and any(v is text for v in asking.f_globals.values())
        if not of_module and text not in asking.f_code.co_consts:
            raise TypeError(f"{text[:100]!r} reads a private attribute")

    @property
    def texts(self) -> _Texts:
        self._texts = self._texts or _Texts(self._tests)
        return self._texts


def _attributes(template: str) -> list[str]:
    """The names of attributes that the fields of a format string read."""
    found: list[str] = []
    try:
        for _, field, inner, _ in _string.formatter_parser(template):
            path = _split(field or "")[1]
            found += [*(str(part) for is_attribute, part in path if is_attribute), *_attributes(inner or "")]
    except ValueError:  # it is no format string
        pass
    return found


def _is_private(name: str) -> bool:
    return name.startswith("_") or name in ("gi_frame", "cr_frame", "ag_frame", "gi_code", "cr_code", "ag_code")


def _guard_fields(guard: Guard) -> None:
    """Guard what reads attributes by a path in a text, where the paths are read, whoever asks and in whatever way."""
    import _ctypes
    import _operator
    import gc
    import operator

    getter = operator.attrgetter

    def formatter_field_name_split(name: Any) -> Any:
        first, rest = _split(name)
        path = list(rest)
        guard.reads(name, [str(part) for is_attribute, part in path if is_attribute])
        return first, iter(path)

    def attrgetter(*paths: Any) -> Any:
        for path in paths:
            if isinstance(path, str) and "." in path:
                guard.reads(path, path.split("."))
        return getter(*paths)

    def guarded(real: Any) -> Any:
        def fill(text: Any, /, *arguments: Any, **keywords: Any) -> Any:
            if isinstance(text, str) and "." in text:
                guard.reads(text, _attributes(text))
            return real(text, *arguments, **keywords)

        fill.__name__, fill.__qualname__, fill.__doc__ = real.__name__, real.__qualname__, real.__doc__
        fill.__module__ = "builtins"
        return fill

    _string.formatter_field_name_split = formatter_field_name_split
    _operator.attrgetter = operator.attrgetter = attrgetter  # type: ignore[misc, assignment]
    (methods,) = gc.get_referents(str.__dict__)  # what the read-only view shows
    for name in ("format", "format_map"):
        methods[name] = guarded(methods[name])

    class Object(_ctypes._SimpleCData):  # type: ignore[type-arg]
        _type_ = "O"

    class Call(_ctypes.CFuncPtr):
        _flags_ = _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_PYTHONAPI

    Call(_ctypes.dlsym(_ctypes.dlopen(None, 0), "PyType_Modified"))(Object(str))  # type: ignore[arg-type]


def _importing() -> bool:
    """Whether a module is being imported, which then runs text of its own."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") not in _IMPORTING:
        frame = frame.f_back
    return frame is not None


class _Texts:
    """The texts in tests: all of them; those that they run as programs; and those of which they make such a program, as
    in `exec(f"y = f({i})")`, whose gaps may hold data and the names in these texts. A text that they do not run is no
    program where the candidate answers with it: `assert eval(f(3)) == want, "want"`."""

    def __init__(self, tests: list[str]) -> None:
        import ast

        nodes: list[Any] = []
        for test in tests:
            try:
                nodes += ast.walk(ast.parse(test))
            except SyntaxError:  # a prompt may be text
                continue
        self.all = set(_constants(nodes))
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        running = {*_RUNNING, *(node.name for node in functions if any(map(_called, ast.walk(node))))}
        given = [part for node in nodes if _called(node, running) for part in _given(node)]
        for value in given:  # grows on the way: by what is assigned to the names in it
            names = {part.id for part in ast.walk(value) if isinstance(part, ast.Name)}
            for node in nodes:
                targets = getattr(node, "targets", [getattr(node, "target", None)])
                source = getattr(node, "value", getattr(node, "iter", None))
                if isinstance(source, ast.expr) and source not in given:
                    given += [source] if names & {getattr(target, "id", "") for target in targets} else []
        self._run = {text for value in given for text in _constants([value, *ast.iter_child_nodes(value)])}
        made = [part for value in given if not isinstance(value, ast.Constant) for part in ast.walk(value)]
        composed = [part for part in made if isinstance(part, ast.JoinedStr | ast.BinOp) or _called(part, ("format",))]
        self._names = {n for part in composed for text in _constants(ast.walk(part)) for n in _names_in(text)}
        hints = [getattr(node, "annotation", None) or getattr(node, "returns", None) for node in nodes]
        parts = [part for hint in hints if hint for part in ast.walk(hint)]
        self.hints = {ast.unparse(hint) for hint in hints if hint} | set(_constants(parts))
        frames = [_constants(ast.walk(part)) for part in composed]
        self._frames = [[part for text in frame for part in _parts(text) if part.strip()] for frame in frames]

    def runs(self, text: str, around: AbstractSet[str]) -> bool:
        return text in self._run or self._made(text, around) or self._fills(text, around)

    def _made(self, text: str, around: AbstractSet[str]) -> bool:
        """Whether a text has all the parts of one that tests make, and no names but theirs."""
        import io
        import tokenize

        if not any(frame and all(part in text for part in frame) for frame in self._frames):
            return False
        try:
            tokens = [*tokenize.generate_tokens(io.StringIO(text).readline)]
        except (SyntaxError, tokenize.TokenError):
            return False
        code = [token.string for token in tokens if token.type != tokenize.STRING or _holds_code(token.string)]
        return {name for part in code for name in _names_in(part)} <= self._names | around

    def _fills(self, text: str, around: AbstractSet[str]) -> bool:
        """Whether a text is made of the tests' within that of timeit."""
        ours = {name for own in self._run if own in text for name in _names_in(own)}
        return bool(around) and _names_in(text) <= ours | around


def _called(node: Any, names: Any = _RUNNING) -> bool:
    """Whether a node is a call of one of these functions."""
    function = getattr(node, "func", None)
    return getattr(function, "attr", getattr(function, "id", "")) in names


def _given(call: Any) -> list[Any]:
    words = [word.value for word in call.keywords if word.arg in ("source", "stmt", "setup")]
    return [*call.args[: 1 if _called(call, ("eval", "exec")) else 2], *words]


def _constants(nodes: Any) -> list[str]:
    return [text for node in nodes if type(text := getattr(node, "value", None)) is str]


def _parts(text: str) -> list[str]:
    """The texts between the gaps of a template: `["f(", ")"]` for `"f({})"`, and for `"f(%r)"`."""
    import re

    return re.split(r"%[-+ #0-9.]*[a-zA-Z]|\{[^{}]*\}", text)


def _holds_code(literal: str) -> bool:
    return "f" in literal.partition(literal[-1])[0].lower()


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
    if _is_scratch(path):
        raise ImportError(f"{what} that the candidate may have written: {str(path)[:100]!r}")


def _is_scratch(path: Any) -> bool:
    text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
    found = (os.path.abspath(text), os.path.realpath(text)) if text else ()
    return any(path == folder or path.startswith(f"{folder}/") for path in found for folder in SCRATCH)


_OF_FILES = ("open", "import", "ctypes.dlopen", "sqlite3.load_extension")  # which the candidate may have written before
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


def _hear(port: CheckerPort) -> None:
    """Pass on what the candidate warns of and logs during a call."""
    if not port.hearing:
        port.hearing = True
        port.ask("listen")


def _watch_threads(port: CheckerPort) -> None:
    import threading

    threading.excepthook = lambda lost: port.failures.note(lost.exc_value)


def _watch_loops(port: CheckerPort) -> None:
    import asyncio

    loop = asyncio.BaseEventLoop
    loop.default_exception_handler = lambda _, context: port.failures.note(context.get("exception"))  # type: ignore


def _watch_futures(port: CheckerPort) -> None:
    from concurrent.futures import Future
    from concurrent.futures import _base as futures

    def kept(keep: Callable[..., None]) -> Callable[..., None]:
        def set_exception(self: Any, error: Any) -> None:
            port.failures.note(error, kept=True)
            keep(self, error)

        return set_exception

    futures.LOGGER.exception = lambda *_: port.failures.note(sys.exc_info()[1])  # type: ignore # what a callback raised
    Future.set_exception = kept(Future.set_exception)  # type: ignore[method-assign]
    for name in ("result", "exception"):
        setattr(Future, name, _asking(port, getattr(Future, name)))


def _watch_processes(port: CheckerPort) -> None:
    from multiprocessing.pool import ApplyResult, MapResult
    from multiprocessing.process import BaseProcess

    code = BaseProcess.exitcode.fget  # type: ignore[attr-defined]

    def keeping(put: Callable[..., None]) -> Callable[..., None]:
        def keep(self: Any, i: Any, result: Any) -> None:
            if not result[0] and not self._error_callback:
                port.failures.note(result[1], kept=True)
            put(self, i, result)

        return keep

    def noting(run: Callable[..., int]) -> Callable[..., int]:
        def ending(self: Any, *arguments: Any, **keywords: Any) -> int:
            status = run(self, *arguments, **keywords)
            if status:
                port.failures.note(ChildProcessError("a process of the tests has failed"), kept=True)
            return status

        return ending

    results: tuple[Any, ...] = (ApplyResult, MapResult)
    for kind in results:
        kind._set = keeping(kind._set)
    ApplyResult.get = _asking(port, ApplyResult.get)  # type: ignore[method-assign]
    BaseProcess._bootstrap = noting(BaseProcess._bootstrap)  # type: ignore[attr-defined]
    BaseProcess.exitcode = property(_asking(port, code))  # type: ignore[assignment]


def _asking(port: CheckerPort, give: Callable[..., Any]) -> Callable[..., Any]:
    """A method that hands out what was kept, after which it is the tests' to judge."""

    def tell(self: Any, *arguments: Any, **keywords: Any) -> Any:
        port.failures.asked = True
        found = give(self, *arguments, **keywords)
        if isinstance(found, BaseException):
            port.failures.forgive(found)
        return found

    return tell


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

    class Empty(numpy.ndarray):
        def __array_ufunc__(self, ufunc: Any, method: Any, *inputs: Any, **kwargs: Any) -> Any:
            if mixed(inputs):
                raise ValueError("an array without elements is compared with something that has some")
            plain = [value.view(numpy.ndarray) if isinstance(value, Empty) else value for value in inputs]
            made = getattr(ufunc, method)(*plain, **kwargs)
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
    case = unittest.TestCase
    sets = case.assertSetEqual

    def noting(add: Callable[..., None]) -> Callable[..., None]:
        def noted(self: Any, test: Any, *problem: Any) -> None:
            if port.used and problem[-1] is not None:  # an exception of its own, which no context can swallow
                port.failures.note(AssertionError(describe(problem[-1][1])))
            add(self, test, *problem)

        return noted

    def same_sets(self: Any, first: Any, second: Any, msg: Any = None) -> None:
        if Remote in (type(first), type(second)):
            self.fail("an object of the candidate is no set")
        sets(self, first, second, msg)

    class Failed(AssertionError):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            port.failures.note(self)

    def as_expected(self: Any, test: Any, problem: Any) -> None:
        port.failures.forgive(problem[1])
        expected(self, test, problem)

    Failed.__name__ = Failed.__qualname__ = "AssertionError"
    case.failureException = Failed
    expected = unittest.TestResult.addExpectedFailure
    unittest.TestResult.addExpectedFailure = as_expected  # type: ignore[method-assign, assignment]
    for name in ("addError", "addFailure", "addSubTest"):  # whoever runs the test, whatever becomes of the result
        setattr(unittest.TestResult, name, noting(getattr(unittest.TestResult, name)))
    case.assertSetEqual = same_sets  # type: ignore[method-assign, assignment]

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
