"""The tests' side: runs them, and reaches the candidate only by questions whose answers are plain data.

The rule: tests, their setup and what they expect are here, where the candidate cannot reach; what crosses the line is
data of a closed set of types, by value, and built here from types of our own. An object that is not data is a `Remote`.
It can be called, read, iterated and passed back, but it equals nothing the tests bring along, and an operator with such
an operand gives a `Remote` that no comparison or conversion accepts: otherwise an object of the candidate's would be
shown the expected value and asked whether it is right. Whatever the candidate sends that is not an answer fails the
test that asked, and never is an error: that word is for tests that nobody could pass here.

What holds over there holds here: identity, hashes and equality among the candidate's own objects, isinstance and
issubclass among its own classes, copies, docstrings, signatures (without annotations), generators, exceptions with
their attributes, causes and bases. What the tests do to a list, dict or set that an object has handed out reaches it
before the next question, for the last 8 answers of up to 1000 items. random.seed, a redirected sys.stdout or sys.stdin
hold for calls to the candidate as well. What a call changes in its arguments is seen from the next statement of the
tests on, so that `assert f(xs) == sorted(xs)` sorts what f was given, and not what f has made of it.

What cannot pass: an exception that a context manager of the candidate's swallows; an AssertionError in a function that
the tests have handed to the candidate, whoever catches it; SystemExit; StopIteration out of a call, which would end a
`map` of the tests early; text of the candidate's that the tests give to exec, and to eval unless it is arithmetic.

Not covered: a test that derives a class from the candidate's (an error), `type(x) is C`, dataclasses.asdict and others
that look at the type of an object, `in` where a class defines it without being iterable, a list of an object's that
the candidate changes after it was handed out, attributes set on its modules, mock.patch of what the candidate calls,
objects of libraries as arguments, output of generators, the state of random after the candidate has used it.
"""

from __future__ import annotations

import _thread
import builtins
import os
import select
import sys

from kitae.verifiers.runners.candidate import KINDS, NAME
from kitae.verifiers.runners.meter import Clock
from kitae.verifiers.runners.wire import NotData, Port, frame_size, hides, pack, shareable, unpack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from kitae.verifiers.runners.meter import Meter
    from kitae.verifiers.runners.wire import Node

_BATCH = 256  # items of a remote iterator that travel at once, at most
_SINGLES = 32  # items of a remote generator that come one by one before they come in batches
_MAX_LOANS, _SMALL = 8, 1000  # containers of the candidate's that are watched, and items in all of one answer
_TESTS = "tests"  # the module name of the tests
_OURS = __name__.rpartition(".")[0]
_TICK = 0.05  # seconds between two looks at what the candidate uses
_EXCEPTIONS = {  # modules whose exceptions are known by their names
    *(
        "builtins",
        "decimal",
        "json.decoder",
        "queue",
        "_queue",
        "struct",
        "binascii",
        "re",
        "statistics",
        "dataclasses",
    ),
    *("asyncio.exceptions", "concurrent.futures._base", "_csv", "configparser", "subprocess", "graphlib", "ipaddress"),
}
_ARITHMETIC = {
    *(
        "Expression",
        "Constant",
        "BinOp",
        "UnaryOp",
        "Add",
        "Sub",
        "Mult",
        "Div",
        "FloorDiv",
        "Mod",
        "Pow",
        "UAdd",
        "USub",
    ),
    *(
        "BitAnd",
        "BitOr",
        "BitXor",
        "LShift",
        "RShift",
        "Invert",
        "Not",
        "BoolOp",
        "And",
        "Or",
        "Compare",
        "Eq",
        "NotEq",
    ),
    *("Lt", "LtE", "Gt", "GtE", "In", "NotIn", "Is", "IsNot", "List", "Tuple", "Set", "Dict", "Load"),
}


class TimeUp(BaseException):
    """The candidate did not answer in time; a BaseException, so that no test can catch it."""


class Gone(BaseException):
    """The candidate has ended or broken the protocol."""


def check(fd: int, meter: Meter, job: dict[str, Any], report: Callable[[str, str], None]) -> None:
    """Wait for the candidate to load, then run `job["tests"]` one by one and report on each as it ends.

    Reports: "loaded" or "unloadable" once; then "passed" or "failed" for each test. "timeout" and "gone" end it all:
    the test that was running has failed, and those after it have not been run. "error": the tests are at fault.
    """
    port = CheckerPort(fd, meter, job["time_limit"])
    try:
        port.restart_clock()
        status, rest = port.trust(port.hear_loaded)
    except (TimeUp, Gone) as end:
        report("timeout" if isinstance(end, TimeUp) else "unloadable", str(end))
        return
    if status != "loaded":
        report("unloadable", rest)
        return
    port.common = set(rest)
    report("loaded", "")
    texts = "\n".join([job["setup"], *job["tests"]])
    namespace: dict[str, Any] = {}
    for test in (None, *job["tests"]):
        port.restart_clock()
        status, detail = "passed", ""
        try:
            if test is None:
                namespace = make_namespace(port, job, texts)
                continue
            exec(compile(test, "tests", "exec", dont_inherit=True), namespace)
        except NotData as problem:
            status, detail = "error", str(problem)
        except BaseException as error:
            status, detail = _judge(port, error, job["imports"])
            if test is None and status == "failed":
                status, detail = "broken", f"the setup of the tests raised {detail}"
        if port.lost:  # even if the candidate has caught it
            status, detail, port.lost = "failed", port.lost, ""
        if port.end is not None:  # even if a test has caught it
            status, detail = "timeout" if isinstance(port.end, TimeUp) else "gone", str(port.end)
        report(status, detail)
        if status not in ("passed", "failed"):
            return


def _judge(port: CheckerPort, error: BaseException, imports: list[str]) -> tuple[str, str]:
    """What an exception says: that the candidate has failed, or that the tests cannot be run here."""
    detail = _describe(error)
    if not _is_own(error) or isinstance(error, SystemExit):
        return "failed", detail
    if isinstance(error, ImportError) and (not port.used or str(error.name).partition(".")[0] in imports):
        return "error", f"the tests must be able to import what they need (see the option packages), got {detail}"
    if not port.used and not isinstance(error, AssertionError | NameError):
        return "error", f"the tests must reach the response, but raised {detail}"
    return "failed", detail


def _is_own(error: BaseException) -> bool:
    """Whether an exception came up in the code of the tests, and not while the candidate was asked."""
    step, ours = error.__traceback__, []
    while step is not None:
        ours.append(str(step.tb_frame.f_globals.get("__name__")).startswith(_OURS))
        step = step.tb_next
    return True not in ours[ours.index(False) :] if False in ours else False


def _attend(port: CheckerPort, texts: str, constants: list[str]) -> None:
    """Prepare modules that the tests name: random seeds hold for the candidate too, no failure that unittest has met is
    lost, and nothing that the candidate says is run as a program.
    """
    if "seed" in texts:
        _share_seeds(port)
    if "unittest" in texts:
        _keep_failures()
    if "pickle" in texts:
        _unpickle_data_alone()
    for name in ("eval", "exec", "compile"):
        if name in texts:
            port.constants = set(constants)
            port.namespace[name] = _wary(port, name)


def _share_seeds(port: CheckerPort) -> None:
    import random

    seed = random.seed

    def both(*arguments: Any, **keywords: Any) -> None:
        seed(*arguments, **keywords)
        port.ask("seed", list(arguments), keywords)

    random.seed = both


def _keep_failures() -> None:
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

    def main(*arguments: Any, **keywords: Any) -> Any:
        return unittest.TestProgram(*arguments, **(keywords | {"exit": False}))

    unittest.TextTestRunner.run = checked  # type: ignore[method-assign]
    unittest.main = main  # type: ignore[assignment]


def _unpickle_data_alone() -> None:
    import io
    import pickle

    class Careful(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if module != _TESTS:
                raise pickle.UnpicklingError(f"{module}.{name} is no data")
            return super().find_class(module, name)

    def load(file: Any, **keywords: Any) -> Any:
        return Careful(file, **keywords).load()

    pickle.Unpickler, pickle.load = Careful, load  # type: ignore[misc]
    pickle.loads = lambda data, /, **keywords: load(io.BytesIO(data), **keywords)


def _wary(port: CheckerPort, name: str) -> Callable[..., Any]:
    """One of eval, exec and compile for the tests, which runs no text that may be the candidate's.

    As long as the candidate has not answered with text, none can be; later on, arithmetic is allowed.
    """
    real = getattr(builtins, name)

    def run(source: Any, *rest: Any, **keywords: Any) -> Any:
        foreign = port.told and isinstance(source, str | bytes | bytearray) and source not in (port.constants or ())
        if foreign and (name != "eval" or not _is_arithmetic(source)):
            raise TypeError(f"{name} of text that the candidate may have made")
        if name != "compile" and not rest:
            caller = sys._getframe(1)
            rest = (caller.f_globals, caller.f_locals)
        return real(source, *rest, **keywords)

    run.__wrapped__ = real  # type: ignore[attr-defined]
    return run


def _is_arithmetic(source: Any) -> bool:
    import ast

    return all(type(node).__name__ in _ARITHMETIC for node in ast.walk(ast.parse(source.strip(), mode="eval")))


def make_namespace(port: CheckerPort, job: dict[str, Any], texts: str) -> dict[str, Any]:
    """What the tests see: their own setup first, then built-ins and libraries, then what only the candidate can have.

    The prompt and the setup run here too, so that their helpers are the trusted ones and not the candidate's.
    """
    sys.modules[_TESTS] = sys.modules["__main__"] = module = type(sys)(_TESTS)  # where unittest.main() looks
    port.namespace = namespace = module.__dict__
    namespace["__builtins__"] = builtins
    if job["prompt"]:
        try:
            exec(compile(job["prompt"], "prompt", "exec", dont_inherit=True), namespace)
        except Exception:  # a prompt may be text, or a function without a body
            namespace.clear()
            namespace.update(__name__=_TESTS, __builtins__=builtins)
    _attend(port, texts, job["constants"])
    for name, (path, wanted) in job["library"].items():
        found = _import(path, wanted, name in job["aliases"])
        if found is not None:
            namespace.setdefault(name, found)
    trusted = set(namespace) - {job["entry_point"]}
    for name in job["names"]:
        free = name not in trusted and not hasattr(builtins, name)
        if name in job["shadows"] or (free and port.ask("has", name)):
            namespace[name] = port.lookup(name)
    if job["entry_point"]:
        namespace["__candidate__"] = port.lookup(job["entry_point"])
    namespace["__settle__"] = port.settle
    exec(compile(job["setup"], "setup", "exec", dont_inherit=True), namespace)
    return namespace


def _import(path: str, wanted: list[str], needed: bool) -> Any:
    """`"math:isclose"` or `"math"` from a library; None where it has not what the tests want of it."""
    module, _, name = path.partition(":")
    try:
        found: Any = __import__(module, fromlist=["*"])
    except ImportError as error:
        if needed:
            problem = f"the tests must be able to import what they need (see the option packages), got {error}"
            raise NotData(problem) from None
        return None
    found = getattr(found, name, None) if name else found
    return found if all(hasattr(found, attribute) for attribute in wanted) else None


class CheckerPort(Port):
    """`used`: the tests have reached the candidate. `told`: it has answered with text. `end`: it is over, whoever
    catches that. `lost`: an assertion that failed in the candidate's hands.
    """

    def __init__(self, fd: int, meter: Meter, time_limit: float) -> None:
        super().__init__(fd)
        os.set_blocking(fd, False)
        self._meter, self._limit = meter, time_limit
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(fd, select.POLLIN)
        self._writable.register(fd, select.POLLOUT)
        self._buffer = bytearray()
        self._exceptions: dict[int, type[BaseException]] = {}
        self._adopted: dict[int, Any] = {}
        self._twins: dict[int, tuple[Any, int]] = {}  # generators and coroutines that stand for the candidate's
        self._loans: list[
            tuple[list[Any], list[int], Any]
        ] = []  # values of the candidate's, their handles, as they were
        self._changes: list[tuple[list[Any], list[Node], dict[int, Any], list[Any]]] = []  # of arguments, not yet seen
        self._clock, self._looked = Clock(), 0.0
        self._turn = _thread.RLock()  # the tests may have threads
        self.namespace: dict[str, Any] = {}
        self.constants: set[str] | None = None  # texts of the tests, where they run any
        self.common: set[str] = set()  # names of classes that the candidate has too
        self.stdin, self.stdout = sys.stdin, sys.stdout
        self.used = self.told = False
        self.lost = ""
        self.end: TimeUp | Gone | None = None

    def restart_clock(self) -> None:
        self._meter.restart()
        self._clock, self._looked = Clock(), 0.0

    def trust(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Do something with what the candidate has sent. Where that fails, it has not answered, and that is the end."""
        try:
            return step(*arguments)
        except (TimeUp, Gone) as end:
            self.end = end
            raise
        except (OSError, EOFError):
            self.end = Gone("the candidate ended its process")
        except BaseException as problem:
            self.end = Gone(f"the candidate broke the protocol: {_describe(problem)}")
        raise self.end from None

    def _watch(self) -> None:
        """What is left of its time: `time_limit` of processor, twice that of day, as the clock on the wall runs faster
        than the candidate can on a busy machine.
        """
        now = self._clock.read()
        if now - self._looked < _TICK:
            return
        self._looked = now
        problem = self._meter.look()
        if now > 2 * self._limit or self._meter.seconds > self._limit:
            raise TimeUp(f"more than {self._limit:g} s")
        if problem:
            raise Gone(problem)

    def receive(self) -> Any:
        return unpack(self._take(frame_size(self._take(8))))

    def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            ready = self._readable.poll(_TICK * 1000)
            self._watch()
            if ready:
                part = os.read(self.fd, 2**16)
                if not part:
                    raise EOFError
                self._buffer += part
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    def send(self, message: Any) -> None:
        data = pack(message)
        view = memoryview(len(data).to_bytes(8, "little") + data)
        while view:
            try:
                view = view[os.write(self.fd, view) :]
            except BlockingIOError:
                self._writable.poll(_TICK * 1000)
                self._watch()

    def hear_loaded(self) -> tuple[str, Any]:
        """`("loaded", names of classes)`, or `("failed", why)`."""
        kind, rest = self.receive()
        return kind, [str(name) for name in rest] if kind == "loaded" else str(rest)

    def ask(self, op: str, *values: Any) -> Any:
        with self._turn:
            self._return_loans()
            self.used = self.used or op not in ("has", "name", "seed")
            refs, nodes, given = self.encode(values)
            return self.trust(self._accept, self._exchange([op, refs, nodes]), given)

    def _accept(self, message: Any, given: list[Any]) -> Any:
        """The result in an answer; what the call has changed in its arguments waits for the end of the statement."""
        answer, nodes, *handles = message
        (result, *_), mutable = self.decode(answer, nodes, lent=given)
        self._note(answer, nodes)
        if len(answer) > 1:
            old = {ref[0]: value for ref, value in zip(answer[1:], given, strict=True)}
            self._changes.append((answer, nodes, old, given))
        if handles:
            self._borrow(mutable, handles[0])
        return result

    def _note(self, refs: list[Any], nodes: list[Node]) -> None:
        """Remember that the candidate has told us some text, where the tests might run it."""
        if self.constants is not None:
            self.told = self.told or _has_text(refs) or any(_has_text(node[1:]) for node in nodes)

    def settle(self) -> None:
        """Show the tests what the calls of their last statement have changed in its arguments."""
        while self._changes:
            self.trust(self.decode, *self._changes.pop(0))

    def _exchange(self, question: list[Any]) -> Any:
        """The candidate's answer, after it has asked what it wants to know in turn."""
        if self.end is not None:
            raise self.end
        self.trust(self.send, question)
        while True:
            kind, message = self.trust(self._hear)
            if kind == "ask":
                self.trust(self.send, self._serve(*message))
            elif kind == "raised":
                raise self._escaped(question[0], self.trust(self._exception, *message))
            else:
                return message

    def _hear(self) -> tuple[str, Any]:
        kind, *message = self.receive()
        if kind not in ("ok", "raised", "ask") or (kind == "ask" and len(message) != 3):
            raise ValueError(f"an answer of kind {kind!r}")
        return kind, message

    def _escaped(self, op: str, error: BaseException) -> BaseException:
        """StopIteration that leaves a function would end a loop of the tests early: Python's generators do the same."""
        if isinstance(error, StopIteration | StopAsyncIteration) and op in ("call", "method"):
            return RuntimeError(f"the candidate raised {type(error).__name__}")
        return error

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
        """The candidate's global `name`."""
        found = self.ask("name", name)
        self.used = self.used or type(found) is not Remote  # a value, which the tests may look at without asking
        return found

    def class_of(self, name: str) -> Any:
        found = self.namespace[name]
        if self.name_of(found) != name:
            raise KeyError(name)
        return found

    def name_of(self, kind: type) -> str | None:
        name = kind.__qualname__
        mine = kind.__module__ == _TESTS and name in self.common and self.namespace.get(name) is kind
        return name if mine and shareable(kind) else None

    def offer(self, value: Any) -> Node:
        """What the candidate may call or iterate. What is a library's is its own one, by name, and never runs here."""
        ours = str(getattr(value, "__module__", "")).startswith(_OURS)
        path = _library_path(getattr(value, "__wrapped__", value) if ours else value)
        if path is not None:
            return ["library", *path]
        if ours:
            raise TypeError("what stands for a type of the candidate's cannot be handed to it")
        if type(value).__module__ == _TESTS or callable(value) or hasattr(value, "__next__"):
            return ["ref", self.export(value)]
        raise NotData(f"the tests hand a {type(value).__name__} to the candidate, which cannot leave their process")

    def adopt(self, node: Node) -> Any:
        if node[0] == "error":
            return self._exception_class(node[2])
        _, handle, kind = node
        if type(handle) is not int or kind not in KINDS:
            raise ValueError(f"a handle {handle!r} of kind {kind!r}")
        if handle not in self._adopted:  # one object over there is one object here: `C.A is C.A`
            self._adopted[handle] = self._stand_in(Remote(self, handle, kind, tainted=False))
        return self._adopted[handle]

    def _stand_in(self, remote: Remote) -> Any:
        if remote._kind not in ("generator", "coroutine"):
            return remote
        twin = _generator(remote) if remote._kind == "generator" else _result(remote)
        self._twins[id(twin)] = (twin, remote._handle)
        return twin

    def inert(self, node: Node) -> Any:
        """In an attribute of an object of the tests' there is only data: their methods must not run the candidate's."""
        return Inert(int(node[1]))

    def home(self, value: Any) -> int | None:
        if type(value) is Remote or type(value) is Inert:
            handle: int = value._handle
            return handle
        if id(value) in self._twins:
            return self._twins[id(value)][1]
        remote = vars(type(value)).get("_wire_home")
        if remote is not None and not isinstance(value, list | dict | set):
            return self.home(remote)
        if isinstance(value, BaseException):
            return vars(value).get("_handle")
        if isinstance(value, type) and issubclass(value, BaseException):
            return next((handle for handle, known in self._exceptions.items() if known is value), None)
        return None

    def _serve(self, op: str, refs: Any, nodes: Any) -> Any:
        """Let the candidate use what it was handed: call, iterate, read public attributes of the tests' objects."""
        (target, *rest), _ = self.trust(self.decode, refs, nodes)
        self._note(refs, nodes)
        try:
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
            if isinstance(error, AssertionError) and _is_own(error):
                self.lost = self.lost or _describe(error)
            kind = next(c.__name__ for c in type(error).__mro__ if c.__module__ == "builtins")
            try:
                return ["raised", kind, *self.encode(error.args)[:2]]
            except NotData:
                return ["raised", kind, [str(error)], []]

    def _exception(
        self, kinds: Any, refs: Any, nodes: Any, names: list[str], handle: int, cause: list[Any] | None
    ) -> BaseException:
        kind = self._exception_class(kinds)
        values = self.decode(refs, nodes)[0]
        self._note(refs, nodes)
        arguments, attributes = values[: len(values) - len(names)], values[len(values) - len(names) :]
        built_in: Any = next(base for base in kind.__mro__ if base.__module__ == "builtins")
        try:
            error: BaseException = built_in.__new__(kind, *arguments)
            built_in.__init__(error, *arguments)  # some keep a copy: the code of SystemExit
        except Exception:
            error = built_in.__new__(kind)
        error.args = tuple(arguments)
        vars(error).update({n: v for n, v in zip(names, attributes, strict=True) if not hides(kind, n)})
        vars(error)["_handle"] = handle
        if cause is not None:
            error.__cause__ = self._exception(*cause[1:])
        return error

    def _exception_class(self, kinds: list[Any]) -> type[BaseException]:
        """The class that stands for the first of `kinds`, whose bases are the others: a known one, or one made here."""
        module, name, handle = kinds[0]
        own = self.namespace.get(name) if module == NAME else None
        if isinstance(own, type) and issubclass(own, BaseException) and own.__module__ == _TESTS:
            return own
        if module in _EXCEPTIONS:
            found = getattr(__import__(module, fromlist=["*"]), name, None)
            safe = BaseException if module == "builtins" else Exception
            if isinstance(found, type) and issubclass(found, safe):
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


class Inert:
    """An object of the candidate's that can only be passed back."""

    __slots__ = ("_handle",)

    def __init__(self, handle: int) -> None:
        self._handle = handle


class Remote:
    # An object of the candidate's. `_tainted`: the tests' values went into it. A docstring would be taken for its own.

    __slots__ = ("_handle", "_kind", "_port", "_tainted")

    def __init__(self, port: CheckerPort, handle: int, kind: str, tainted: bool) -> None:
        for name, value in zip(Remote.__slots__, (handle, kind, port, tainted), strict=True):
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
        raise NotData("the tests derive a class from one of the candidate's, which cannot leave its process")

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

    def __exit__(self, *details: object) -> None:
        self._port.ask("getattr", self, "__exit__")(None, None, None)  # whatever it says, it swallows nothing of ours

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
        return Remote(self._port, result._handle, result._kind, tainted=True)

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


def _library_path(value: Any) -> tuple[str, str] | None:
    """Where a function, class or module of a library is to be found: `("builtins", "str.upper")`."""
    if isinstance(value, type(sys)):
        return (value.__name__, "") if value.__name__ in sys.stdlib_module_names else None
    path = getattr(value, "__qualname__", None)
    module = getattr(value, "__module__", None) or getattr(
        getattr(value, "__objclass__", None), "__module__", "builtins"
    )
    if not isinstance(path, str) or not isinstance(module, str) or module == _TESTS or module.startswith(_OURS):
        return None
    found: Any = sys.modules.get(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    same = found is value or (type(value) is type(len) and found == value)  # `dict.fromkeys` is made anew each time
    return (module, path) if found is not None and same else None


def _has_text(parts: list[Any]) -> bool:
    return any(type(part) is str or (type(part) is list and _has_text(part)) for part in parts)


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:500].removesuffix(": ")
    except BaseException:
        return type(error).__name__
