"""The candidate's side: runs its code, then answers the checker's requests on its functions and objects.

Nothing here is trusted: this process belongs to the candidate as soon as its code runs, and all it can do with the
connection is to answer a request with plain data.
"""

from __future__ import annotations

import _operator
import builtins
import sys

from kitae.sandbox.inside.wire import Port, shareable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from kitae.sandbox.inside.wire import Node
    from kitae.sandbox.sandbox_jobs import Order

NAME = "candidate"  # the module name of the code
KINDS = ("class", "method", "generator", "coroutine", "object")
_CUTS = 20  # attempts to find the end of the code in a text


def serve(fd: int, order: Order) -> None:
    """Load the code, report the result to the checker, and answer requests until the checker closes the connection."""
    port = CandidatePort(fd)
    sys.modules[NAME] = module = type(sys)(NAME)
    port.namespace = module.__dict__
    port.namespace["__builtins__"] = builtins
    try:
        furnish(port.namespace, order)
        prepare(port, order["setup"])
        exec(compile_first(order, "candidate.py"), port.namespace)
    except SystemExit as end:
        if end.code:
            port.send(["failed", f"SystemExit: {end.code}"[:500]])
            return
    except BaseException as error:
        port.send(["failed", f"{type(error).__name__}: {error}"[:500]])
        return
    port.send(["loaded", port.take_over()])
    while True:
        try:
            message = port.receive()
        except EOFError:
            return
        port.send(port.reply(message))


def prepare(port: CandidatePort, setup: list[str]) -> None:
    """Define names that the code may use: imports and classes. A part that fails may need the code, and is skipped."""
    for part in setup:
        try:
            exec(compile(part, "setup", "exec", dont_inherit=True), port.namespace)
        except BaseException:
            continue
    port.classes = {
        value.__qualname__: value
        for value in list(port.namespace.values())
        if isinstance(value, type) and value.__module__ == NAME
    }


def furnish(namespace: dict[str, Any], order: Order) -> None:
    """Define what scripts use without an import, and names of `typing` that the candidate uses without one."""

    def leave(code: Any = None) -> None:
        raise SystemExit(code)

    vars(builtins).update(exit=leave, quit=leave)
    if order.get("typing"):
        import typing

        namespace.update({name: getattr(typing, name) for name in order["typing"]})


def compile_first(order: Order, name: str) -> Any:
    """Compile the first variant that is valid Python, or if the order is loose, the longest valid head of one. Raises
    the first error if there is none."""
    problem: Exception | None = None
    for variant in order["variants"]:
        try:
            return compile(variant, name, "exec", dont_inherit=True)
        except Exception as error:  # SyntaxError, ValueError for NULs, RecursionError, MemoryError
            problem = problem or error
    head = max(map(_head, order["variants"]), key=len) if order.get("loose") else ""
    if head.strip():
        return compile(head, name, "exec", dont_inherit=True)
    assert problem is not None
    raise problem


def _head(text: str) -> str:
    """The lines of a text before the first that is not Python."""
    lines = text.split("\n")
    for _ in range(_CUTS):
        try:
            compile("\n".join(lines), "head", "exec", dont_inherit=True)
            return "\n".join(lines)
        except SyntaxError as error:
            del lines[max(0, min(error.lineno or 1, len(lines)) - 1) :]
        except Exception:
            break
        if not lines:
            break
    return ""


class CandidatePort(Port):
    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self.namespace: dict[str, Any] = {}
        self.classes: dict[str, type] = {}
        self._names: dict[type, str] = {}
        self.raised: dict[Any, Exception] = {}  # by iterator
        self._heard: list[Any] = []
        self._loop: Any = None

    def take_over(self) -> list[str]:
        """The names of classes that both ends have. If the code defines one anew, its definition counts."""
        self._names = {kind: name for name, kind in self.classes.items()}
        for name in self.classes:
            found = self.namespace.get(name)
            if isinstance(found, type):
                self.classes[name] = found
                self._names[found] = name
        return [name for name, kind in self.classes.items() if shareable(kind)]

    def class_of(self, name: str) -> Any:
        return self.classes[name]

    def name_of(self, kind: type) -> str | None:
        return self._names.get(kind)

    def reply(self, message: Any) -> Any:
        """Answer the request `[op, refs, nodes]`. The answer includes changes of the call's arguments.

        Containers that belong to an object of the candidate are lent: the answer has their handles, so that the checker
        can report what the tests do to them.
        """
        op, refs, nodes, *handles = message
        try:
            if op == "update":
                self.decode(refs, nodes, {ref[0]: self.exports[i] for ref, i in zip(refs, handles[0], strict=True)})
                return ["ok", [None], []]
            arguments, given = self.decode(refs, nodes)
            before = self.encode(given)[:2] if given and op in ("call", "method") else None
            result = getattr(self, f"do_{op}")(*arguments)
            if before is not None and self.encode(given)[:2] != before:
                answer = self.encode([result, *given])
            else:
                answer = self.encode([result], lent=given)
            if op in ("getattr", "method") and answer[2]:
                theirs = {id(value) for value in given}
                return ["ok", *answer[:2], [0 if id(v) in theirs else self.export(v) for v in answer[2]]]
            return ["ok", *answer[:2]]
        except BaseException as error:
            return self._problem(error)

    def _problem(self, error: BaseException) -> Any:
        """`["raised", kinds, args and attributes, nodes, names of the attributes, handle, cause, members]`"""
        kinds, handle = self._kinds(type(error)), self.export(error)
        try:
            names = [name for name in vars(error) if not name.startswith("_")]
            group = error.exceptions if isinstance(error, BaseExceptionGroup) else None
            arguments = error.args if group is None else error.args[:1]
            refs, nodes, _ = self.encode([*arguments, *(vars(error)[name] for name in names)])
            cause = self._problem(error.__cause__) if error.__cause__ is not None else None
            members = None if group is None else [self._problem(member) for member in group]
            return ["raised", kinds, refs, nodes, names, handle, cause, members]
        except BaseException:
            return ["raised", kinds, [], [], [], handle, None, None]

    def _kinds(self, kind: type) -> list[Any]:
        """`[module, name, handle, places of its bases in this list]` for a class and those above it."""
        line = kind.__mro__[:-1]
        return [
            [c.__module__, c.__qualname__, self.export(c), [line.index(b) for b in c.__bases__ if b in line]]
            for c in line
        ]

    def ask(self, op: str, *values: Any) -> Any:
        """Request an operation on an object of the tests that the candidate was given."""
        refs, nodes, _ = self.encode(values)
        self.send(["ask", op, refs, nodes])
        kind, *rest = self.receive()
        while kind not in ("ok", "raised"):  # the checker needs something of the candidate first
            self.send(self.reply([kind, *rest]))
            kind, *rest = self.receive()
        if kind == "raised":
            raise getattr(builtins, rest[0], RuntimeError)(*self.decode(rest[1], rest[2])[0])
        return self.decode(rest[0], rest[1])[0][0]

    def offer(self, value: Any) -> Node:
        """`["ref", handle, kind]`; `["error", handle, bases]` for a class of exceptions."""
        kind = type(value).__name__
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["error", self.export(value), self._kinds(value)]
        if isinstance(value, type):
            kind = "class"
        return ["ref", self.export(value), kind if kind in KINDS else "object"]

    def adopt(self, node: Node) -> Any:
        return Given(self, node[1])

    def resolve(self, node: Node) -> Any:
        """An object of a library that the tests name: `["library", "builtins", "str.upper"]`."""
        _, module, path = node
        found = sys.modules.get(module) or __import__(module, fromlist=["*"])
        for name in path.split(".") if path else []:
            found = getattr(found, name)
        return found

    def home(self, value: Any) -> int | None:
        return value._handle if type(value) is Given else None

    def do_name(self, name: str) -> Any:
        if name not in self.namespace:
            raise NameError(f"name {name!r} is not defined")
        return self.namespace[name]

    def do_has(self, name: str) -> bool:
        return name in self.namespace

    def do_call(self, function: Any, arguments: Any, keywords: Any) -> Any:
        return function(*arguments, **keywords)

    do_method = do_call

    def do_getattr(self, value: Any, name: str) -> Any:
        return getattr(value, name)

    def do_setattr(self, value: Any, name: str, new: Any) -> None:
        setattr(value, name, new)

    def do_delattr(self, value: Any, name: str) -> None:
        delattr(value, name)

    def do_operator(self, name: str, *operands: Any) -> Any:
        return getattr(_operator, name)(*operands)

    def do_builtin(self, name: str, *arguments: Any) -> Any:
        return getattr(builtins, name)(*arguments)

    def do_items(self, iterator: Any, count: int) -> Any:
        """Up to `count` further items, and whether there may be more. An error is raised after the items before it."""
        if iterator in self.raised:
            raise self.raised[iterator]
        items = []
        try:
            for item in iterator:
                items.append(item)
                if len(items) == count:
                    return [items, True]
        except Exception as error:
            if not items:
                raise
            self.raised[iterator] = error
            return [items, True]
        return [items, False]

    def do_send(self, generator: Any, value: Any) -> Any:
        return generator.send(value)

    def do_throw(self, generator: Any, kind: Any, arguments: Any) -> Any:
        return generator.throw(kind(*arguments))

    def do_copy(self, value: Any, deep: bool) -> Any:
        import copy

        return copy.deepcopy(value) if deep else copy.copy(value)

    def do_signature(self, function: Any) -> Any:
        import inspect

        found = inspect.signature(function).parameters.values()
        return [[p.name, int(p.kind), *([] if p.default is p.empty else [p.default])] for p in found]

    def do_seed(self, arguments: Any, keywords: Any) -> None:
        import random

        random.seed(*arguments, **keywords)

    def do_stdin(self, text: str) -> None:
        import io

        sys.stdin = io.StringIO(text)

    def do_capture(self) -> None:
        import io

        sys.stdout = io.StringIO()

    def do_captured(self) -> str:
        text = sys.stdout.getvalue() if hasattr(sys.stdout, "getvalue") else ""
        sys.stdout = sys.__stdout__
        return str(text)

    def do_await(self, awaitable: Any) -> Any:
        import asyncio

        async def wait() -> Any:
            return await awaitable

        self._loop = self._loop or asyncio.new_event_loop()  # one for all, as iterators and locks belong to theirs
        return self._loop.run_until_complete(wait())

    def do_anext(self, iterator: Any) -> Any:
        return self.do_await(anext(iterator))

    def do_listen(self) -> None:
        """From now on, keep what the code warns of and logs."""
        import logging
        import warnings

        class Keeper(logging.Handler):
            def emit(self, record: Any) -> None:
                heard.append(["log", record.name, record.levelno, record.getMessage()])

        def keep(message: Any, category: Any, filename: str, line: int, *_: Any) -> None:
            heard.append(["warning", str(message), category])

        heard = self._heard
        warnings.simplefilter("always")
        warnings.showwarning = keep  # type: ignore[assignment]
        logging.getLogger().addHandler(Keeper())
        logging.getLogger().setLevel(1)

    def do_heard(self) -> Any:
        heard = self._heard[:]
        self._heard.clear()
        return heard


class Given:
    """A proxy for an object of the tests, which the candidate can call and iterate."""

    def __init__(self, port: CandidatePort, handle: int) -> None:
        self.__dict__.update(_port=port, _handle=handle)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._port.ask("call", self, arguments, keywords)

    def __iter__(self) -> Any:
        return self._port.ask("iter", self)

    def __next__(self) -> Any:
        return self._port.ask("next", self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._port.ask("getattr", self, name)
