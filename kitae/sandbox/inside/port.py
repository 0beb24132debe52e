"""The checker's end of the wire: queries the candidate, and builds the answers from its own types."""

from __future__ import annotations

import _thread
import os
import select
import sys
from _json import encode_basestring_ascii

from kitae.sandbox.inside.candidate import KINDS, NAME
from kitae.sandbox.inside.failures import Failures
from kitae.sandbox.inside.remotes import Inert, Lengths, Remote, generator, result_of
from kitae.sandbox.inside.usage import Clock
from kitae.sandbox.inside.wire import NotData, Port, describe, frame_size, hides, pack, shareable, unpack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from kitae.sandbox.inside.usage import Usage
    from kitae.sandbox.inside.wire import Node

_MAX_LOANS, _SMALL = 8, 1000  # containers of the candidate that are watched, and items of all in one answer
TESTS = "tests"  # the module name of the tests
OURS = __name__.rpartition(".")[0]
_ASKING = (__name__, Remote.__module__)  # the modules by which tests reach the candidate
_CHANGING = {
    "call", "method", "setattr", "delattr", "throw", "await", "anext", "setitem", "delitem",
}  # fmt: skip
_MEMORY = 2**20  # bytes of the candidate's messages that are remembered
_TICK = 0.05  # seconds between two checks of the candidate's use
_EXCEPTIONS = {  # modules whose exceptions are looked up by name
    "_csv", "_queue", "asyncio.exceptions", "binascii", "builtins", "concurrent.futures._base", "configparser",
    "dataclasses", "decimal", "graphlib", "ipaddress", "json.decoder", "queue", "re", "statistics", "struct",
    "subprocess",
}  # fmt: skip


class TimeUp(BaseException):
    """The candidate did not answer in time. It is a BaseException so that no test catches it."""


class Gone(BaseException):
    """The candidate has ended or broken the protocol."""


class CheckerPort(Port):
    """The checker's connection to the candidate.

    `used`: whether the tests have reached the candidate, so that what they compute may be its text. `end`: why the
    candidate is no longer available, even if a test has caught the exception. `hearing`: whether warnings and logs of
    the candidate are passed on to the tests.
    """

    def __init__(self, fd: int, usage: Usage, time_limit: float) -> None:
        super().__init__(fd)
        os.set_blocking(fd, False)
        self._usage, self._limit = usage, time_limit
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(fd, select.POLLIN)
        self._writable.register(fd, select.POLLOUT)
        self._buffer, self._said = bytearray(), bytearray()
        self._exceptions: dict[int, type[BaseException]] = {}
        self._adopted: dict[int, Any] = {}
        self._twins: dict[int, tuple[Any, int]] = {}  # proxies of generators and coroutines, with the object's handle
        # The candidate's values, their handles, and their encoded content when they were lent.
        self._loans: list[tuple[list[Any], list[int], Any]] = []
        # Changes of arguments that the tests do not see yet.
        self._changes: list[tuple[list[Any], list[Node], dict[int, Any], list[Any]]] = []
        self._clock, self._looked = Clock(), 0.0
        self._operable: bool | None = False  # whether objects in the answer that is decoded take operands of the tests
        self._turn = _thread.RLock()  # the tests may use threads
        self._started_in = (os.getpid(), _thread.get_ident())
        self.namespace: dict[str, Any] = {}
        self.common: set[str] = set()  # names of classes that both ends have
        self.stdin, self.stdout = sys.stdin, sys.stdout
        self.used = False
        self.empty: Any = None  # the class of numpy arrays without elements, once the tests use numpy
        self.failures = Failures()
        self.lengths = Lengths()
        self.hearing = False
        self.end: TimeUp | Gone | None = None

    def restart_clock(self) -> None:
        self._usage.restart()
        self._clock, self._looked = Clock(), 0.0

    def trust(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Process what the candidate has sent. If that fails, it has not answered properly, which ends the check."""
        try:
            return step(*arguments)
        except (TimeUp, Gone) as end:
            self.end = end
            self.failures.note(end)
            raise
        except (OSError, EOFError):
            self.end = Gone("the candidate ended its process")
        except BaseException as problem:
            self.end = Gone(f"the candidate broke the protocol: {describe(problem)}")
        self.failures.note(self.end)
        raise self.end from None

    def _watch(self) -> None:
        """Raise if a limit is broken. The limit on the clock is twice that of processor time, because on a busy machine
        the clock runs faster than the candidate."""
        now = self._clock.read()
        if now - self._looked < _TICK:
            return
        self._looked = now
        problem = self._usage.look()
        if now > 2 * self._limit or self._usage.seconds > self._limit:
            raise TimeUp(f"more than {self._limit:g} s")
        if problem:
            raise Gone(problem)

    def receive(self) -> Any:
        message = self._take(frame_size(self._take(8)))
        self._said += message[: max(0, _MEMORY - len(self._said))]
        return unpack(message)

    def has_said(self, text: str) -> bool:
        """Whether the candidate has sent a text, as far as that is remembered."""
        return encode_basestring_ascii(text).encode() in self._said

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

    def receive_loaded(self) -> tuple[str, Any]:
        """`("loaded", names of classes)`, or `("failed", why)`."""
        kind, rest = self.receive()
        self._said.clear()
        return kind, [str(name) for name in rest] if kind == "loaded" else str(rest)

    def ask(self, op: str, *values: Any) -> Any:
        with self._turn:
            self._return_loans()
            if _changes(op, *values):
                self.lengths.changed()
            self.used = self.used or op not in ("has", "name", "seed")
            refs, nodes, given = self.encode(values)
            self.failures.asking(True)
            answer = self._exchange([op, refs, nodes])
            self.failures.asking(False)
            self._operable = _makes_operable(op, *values)
            try:
                return self.trust(self._accept, answer, given)
            finally:
                self._operable = False

    def _accept(self, message: Any, given: list[Any]) -> Any:
        """The result in an answer. Changes of the call's arguments are kept until the end of the statement."""
        answer, nodes, *handles = message
        (result, *_), mutable = self.decode(answer, nodes, lent=given)
        if len(answer) > 1:
            old = {ref[0]: value for ref, value in zip(answer[1:], given, strict=True)}
            self._changes.append((answer, nodes, old, given))
        if handles:
            self._borrow(mutable, handles[0])
        return result

    def hear(self) -> None:
        """Warn and log as the candidate has done in its last call."""
        if not self.hearing or self.end is not None:
            return
        import logging
        import warnings

        for kind, *said in self.ask("heard"):
            if kind == "warning":
                text, category = said
                warned = isinstance(category, type) and issubclass(category, Warning)
                warnings.warn_explicit(str(text), category if warned else UserWarning, NAME, 0, registry={})
            else:
                name, level, text = said
                logger = logging.getLogger(str(name))
                if logger.isEnabledFor(int(level)):
                    logger.handle(logger.makeRecord(str(name), int(level), NAME, 0, str(text), (), None))

    def settle(self) -> bool:
        """Apply the changes that the calls of the last statement made to their arguments."""
        while self._changes:
            self.trust(self.decode, *self._changes.pop(0))
        return True

    def _exchange(self, question: list[Any]) -> Any:
        """The candidate's answer, after serving the candidate's own requests."""
        if self.end is not None:
            raise self.end
        self.trust(self.send, question)
        while True:
            kind, message = self.trust(self._receive_answer)
            if kind == "ask":
                self.trust(self.send, self._serve(*message))
            elif kind == "raised":
                raise self._escaped(question, self.trust(self._exception, *message))
            else:
                return message

    def _receive_answer(self) -> tuple[str, Any]:
        kind, *message = self.receive()
        if kind not in ("ok", "raised", "ask") or (kind == "ask" and len(message) != 3):
            raise ValueError(f"an answer of kind {kind!r}")
        return kind, message

    def _escaped(self, question: list[Any], error: BaseException) -> BaseException:
        """Replace an exception that would end more than the request: a loop, a generator, a thread or a process of the
        tests would take it for its own end, and pass. Only `next` and the like may say that an iterator has ended."""
        op, refs, _ = question
        asked = op in ("send", "throw") or (op == "builtin" and refs[0] == "next")
        ends = isinstance(error, GeneratorExit) or (isinstance(error, StopIteration) and not asked)
        ends = ends or (isinstance(error, StopAsyncIteration) and op != "anext")
        aside = (os.getpid(), _thread.get_ident()) != self._started_in  # in a thread or a fork of the tests
        if ends or (aside and isinstance(error, SystemExit)):
            return RuntimeError(f"the candidate raised {type(error).__name__}")
        return error

    def _borrow(self, values: list[Any], handles: list[int]) -> None:
        """Watch containers that belong to an object of the candidate: the last few, if they are small."""
        pairs = [(value, handle) for value, handle in zip(values, handles, strict=True) if handle]
        if pairs and sum(len(value) for value, _ in pairs if type(value).__module__ != TESTS) <= _SMALL:
            lent = [value for value, _ in pairs]
            self._loans = [*self._loans[1 - _MAX_LOANS :], (lent, [h for _, h in pairs], self.encode(lent)[:2])]

    def _return_loans(self) -> None:
        """Send the candidate what the tests have done to its containers: `t.items.append(2)`."""
        for i, (values, handles, before) in enumerate(self._loans):
            refs, nodes, _ = self.encode(values)
            if (refs, nodes) != before:
                self._loans[i] = (values, handles, (refs, nodes))
                self._exchange(["update", refs, nodes, handles])

    def lookup(self, name: str) -> Any:
        """The candidate's global `name`."""
        found = self.ask("name", name)
        self.used = self.used or type(found) is not Remote  # a value, which the tests can inspect without a request
        return found

    def class_of(self, name: str) -> Any:
        found = self.namespace[name]
        if self.name_of(found) != name:
            raise KeyError(name)
        return found

    def name_of(self, kind: type) -> str | None:
        name = kind.__qualname__
        mine = kind.__module__ == TESTS and name in self.common and self.namespace.get(name) is kind
        return name if mine and shareable(kind) else None

    def offer(self, value: Any) -> Node:
        """A node for an object that the candidate may call or iterate. An object of a library is sent by name, and the
        candidate uses its own one; it never runs here."""
        ours = str(getattr(value, "__module__", "")).startswith(OURS)
        path = _library_path(getattr(value, "__wrapped__", value) if ours else value)
        if path is not None:
            return ["library", *path]
        if ours:
            raise TypeError("what stands for a type of the candidate's cannot be handed to it")
        if type(value).__module__ == TESTS or callable(value) or hasattr(value, "__next__"):
            return ["ref", self.export(value)]
        raise NotData(f"the tests hand a {type(value).__name__} to the candidate, which cannot leave their process")

    def adopt(self, node: Node) -> Any:
        if node[0] == "error":
            return self._exception_class(node[2])
        _, handle, kind = node
        if type(handle) is not int or kind not in KINDS:
            raise ValueError(f"a handle {handle!r} of kind {kind!r}")
        if handle not in self._adopted:  # one object there is one proxy here: `C.A is C.A`
            self._adopted[handle] = self._stand_in(Remote(self, handle, kind))
        found = self._adopted[handle]
        if type(found) is Remote and found._operable is not False and self._operable is not None:
            object.__setattr__(found, "_operable", self._operable)
        return found

    def _stand_in(self, remote: Remote) -> Any:
        if remote._kind not in ("generator", "coroutine"):
            return remote
        twin = generator(remote) if remote._kind == "generator" else result_of(remote)
        self._twins[id(twin)] = (twin, remote._handle)
        return twin

    def array(self, value: Any) -> Any:
        elements: Any = getattr(value, "size", 1)
        return value if elements or self.empty is None else value.view(self.empty)

    def inert(self, node: Node) -> Any:
        """An attribute of a tests' object, which is data only: the tests' methods must not run the candidate's."""
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
        """Let the candidate use an object that it was given: call it, iterate it, read its public attributes."""
        self._operable = None
        (target, *rest), _ = self.trust(self.decode, refs, nodes)
        self._operable = False
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
                case "getattr" if type(target).__module__ == TESTS and not rest[0].startswith("_"):
                    result = getattr(target, rest[0])
                case _:
                    raise AttributeError(f"{op} {rest[:1]}")
            return ["ok", *self.encode([result])[:2]]
        except Exception as error:
            if isinstance(error, AssertionError) and is_own(error):
                self.failures.note(error)
            kind = next(c.__name__ for c in type(error).__mro__ if c.__module__ == "builtins")
            try:
                return ["raised", kind, *self.encode(error.args)[:2]]
            except NotData:
                return ["raised", kind, [str(error)], []]

    def _exception(
        self,
        kinds: Any,
        refs: Any,
        nodes: Any,
        names: list[str],
        handle: int,
        cause: list[Any] | None,
        members: list[list[Any]] | None = None,
    ) -> BaseException:
        kind = self._exception_class(kinds)
        values = self.decode(refs, nodes)[0]
        arguments, attributes = values[: len(values) - len(names)], values[len(values) - len(names) :]
        built_in: Any = next(base for base in kind.__mro__ if base.__module__ == "builtins")
        if members is not None:
            arguments = [str(arguments[0]), [self._exception(*member[1:]) for member in members]]
        try:
            error: BaseException = built_in.__new__(kind, *arguments)
            built_in.__init__(error, *arguments)  # some keep a copy of an argument, as SystemExit of its code
        except Exception:
            error = built_in.__new__(kind)
        error.args = tuple(arguments)
        vars(error).update({n: v for n, v in zip(names, attributes, strict=True) if not hides(kind, n)})
        vars(error)["_handle"] = handle
        if cause is not None:
            error.__cause__ = self._exception(*cause[1:])
        return error

    def _exception_class(self, kinds: list[Any], at: int = 0) -> type[BaseException]:
        """The class that represents one of `kinds`, whose bases are among those after it: a known one, or one made
        here."""
        module, name, handle, *bases = kinds[at]
        own = self.namespace.get(name) if module == NAME else None
        if isinstance(own, type) and issubclass(own, BaseException) and own.__module__ == TESTS:
            return own
        if module in _EXCEPTIONS:
            found = getattr(__import__(module, fromlist=["*"]), name, None)
            safe = BaseException if module == "builtins" else Exception
            if isinstance(found, type) and issubclass(found, safe):
                return found
        if handle not in self._exceptions:
            places = [place for place in (bases[0] if bases else [at + 1]) if at < place < len(kinds)]
            parents = [self._exception_class(kinds, place) for place in places] or [Exception]
            self._exceptions[handle] = type(str(name), tuple(parents), self._exception_methods())
        return self._exceptions[handle]

    def _exception_methods(self) -> dict[str, Any]:
        def read(error: BaseException, name: str) -> Any:
            if name.startswith("_") or "_handle" not in vars(error):
                raise AttributeError(name)
            return self.ask("getattr", error, name)

        def text(error: BaseException) -> Any:
            return self.ask("builtin", "str", error) if "_handle" in vars(error) else BaseException.__str__(error)

        return {"__getattr__": read, "__str__": text}


def is_own(error: BaseException) -> bool:
    """Whether an exception was raised in the code of the tests, and not during a request to the candidate."""
    step, ours = error.__traceback__, []
    while step is not None:
        ours.append(step.tb_frame.f_globals.get("__name__") in _ASKING)
        step = step.tb_next
    return True not in ours[ours.index(False) :] if False in ours else False


def _changes(op: str, *values: Any) -> bool:
    """Whether a request may change an object. To look at it does not, and neither does to take items from it."""
    return op in _CHANGING or (op == "operator" and values[0] in _CHANGING) or (op == "send" and values[1] is not None)


def _makes_operable(op: str, *values: Any) -> bool | None:
    """Whether the answer to a request takes operands of the tests: a class that the tests call by its name, an object
    that they make of it, and what operators make of that. Once an object was the answer to anything else, it never
    does, or a method could return its own object. None: the answer says nothing."""
    match op, values:
        case ("builtin", ["iter", *_]) | ("getattr", [_, "__class__"]):
            return None
        case ("name", [str(name)]) | ("getattr", [_, str(name)]):
            return name.lstrip("_")[:1].isupper()
        case "call", [Remote(_kind="class", _operable=operable), *_]:
            return bool(operable)
        case ("operator", [_, *operands]) | ("builtin", ["abs" | "round", *operands]) | ("copy", operands):
            return any(type(operand) is Remote and operand._operable for operand in operands)
        case _:
            return False


def _library_path(value: Any) -> tuple[str, str] | None:
    """The path of a library's function, class or module: `("builtins", "str.upper")`."""
    if isinstance(value, type(sys)):
        return (value.__name__, "") if value.__name__ in sys.stdlib_module_names else None
    path = getattr(value, "__qualname__", None)
    module = getattr(value, "__module__", None) or getattr(
        getattr(value, "__objclass__", None), "__module__", "builtins"
    )
    if not isinstance(path, str) or not isinstance(module, str) or module == TESTS or module.startswith(OURS):
        return None
    found: Any = sys.modules.get(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    same = found is value or (type(value) is type(len) and found == value)  # `dict.fromkeys` is a new object each time
    return (module, path) if found is not None and same else None
