"""The tests' side: runs them, and reaches the candidate only by questions whose answers are plain data.

An object that is not data is a `Remote` here. It can be called, read, iterated and passed back, but it equals nothing
the tests bring along, and an operator with such an operand gives a `Remote` that no comparison or conversion accepts:
otherwise an object of the candidate's would be shown the expected value and asked whether it is right.

What holds over there holds here: identity, hashes and equality among the candidate's own objects, isinstance and
issubclass among its own classes, copies, docstrings, signatures (without annotations), generators, exceptions with
their attributes, causes and bases. What the tests do to a list, dict or set that an object has handed out reaches it
before the next question, for the last 8 answers of up to 1000 items. random.seed, a redirected sys.stdout or sys.stdin
hold for calls to the candidate as well.

Not covered: a test that derives a class from the candidate's (an error), `type(x) is C`, dataclasses.asdict and others
that look at the type of an object, `in` where a class defines it without being iterable, a list of an object's that
the candidate changes after it was handed out, attributes set on its modules, mock.patch of what the candidate calls,
objects of libraries as arguments, output of generators, the state of random after the candidate has used it.
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
_SINGLES = 32  # items of a remote generator that come one by one before they come in batches
_MAX_LOANS, _SMALL = 8, 1000  # containers of the candidate's that are watched, and items in all of one answer
_TESTS = "tests"  # the module name of the tests
_TICK = 0.05  # seconds between two looks at a silent candidate's clock
_GLIMPSE = 0.25  # seconds between two looks at a clock, at most, while we are there


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
    texts = "\n".join([job["setup"], *job["tests"]])
    namespace: dict[str, Any] = {}
    for test in (None, *job["tests"]):
        port.restart_clock()
        status, detail = "passed", ""
        try:
            if test is None:
                _attend(port, texts)
                namespace = make_namespace(port, job)
                continue
            exec(compile(test, "tests", "exec", dont_inherit=True), namespace)
        except NotData as problem:
            status, detail = "error", str(problem)
        except BaseException as error:  # SystemExit too, where it comes from the candidate
            status, detail = _judge(port, error)
            if test is None and status == "failed":
                status, detail = "broken", f"the setup of the tests raised {detail}"
        if port.end is not None:  # even if a test has caught it
            status, detail = "timeout" if isinstance(port.end, TimeUp) else "gone", str(port.end)
        report(status, detail)
        if status not in ("passed", "failed"):
            return


def _judge(port: CheckerPort, error: BaseException) -> tuple[str, str]:
    """What an exception says: that the candidate has failed, or that the tests cannot be run here."""
    detail = _describe(error)
    if not _is_own(error):
        return "failed", detail
    if isinstance(error, SystemExit) and not error.code:
        return "passed", ""  # the good end of unittest.main()
    if isinstance(error, ImportError):
        return "error", f"the tests must be able to import what they need (see the option packages), got {detail}"
    if not port.used and not isinstance(error, AssertionError | NameError | SystemExit):
        return "error", f"the tests must reach the response, but raised {detail}"
    return "failed", detail


def _is_own(error: BaseException) -> bool:
    """Whether an exception came up in the code of the tests, and not while the candidate was asked."""
    step, ours = error.__traceback__, []
    while step is not None:
        ours.append(step.tb_frame.f_globals is globals())
        step = step.tb_next
    return True not in ours[ours.index(False) :] if False in ours else False


def _attend(port: CheckerPort, texts: str) -> None:
    """Let the tests' random seed hold for the candidate too, and no failure that unittest has met be lost."""
    if "seed" in texts:
        import random

        seed = random.seed

        def both(*arguments: Any, **keywords: Any) -> None:
            seed(*arguments, **keywords)
            port.ask("seed", list(arguments), keywords)

        random.seed = both
    if "unittest" in texts:
        import unittest

        run = unittest.TextTestRunner.run

        def checked(self: Any, test: Any) -> Any:
            result = run(self, test)
            if not result.testsRun:
                raise NotData("the tests must have something for unittest to run")
            problems = [*result.errors, *result.failures]
            if problems or result.unexpectedSuccesses:
                raise AssertionError(problems[0][1].strip().rpartition("\n")[2] if problems else "unexpected success")
            return result

        unittest.TextTestRunner.run = checked  # type: ignore[method-assign]


def make_namespace(port: CheckerPort, job: dict[str, Any]) -> dict[str, Any]:
    """What the tests see: their own setup first, then built-ins, then what only the candidate can have.

    The prompt and the setup run here too, so that their helpers are the trusted ones and not the candidate's.
    """
    sys.modules[_TESTS] = sys.modules["__main__"] = module = type(sys)(_TESTS)  # where unittest.main() looks
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
    """`used`: the tests have reached the candidate. `end`: it is over, whoever catches that."""

    def __init__(self, fd: int, pid: int, time_limit: float) -> None:
        super().__init__(fd)
        self._pid, self._limit = pid, time_limit
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._exceptions: dict[int, type[BaseException]] = {}
        self._adopted: dict[int, Any] = {}
        self._loans: list[
            tuple[list[Any], list[int], Any]
        ] = []  # values of the candidate's, their handles, as they were
        self._cpu, self._clock = 0.0, Clock()
        self.stdin, self.stdout = sys.stdin, sys.stdout
        self.used = False
        self.end: TimeUp | Gone | None = None

    def restart_clock(self) -> None:
        self._cpu, self._clock = cpu_seconds(self._pid), Clock()

    def hear(self) -> Any:
        """The candidate's next message, within what is left of its time: `time_limit` of processor, twice that of day.

        On a busy machine the clock on the wall runs faster than the candidate can.
        """
        if self.end is not None:
            raise self.end
        try:
            while not self._poll.poll(_TICK * 1000):
                if self._clock.read() > 2 * self._limit or cpu_seconds(self._pid) - self._cpu > self._limit:
                    raise TimeUp(f"more than {self._limit:g} s")
            if self._clock.read() > self._limit and cpu_seconds(self._pid) - self._cpu > self._limit:
                raise TimeUp(f"more than {self._limit:g} s")
            return self.receive()
        except TimeUp as end:
            self.end = end
            raise
        except (EOFError, OSError, ValueError, IndexError, StopIteration, RecursionError, UnicodeError):
            self.end = Gone("the candidate ended its process or broke the protocol")
            raise self.end from None

    def ask(self, op: str, *values: Any) -> Any:
        if self._loans:
            self._return_loans()
        self.used = self.used or op not in ("has", "name", "seed")
        refs, nodes, changeable = self.encode(values)
        answer, nodes, *handles = self._exchange([op, refs, nodes])
        old = {ref[0]: value for ref, value in zip(answer[1:], changeable, strict=False)}
        (result, *_), mutable = self.decode(answer, nodes, old)
        if handles:
            self._borrow(mutable, handles[0])
        return result

    def _exchange(self, question: list[Any]) -> Any:
        """The candidate's answer, after it has asked what it wants to know in turn."""
        if self.end is not None:
            raise self.end
        try:
            self.send(question)
        except OSError:
            self.end = Gone("the candidate ended its process")
            raise self.end from None
        while True:
            kind, *message = self.hear()
            if kind == "ask":
                self.send(self._serve(*message))
            elif kind == "raised":
                raise self._exception(*message)
            else:
                return message

    def _borrow(self, values: list[Any], handles: list[int]) -> None:
        """Remember containers that belong to an object of the candidate's; the last few, if they are small."""
        pairs = [(value, handle) for value, handle in zip(values, handles, strict=True) if handle]
        if pairs and sum(len(value) for value, _ in pairs if type(value).__module__ != _TESTS) <= _SMALL:
            lent = [value for value, _ in pairs]
            self._loans = [*self._loans[1 - _MAX_LOANS :], (lent, [h for _, h in pairs], self.encode(lent)[:2])]

    def _return_loans(self) -> None:
        """Tell the candidate what the tests have done to its containers: `t.items.append(2)`."""
        for i, (values, handles, before) in enumerate(self._loans):
            refs, nodes, _ = self.encode(values)
            if (refs, nodes) != before:
                self._loans[i] = (values, handles, (refs, nodes))
                self._exchange(["update", refs, nodes, handles])

    def lookup(self, name: str) -> Any:
        """The candidate's global `name`; where it imported a standard function of that name, the real one."""
        found = self.ask("name", name)
        if type(found) is Remote:
            module = found._origin
            if module in sys.stdlib_module_names and found._label == name and module != NAME:
                real = getattr(__import__(module, fromlist=["*"]), name, None)
                if real is not None:
                    return real
        else:
            self.used = True  # a value, which the tests may look at without asking
        return found

    def offer(self, value: Any) -> Node:
        if type(value).__module__ == _TESTS or callable(value) or hasattr(value, "__next__"):
            return ["ref", self.export(value)]
        raise NotData(f"the tests hand a {type(value).__name__} to the candidate, which cannot leave their process")

    def adopt(self, node: Node) -> Any:
        _, handle, kind, name, origin = node
        if kind == "module" and name in sys.stdlib_module_names:
            return __import__(name)
        if kind == "exception":
            return self._exception_class(origin)
        if handle not in self._adopted:  # one object over there is one object here: `C.A is C.A`
            remote = Remote(self, handle, kind, name, origin, tainted=False)
            self._adopted[handle] = _generator(remote) if kind == "generator" else remote
        remote = self._adopted[handle]
        return _result(remote) if kind == "coroutine" else remote

    def home(self, value: Any) -> int | None:
        if type(value) is Remote:
            handle: int = value._handle
            return handle
        if isinstance(value, BaseException):
            return vars(value).get("_handle")
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
            try:
                return ["raised", kind, *self.encode(error.args)[:2]]
            except NotData:
                return ["raised", kind, [str(error)], []]

    def _exception(
        self, kinds: Any, refs: Any, nodes: Any, names: list[str], handle: int, cause: list[Any] | None
    ) -> BaseException:
        kind = self._exception_class(kinds)
        values = self.decode(refs, nodes, {})[0]
        arguments, attributes = values[: len(values) - len(names)], values[len(values) - len(names) :]
        built_in: Any = next(base for base in kind.__mro__ if base.__module__ == "builtins")
        try:
            error: BaseException = built_in.__new__(kind, *arguments)
            built_in.__init__(error, *arguments)  # some keep a copy: the code of SystemExit
        except Exception:
            error = built_in.__new__(kind)
        error.args = tuple(arguments)
        vars(error).update({n: v for n, v in zip(names, attributes, strict=True) if not hasattr(BaseException, n)})
        vars(error)["_handle"] = handle
        if cause is not None:
            error.__cause__ = self._exception(*cause[1:])
        return error

    def _exception_class(self, kinds: list[Any]) -> type[BaseException]:
        """The class that stands for the first of `kinds`, whose bases are the others: a known one, or one made here."""
        module, name, handle = kinds[0]
        own = self.classes.get(name) if module == NAME else None
        if own is not None and issubclass(own, BaseException):
            return own
        if module in sys.stdlib_module_names and module != "unittest":  # which skips a test that raises its SkipTest
            found = getattr(__import__(module, fromlist=["*"]), name, None)
            if isinstance(found, type) and issubclass(found, BaseException):
                return found
        if handle not in self._exceptions:
            parent = self._exception_class(kinds[1:]) if len(kinds) > 1 else Exception
            self._exceptions[handle] = type(str(name), (parent,), self._exception_methods())
        return self._exceptions[handle]

    def _exception_methods(self) -> dict[str, Any]:
        def read(error: BaseException, name: str) -> Any:
            if name.startswith("_") or "_handle" not in vars(error):
                raise AttributeError(name)
            return self.ask("getattr", error, name)

        def say(error: BaseException) -> Any:
            return self.ask("builtin", "str", error) if "_handle" in vars(error) else BaseException.__str__(error)

        return {"__getattr__": read, "__str__": say}


class Remote:
    # An object of the candidate's. `_tainted`: the tests' values went into it. A docstring would be taken for its own.

    __slots__ = ("_handle", "_kind", "_label", "_origin", "_port", "_tainted")

    def __init__(self, port: CheckerPort, handle: int, kind: str, label: str, origin: str, tainted: bool) -> None:
        for name, value in zip(Remote.__slots__, (handle, kind, label, origin, port, tainted), strict=True):
            object.__setattr__(self, name, value)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        port = self._port
        op = "method" if self._kind == "method" else "call"
        if sys.stdin is not port.stdin:
            port.ask("stdin", sys.stdin.read())
        if sys.stdout is port.stdout:
            return port.ask(op, self, list(arguments), keywords)
        port.ask("capture")
        try:
            return port.ask(op, self, list(arguments), keywords)
        finally:
            if port.end is None:
                sys.stdout.write(port.ask("captured"))

    def __getattr__(self, name: str) -> Any:
        if name == "__signature__":
            return _signature(self._port.ask("signature", self))
        return self._port.ask("getattr", self, name)

    @property
    def __doc__(self) -> Any:  # type: ignore[override]
        return self._port.ask("getattr", self, "__doc__")

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        if self._kind == "class":
            return type
        found = self._port.ask("getattr", self, "__class__")
        return found if type(found) is Remote else Remote

    def __setattr__(self, name: str, value: Any) -> None:
        self._port.ask("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._port.ask("delattr", self, name)

    def __copy__(self) -> Any:
        return self._port.ask("copy", self, False)

    def __deepcopy__(self, memo: Any) -> Any:
        return self._port.ask("copy", self, True)

    def __mro_entries__(self, bases: Any) -> Any:
        raise NotData(f"the tests derive a class from the candidate's {self._label}, which cannot leave its process")

    def __getitem__(self, key: Any) -> Any:
        return self._port.ask("operator", "getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._port.ask("operator", "setitem", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self._port.ask("operator", "delitem", self, key)

    def __iter__(self) -> Iterator[Any]:
        self._refuse_taint("iterate")
        iterator = self._port.ask("builtin", "iter", self)
        if type(iterator) is not Remote:
            yield from iterator
            return
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
        return type(value) is Remote and bool(self._port.ask("builtin", "isinstance", value, self))

    def __subclasscheck__(self, value: Any) -> bool:
        return type(value) is Remote and bool(self._port.ask("builtin", "issubclass", value, self))

    def __enter__(self) -> Any:
        return self._port.ask("getattr", self, "__enter__")()

    def __exit__(self, *details: object) -> Any:
        return self._port.ask("getattr", self, "__exit__")(None, None, None)

    def __hash__(self) -> int:
        self._refuse_taint("hash")
        return int(self._port.ask("builtin", "hash", self))

    def __eq__(self, other: object) -> bool:
        return self._compare("eq", other, False)

    def __ne__(self, other: object) -> bool:
        return self._compare("ne", other, True)

    def _compare(self, name: str, other: object, otherwise: bool) -> bool:
        if type(other) is not Remote or self._tainted or other._tainted:
            return otherwise
        return bool(self._port.ask("operator", name, self, other))

    def _refuse_taint(self, what: str) -> None:
        if self._tainted:
            raise TypeError(f"cannot {what} an object of the candidate that was combined with a value of the tests")


def _generator(remote: Remote) -> Any:
    """Stands for a generator of the candidate's. Items come one by one at first, and later in batches."""
    port, count, more, singles = remote._port, 1, True, 0
    sent = None
    while more:
        if sent is not None or singles < _SINGLES:
            singles += 1
            try:
                items, sent = [port.ask("send", remote, sent)], None
            except StopIteration as end:
                return end.value
        else:
            items, more = port.ask("items", remote, count)
            count = min(2 * count, _BATCH)
        for i, item in enumerate(items):
            sent = yield item
            if sent is not None and i + 1 < len(items):
                raise NotData("the tests send a value to a generator of the candidate's that is already further on")
    return None


def _signature(parameters: list[list[Any]]) -> Any:
    """A signature without annotations, from names, kinds and defaults."""
    import inspect

    return inspect.Signature(
        [
            inspect.Parameter(name, inspect._ParameterKind(kind), default=default[0] if default else inspect._empty)
            for name, kind, *default in parameters
        ]
    )


async def _result(coroutine: Remote) -> Any:
    """Stands for a coroutine of the candidate's, which runs over there from start to end."""
    return coroutine._port.ask("await", coroutine)


def _order(name: str) -> Callable[..., bool]:
    def method(self: Remote, other: object) -> bool:
        if type(other) is not Remote or self._tainted or other._tainted:
            raise TypeError("an object of the candidate has no order among the values of the tests")
        return bool(self._port.ask("operator", name, self, other))

    return method


def _binary(name: str, reflected: bool) -> Callable[..., Any]:
    def method(self: Remote, other: object) -> Any:
        left, right = (other, self) if reflected else (self, other)
        if type(other) is Remote and not (self._tainted or other._tainted):
            return self._port.ask("operator", name, left, right)
        result = self._port.ask("opaque", name, left, right)
        assert type(result) is Remote
        return Remote(self._port, result._handle, result._kind, result._label, result._origin, tainted=True)

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
for _name in ("len", "bool", "int", "float", "complex", "str", "repr", "abs", "round", "reversed", "format"):
    setattr(Remote, f"__{_name}__", _unary("builtin", _name))
for _name in ("neg", "pos", "invert", "index"):
    setattr(Remote, f"__{_name}__", _unary("operator", _name))


class Clock:
    """Seconds on the wall since it was made, as far as it was read meanwhile: while we are stopped, it stands still."""

    def __init__(self) -> None:
        self._seconds, self._last = 0.0, time.monotonic()

    def read(self) -> float:
        now = time.monotonic()
        self._seconds += min(now - self._last, _GLIMPSE)
        self._last = now
        return self._seconds


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
