"""The tests' side: runs them, and reaches the candidate only by questions whose answers are plain data.

An object that is not data is a `Remote` here. It can be called, read, iterated and passed back, but it equals nothing
the tests bring along, and an operator with such an operand gives a `Remote` that no comparison or conversion accepts:
otherwise an object of the candidate's would be shown the expected value and asked whether it is right.
"""

from __future__ import annotations

import builtins
import os
import select
import sys
import time

from kitae.verifiers.runners.candidate import NAME
from kitae.verifiers.runners.wire import NotData, Port

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from kitae.verifiers.runners.wire import Node

_BATCH = 256  # items of a remote iterator that travel at once, at most
_TESTS = "tests"  # the module name of the tests
_TICK = 0.05  # seconds between two looks at a silent candidate's clock


class TimeUp(BaseException):
    """The candidate did not answer in time; a BaseException, so that no test can catch it."""


class Gone(BaseException):
    """The candidate has ended or broken the protocol."""


def check(fd: int, pid: int, job: dict[str, Any], report: Callable[[str, str], None]) -> None:
    """Wait for the candidate to load, then run `job["tests"]` one by one and report on each as it ends.

    Reports: "loaded" or "unloadable" once; then "passed" or "failed" for each test. "timeout" and "gone" end it all:
    the test that was running has failed, and those after it have not been run. "error": the tests are at fault.
    """
    port = CheckerPort(fd, pid, job["time_limit"])
    try:
        port.restart_clock()
        status, *rest = port.hear()
    except (TimeUp, Gone) as end:
        report("timeout" if isinstance(end, TimeUp) else "unloadable", str(end))
        return
    if status != "loaded":
        report("unloadable", str(rest[0]) if rest else "")
        return
    report("loaded", "")
    try:
        port.restart_clock()
        namespace = make_namespace(port, job)
    except TimeUp:
        report("timeout", "in the setup of the tests")
        return
    except Gone as end:
        report("gone", str(end))
        return
    except BaseException as error:
        report("broken", f"the setup of the tests raised {_describe(error)}")
        return
    for test in job["tests"]:
        port.restart_clock()
        try:
            exec(compile(test, "tests", "exec", dont_inherit=True), namespace)
        except TimeUp as end:
            report("timeout", str(end))
            return
        except Gone as end:
            report("gone", str(end))
            return
        except NotData as problem:
            report("error", str(problem))
            return
        except BaseException as error:  # SystemExit too: it comes from the candidate
            report("failed", _describe(error))
        else:
            report("passed", "")


def make_namespace(port: CheckerPort, job: dict[str, Any]) -> dict[str, Any]:
    """What the tests see: their own setup first, then built-ins, then what only the candidate can have.

    The prompt and the setup run here too, so that their helpers are the trusted ones and not the candidate's.
    """
    sys.modules[_TESTS] = module = type(sys)(_TESTS)
    namespace = module.__dict__
    namespace["__builtins__"] = builtins
    if job["prompt"]:
        try:
            exec(compile(job["prompt"], "prompt", "exec", dont_inherit=True), namespace)
        except Exception:  # a prompt may be text, or a function without a body
            namespace.clear()
            namespace.update(__name__=_TESTS, __builtins__=builtins)
    for name in job["modules"]:
        if port.ask("has", name):
            namespace.setdefault(name, __import__(name))
    trusted = set(namespace) - {job["entry_point"]}
    for name in job["names"]:
        free = name not in trusted and not hasattr(builtins, name)
        if name in job["shadows"] or (free and port.ask("has", name)):
            namespace[name] = port.lookup(name)
    if job["entry_point"]:
        namespace["__candidate__"] = port.lookup(job["entry_point"])
    exec(compile(job["setup"], "setup", "exec", dont_inherit=True), namespace)
    port.classes = {
        value.__qualname__: value
        for value in namespace.values()
        if isinstance(value, type) and value.__module__ == _TESTS
    }
    return namespace


class CheckerPort(Port):
    def __init__(self, fd: int, pid: int, time_limit: float) -> None:
        super().__init__(fd)
        self._pid, self._limit = pid, time_limit
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._exceptions: dict[int, type[BaseException]] = {}
        self._cpu = self._wall = 0.0

    def restart_clock(self) -> None:
        self._cpu, self._wall = cpu_seconds(self._pid), time.monotonic()

    def hear(self) -> Any:
        """The candidate's next message, within what is left of its time: `time_limit` of processor, twice that of day.

        On a busy machine the clock on the wall runs faster than the candidate can.
        """
        try:
            while not self._poll.poll(_TICK * 1000):
                wall = time.monotonic() - self._wall
                if wall > 2 * self._limit or cpu_seconds(self._pid) - self._cpu > self._limit:
                    raise TimeUp(f"more than {self._limit:g} s")
            if time.monotonic() - self._wall > self._limit and cpu_seconds(self._pid) - self._cpu > self._limit:
                raise TimeUp(f"more than {self._limit:g} s")
            return self.receive()
        except (EOFError, OSError, ValueError, IndexError, StopIteration, RecursionError, UnicodeError):
            raise Gone("the candidate ended its process or broke the protocol") from None

    def ask(self, op: str, *values: Any) -> Any:
        refs, nodes, changeable = self.encode(values)
        try:
            self.send([op, refs, nodes])
        except OSError:
            raise Gone("the candidate ended its process") from None
        while True:
            message = self.hear()
            if message[0] != "ask":
                break
            self.send(self._serve(*message[1:]))
        if message[0] == "raised":
            raise self._exception(*message[1:])
        answer, nodes = message[1], message[2]
        old = {ref[0]: value for ref, value in zip(answer[1:], changeable, strict=False)}
        return self.decode(answer, nodes, old)[0][0]

    def lookup(self, name: str) -> Any:
        """The candidate's global `name`; where it imported a standard function of that name, the real one."""
        found = self.ask("name", name)
        if isinstance(found, Remote):
            module = found._origin
            if module in sys.stdlib_module_names and found._label == name and module != NAME:
                real = getattr(__import__(module, fromlist=["*"]), name, None)
                if real is not None:
                    return real
        return found

    def offer(self, value: Any) -> Node:
        if type(value).__module__ == _TESTS or callable(value) or hasattr(value, "__next__"):
            return ["ref", self.export(value)]
        raise NotData(f"the tests hand a {type(value).__name__} to the candidate, which cannot leave their process")

    def adopt(self, node: Node) -> Any:
        _, handle, kind, name, base = node
        if kind == "module" and name in sys.stdlib_module_names:
            return __import__(name)
        if kind == "exception":
            return self._exception_class(handle, name, base)
        remote = Remote(self, handle, kind, name, base, tainted=False)
        return _result(remote) if kind == "coroutine" else remote

    def home(self, value: Any) -> int | None:
        if type(value) is Remote:
            handle: int = value._handle
            return handle
        if isinstance(value, type) and issubclass(value, BaseException):
            return next((handle for handle, known in self._exceptions.items() if known is value), None)
        return None

    def _serve(self, op: str, refs: Any, nodes: Any) -> Any:
        """Let the candidate use what it was handed: call, iterate, read public attributes of the tests' objects."""
        try:
            (target, *rest), _ = self.decode(refs, nodes, {})
            if id(target) not in self.exports:
                raise TypeError("not an object of the tests")
            match op:
                case "call":
                    result = target(*rest[0], **rest[1])
                case "iter":
                    result = iter(target)
                case "next":
                    result = next(target)
                case "getattr" if type(target).__module__ == _TESTS and not rest[0].startswith("_"):
                    result = getattr(target, rest[0])
                case _:
                    raise AttributeError(f"{op} {rest[:1]}")
            return ["ok", *self.encode([result])[:2]]
        except Exception as error:
            kind = next(c.__name__ for c in type(error).__mro__ if c.__module__ == "builtins")
            return ["raised", kind, str(error)]

    def _exception(self, kinds: Any, handle: int, refs: Any, nodes: Any) -> BaseException:
        kind = self._known_exception(kinds, handle)
        error = BaseException.__new__(kind)
        error.args = tuple(self.decode(refs, nodes, {})[0])
        return error

    def _known_exception(self, kinds: Any, handle: int) -> type[BaseException]:
        own = self.classes.get(kinds[0][1]) if kinds[0][0] == NAME else None
        if own is not None and issubclass(own, BaseException):
            return own
        for module, name in kinds:
            if module in sys.stdlib_module_names:
                found = getattr(__import__(module, fromlist=["*"]), name, None)
                if isinstance(found, type) and issubclass(found, BaseException):
                    return found if [module, name] == kinds[0] else self._exception_class(handle, kinds[0][1], found)
        return Exception

    def _exception_class(self, handle: int, name: str, base: Any) -> type[BaseException]:
        if handle not in self._exceptions:
            parent = getattr(builtins, base, Exception) if isinstance(base, str) else base
            self._exceptions[handle] = type(str(name), (parent,), {})
        return self._exceptions[handle]


class Remote:
    """An object of the candidate's. `_tainted`: the tests' values went into it."""

    __slots__ = ("_handle", "_kind", "_label", "_origin", "_port", "_tainted")

    def __init__(self, port: CheckerPort, handle: int, kind: str, label: str, origin: str, tainted: bool) -> None:
        for name, value in zip(Remote.__slots__, (handle, kind, label, origin, port, tainted), strict=True):
            object.__setattr__(self, name, value)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._port.ask("call", self, list(arguments), keywords)

    def __getattr__(self, name: str) -> Any:
        return self._port.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._port.ask("setattr", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._port.ask("operator", "getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._port.ask("operator", "setitem", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self._port.ask("operator", "delitem", self, key)

    def __iter__(self) -> Iterator[Any]:
        self._refuse_taint("iterate")
        iterator = self._port.ask("builtin", "iter", self)
        count, more = 1, True
        while more:
            items, more = self._port.ask("items", iterator, count)
            yield from items
            count = min(2 * count, _BATCH)

    def __next__(self) -> Any:
        self._refuse_taint("iterate")
        return self._port.ask("builtin", "next", self)

    def __contains__(self, item: Any) -> bool:
        return any(item is other or item == other for other in self)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and bool(self._port.ask("builtin", "isinstance", value, self))

    def __enter__(self) -> Any:
        return self._port.ask("getattr", self, "__enter__")()

    def __exit__(self, *details: object) -> Any:
        return self._port.ask("getattr", self, "__exit__")(None, None, None)

    def __hash__(self) -> int:
        return hash(self._handle)

    def __eq__(self, other: object) -> bool:
        return self._compare("eq", other, False)

    def __ne__(self, other: object) -> bool:
        return self._compare("ne", other, True)

    def _compare(self, name: str, other: object, otherwise: bool) -> bool:
        if not isinstance(other, Remote) or self._tainted or other._tainted:
            return otherwise
        return bool(self._port.ask("operator", name, self, other))

    def _refuse_taint(self, what: str) -> None:
        if self._tainted:
            raise TypeError(f"cannot {what} an object of the candidate that was combined with a value of the tests")


async def _result(coroutine: Remote) -> Any:
    """Stands for a coroutine of the candidate's, which runs over there from start to end."""
    return coroutine._port.ask("await", coroutine)


def _order(name: str) -> Callable[..., bool]:
    def method(self: Remote, other: object) -> bool:
        if not isinstance(other, Remote) or self._tainted or other._tainted:
            raise TypeError("an object of the candidate has no order among the values of the tests")
        return bool(self._port.ask("operator", name, self, other))

    return method


def _binary(name: str, reflected: bool) -> Callable[..., Any]:
    def method(self: Remote, other: object) -> Any:
        left, right = (other, self) if reflected else (self, other)
        if isinstance(other, Remote) and not (self._tainted or other._tainted):
            return self._port.ask("operator", name, left, right)
        result = self._port.ask("opaque", name, left, right)
        assert isinstance(result, Remote)
        object.__setattr__(result, "_tainted", True)
        return result

    return method


def _unary(op: str, name: str) -> Callable[..., Any]:
    def method(self: Remote, *arguments: Any) -> Any:
        self._refuse_taint(name)
        return self._port.ask(op, name, self, *arguments)

    return method


for _name in ("lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", _order(_name))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lshift", "rshift", "xor"):
    setattr(Remote, f"__{_name}__", _binary(_name, reflected=False))
    setattr(Remote, f"__r{_name}__", _binary(_name, reflected=True))
for _name in ("and", "or"):
    setattr(Remote, f"__{_name}__", _binary(f"{_name}_", reflected=False))
    setattr(Remote, f"__r{_name}__", _binary(f"{_name}_", reflected=True))
for _name in ("len", "bool", "int", "float", "complex", "str", "repr", "abs", "round", "reversed"):
    setattr(Remote, f"__{_name}__", _unary("builtin", _name))
for _name in ("neg", "pos", "invert", "index"):
    setattr(Remote, f"__{_name}__", _unary("operator", _name))


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used; 0 where it is gone."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    except OSError:
        return 0.0
    try:
        fields = os.read(fd, 1024).rpartition(b")")[2].split()
    finally:
        os.close(fd)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if len(fields) > 12 else 0.0


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:500].removesuffix(": ")
    except BaseException:
        return type(error).__name__
